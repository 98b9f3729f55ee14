"""One form for one meaning: what later passes match against.

Before:  %c = cast(%x) : <type of %x>          After:  (gone)
         %s = add(%later, %earlier)                    %s = add(%earlier, %later)
         two equal nodes                               one
         linear(...) {epilogues: (none)}               linear(...)
         nodes and weights that nothing reads          (gone)

A cast to a wider dtype and back goes too: it is exact. Saves nothing by itself.
Runs first.
"""

from __future__ import annotations

from dataclasses import replace

from k3c.ir.edit import drop_dead, merge_duplicates
from k3c.ir.graph import Graph, Module, Node, Value
from k3c.ir.ops import OPS
from k3c.ir.pattern import Match, parse_pattern
from k3c.ir.rewrite import Replacement, Rule, apply_rules
from k3c.passes.context import MODEL_LEVEL, NO_DEAD_NODES, PassContext

NAME = "canonicalize"
REQUIRES = (MODEL_LEVEL,)
ENSURES = (NO_DEAD_NODES,)
REQUIRED = False
ANCHORS: tuple[str, ...] = ()


def _same_as(match: Match) -> Value | None:
    """Return an earlier value that equals the cast's result, if there is one."""
    source, result = match["x"], match["y"]
    if source.type == result.type:
        return source
    inner = match.index.node_of(source, "cast")
    if inner is None:
        return None
    exact = source.type.dtype.bits >= result.type.dtype.bits
    return inner.operands[0] if exact and inner.operands[0].type == result.type else None


def _drop_cast(match: Match) -> Replacement:
    value = _same_as(match)
    assert value is not None, "the rule fires only where there is one"
    return Replacement((), later={match["y"].name: value})


RULES = (
    Rule(
        "identity_cast",
        parse_pattern("%y = cast(%x)"),
        _drop_cast,
        when=lambda match: _same_as(match) is not None,
    ),
)


def expected(module: Module) -> int | None:
    """No number of matches is expected: exported modules hold no casts."""
    return None


def run(module: Module, ctx: PassContext) -> Module:
    """Bring every graph to canonical form."""
    module = apply_rules(module, RULES, ctx.log)
    return replace(module, graphs=tuple(_tidy(graph) for graph in module.graphs))


def _tidy(graph: Graph) -> Graph:
    # Sorting operands makes more nodes equal, and merged nodes sort anew: at most a few rounds.
    while True:
        place = _places(graph)
        nodes = tuple(_sorted_operands(_explicit_only(n), place) for n in graph.nodes)
        tidy = drop_dead(merge_duplicates(replace(graph, nodes=nodes)))
        if tidy == graph:
            return graph
        graph = tidy


def _places(graph: Graph) -> dict[str, int]:
    names = [i.value.name for i in graph.inputs] + [w.value.name for w in graph.weights]
    names += [value.name for node in graph.nodes for value in node.results]
    return {name: place for place, name in enumerate(names)}


def _sorted_operands(node: Node, place: dict[str, int]) -> Node:
    if not OPS[node.op].commutative:
        return node
    pair = sorted(node.operands[:2], key=lambda value: place[value.name])
    return replace(node, operands=(*pair, *node.operands[2:]))


def _explicit_only(node: Node) -> Node:
    """Drop attributes that say what their absence says."""
    specs = OPS[node.op].attrs
    attrs = {n: v for n, v in node.attrs.items() if not _says_nothing(node.op, n, v)}
    assert all(name in specs for name in attrs), f"{node.op} has attributes {sorted(attrs)}"
    return node if len(attrs) == len(node.attrs) else replace(node, attrs=attrs)


def _says_nothing(op: str, name: str, value: object) -> bool:
    spec = OPS[op].attrs[name]
    # beta 0.0 next to a situ epilogue is a value, so only epilogue words are dropped.
    return spec.kind in ("epilogue", "epilogues") and spec.is_default(value)  # pyright: ignore
