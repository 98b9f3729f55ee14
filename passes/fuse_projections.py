"""One GEMM for all projections of one input.

Before:  %q = linear(%x, %wq)              After:  %q, %k = linear(%x, %wq_and_1_more)
         %k = linear(%x, %wk)
         %a = grouped_linear(%z, %w1, %e)          %a, %b = grouped_linear(%z, %w1_and_1_more, %e)
         %b = grouped_linear(%z, %w3, %e)

The fused weight lists the sources of its parts, and what a rank reads of them, in node order; its
rows (for experts: the rows of each expert) are theirs, one part after the other. Saves a launch and
a read of the input for each projection but the first, and gives the GEMM more columns to spread
over cores.
Runs after fuse_attn_res, before fuse_kda. The grouped form with several results is transient:
fuse_epilogue turns it into one result. Weights of different dtypes stay separate GEMMs.
"""

from __future__ import annotations

from dataclasses import replace

from k3c.ir.edit import Index, count_ops
from k3c.ir.graph import Graph, Module, Node, Value, Weight, weight_of
from k3c.ir.pattern import Match, parse_pattern
from k3c.ir.refusal import Refusal
from k3c.ir.rewrite import Refused, Replacement, Rule, apply_rules
from k3c.passes.context import NO_DEAD_NODES, PassContext, absent

NAME = "fuse_projections"
REQUIRES = (NO_DEAD_NODES, absent("attn_res"))
ENSURES = ()
REQUIRED = False
ANCHORS: tuple[str, ...] = ()
_OPS = ("linear", "grouped_linear")


def _is_plain(node: Node) -> bool:
    """Whether a node is one projection, without addend or epilogue."""
    optional = node.op == "linear" and (len(node.operands) > 2 or "epilogues" in node.attrs)
    return node.op in _OPS and len(node.results) == 1 and not optional


def _same_input(first: Node, other: Node) -> bool:
    """Whether two projections read the same rows (and, for experts, the same routing)."""
    same = first.op == other.op and first.operands[0] == other.operands[0]
    same = same and first.attrs.get("first_expert") == other.attrs.get("first_expert")
    return same and first.operands[2:] == other.operands[2:]


def _group(index: Index, node: Node) -> list[int]:
    """Return the positions of the plain projections with the input and weight dtype of `node`."""
    nodes = index.graph.nodes
    return [
        position
        for position in index.read_by(node.operands[0])
        if _is_plain(nodes[position])
        and _same_input(node, nodes[position])
        and nodes[position].operands[1].type.dtype == node.operands[1].type.dtype
    ]


def _leads_a_group(match: Match) -> bool:
    group = _group(match.index, match.node("y")) if _is_plain(match.node("y")) else []
    return len(group) > 1 and group[0] == match.positions[0]


def _parts_are_weights(match: Match) -> Refusal | None:
    for position in _group(match.index, match.node("y")):
        value = match.index.graph.nodes[position].operands[1]
        if value.name not in match.index.weights:
            return Refusal("a computed matrix cannot be concatenated", f"%{value.name}")
    return None


def _fuse(match: Match) -> Replacement:
    index, first = match.index, match.node("y")
    positions = _group(index, first)
    nodes = [index.graph.nodes[position] for position in positions]
    weight = _concatenated(index, [index.weights[node.operands[1].name] for node in nodes])
    fused = replace(
        first,
        operands=(first.operands[0], weight.value, *first.operands[2:]),
        results=tuple(node.results[0] for node in nodes),
    )
    return Replacement((fused,), removes=tuple(positions[1:]), weights=(weight,))


def _concatenated(index: Index, parts: list[Weight]) -> Weight:
    first = parts[0].value
    *lead, _, columns = first.type.shape
    rows = sum(int(str(part.value.type.shape[-2])) for part in parts)
    name = index.fresh(f"{first.name}_and_{len(parts) - 1}_more")
    kind = replace(first.type, shape=(*lead, rows, columns))
    return weight_of(Value(name, kind), [p for part in parts for p in part.parts])


RULES = (
    Rule("same_input", parse_pattern("%y = linear(%x, %w)"), _fuse,
         _parts_are_weights, _leads_a_group),
    Rule("same_experts", parse_pattern("%y = grouped_linear(%x, %w, %experts)"), _fuse,
         _parts_are_weights, _leads_a_group,
         frozenset({"grouped_linear.first_expert", "grouped_linear.total_experts"})),
)  # fmt: skip


def expected(module: Module) -> int | None:
    """One match for each input that several projections read."""
    return sum(len(_inputs_of_several(graph)) for graph in module.graphs)


def _inputs_of_several(graph: Graph) -> dict[tuple[str, ...], list[Node]]:
    """Return the plain projections by input, where there are at least two."""
    groups: dict[tuple[str, ...], list[Node]] = {}
    for node in graph.nodes:
        if _is_plain(node):
            key = (node.op, node.operands[0].name, *(v.name for v in node.operands[2:]))
            groups.setdefault(key, []).append(node)
    return {key: nodes for key, nodes in groups.items() if len(nodes) > 1}


def run(module: Module, ctx: PassContext) -> Module:
    """Fuse the projections of every input."""
    for graph in module.graphs:
        ctx.log.refused += _mixed(graph)
    return apply_rules(module, RULES, ctx.log) if count_ops(module.graphs, _OPS) else module


def _mixed(graph: Graph) -> list[Refused]:
    """Refuse to join weights of different dtypes; each dtype gets a GEMM of its own."""
    found: list[Refused] = []
    for nodes in _inputs_of_several(graph).values():
        dtypes = sorted({str(node.operands[1].type.dtype) for node in nodes})
        if len(dtypes) > 1:
            value = nodes[0].operands[0].name
            reason = f"the weights that read %{value} have dtypes {' and '.join(dtypes)}"
            found.append(Refused(graph.name, "same_input", value, Refusal(reason)))
    return found
