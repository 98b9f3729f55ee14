"""Elementwise work moves into the node that makes its operand.

Before:  %g, %u = linear(%x, %w)                  After:  %y = linear(%x, %w) {epilogues: (situ)}
         %y = situ(%g, %u)
         %g, %u = grouped_gemm(...)                       %y = grouped_gemm(...) {epilogue: situ}
         %y = situ(%g, %u)
         %a = mla_absorb_v(%o, %w)                        %y = mla_absorb_v(%o, %w, %z)
         %y = sigmoid_mul(%a, %z)
         %a = linear(%x, %w)                              %y = linear(%x, %w, %b)
         %y = add(%a, %b)
         %c = combine(%rows, %weights)                    %y = combine_norm(%rows, %weights, %norm)
         %y = rms_norm(%c, %norm)

Saves a launch and a round trip of its operands for each. The results are rounded where they were
before: a fused node rounds the product, then applies the epilogue, then rounds again. Refuses
wherever that would not hold. Runs after lower_mla and lower_moe, before layout_mxfp4.
"""

from __future__ import annotations

from dataclasses import replace

from k3c.ir.edit import Index, count_ops
from k3c.ir.graph import Attr, Module, Node, Value
from k3c.ir.ops import epilogues
from k3c.ir.pattern import Match, parse_pattern
from k3c.ir.refusal import Refusal
from k3c.ir.rewrite import Replacement, Rule, apply_rules
from k3c.passes.context import NO_DEAD_NODES, PassContext, absent

NAME = "fuse_epilogue"
REQUIRES = (NO_DEAD_NODES, absent("mla_attention", "grouped_linear"))
ENSURES = ()
REQUIRED = False
ANCHORS = ("situ", "sigmoid_mul", "add", "combine")

_GEMMS = ("linear", "grouped_gemm")


def _situ_refused(match: Match) -> Refusal | None:
    """Refuse unless gate and up are neighbouring plain results of one GEMM."""
    index, (gate, up) = match.index, (match["gate"], match["up"])
    node = index.node_of(gate)
    if node is None or node.op not in _GEMMS or index.node_of(up) is not node:
        return _cast_refusal(index, gate) or Refusal(
            "gate and up are not results of one GEMM", f"%{gate.name}, %{up.name}"
        )
    first, words = node.results.index(gate), epilogues(node)
    plain = words[first : first + 2] == ("none", "none")
    if not plain or node.results.index(up) != first + 1:
        return Refusal("up does not follow gate in the GEMM's columns", f"%{up.name}")
    if node.op == "grouped_gemm" and len(node.results) != 2:
        return Refusal("the grouped GEMM has other results", len(node.results))
    for value in (gate, up):
        if not index.only_reader(value):
            return Refusal("a value inside the pattern has other uses", f"%{value.name}")
    if gate.type.dtype != node.operands[0].type.dtype:
        return Refusal(f"the GEMM gives {gate.type.dtype}, its epilogue works on the input's dtype",
                       f"%{gate.name}")  # fmt: skip
    return _other_caps(match, node)


def _other_caps(match: Match, node: Node) -> Refusal | None:
    """Refuse a second SiTU with other caps: a GEMM has one pair."""
    caps = match.node("y").attrs
    if "situ" in epilogues(node) and any(node.attrs.get(n) != v for n, v in caps.items()):
        return Refusal("the GEMM has a SiTU with other caps", f"%{match['y'].name}")
    return None


def _fuse_situ(match: Match) -> Replacement:
    index, y = match.index, match["y"]
    maker = index.maker[match["gate"].name]
    node = index.graph.nodes[maker]
    first = node.results.index(match["gate"])
    results = (*node.results[:first], y, *node.results[first + 2 :])
    words = epilogues(node)
    attrs: dict[str, Attr] = {**node.attrs, **match.node("y").attrs}
    if node.op == "linear":
        attrs["epilogues"] = (*words[:first], "situ", *words[first + 2 :])
    else:
        attrs["epilogue"] = "situ"
    return Replacement((replace(node, results=results, attrs=attrs),), removes=(maker,))


def _fuse_output_gate(match: Match) -> Replacement:
    node = match.node("a")
    operands = (*node.operands, match["z"])
    return Replacement((replace(node, operands=operands, results=(match["y"],)),))


def _addable(index: Index, value: Value) -> Node | Refusal:
    """Return the linear that can take the other operand, or why there is none."""
    node = index.node_of(value, "linear")
    if node is None:
        return _cast_refusal(index, value) or Refusal("not made by a linear", f"%{value.name}")
    activations = node.operands[0].type.dtype
    if len(node.results) > 1 or len(node.operands) > 2 or epilogues(node) != ("none",):
        return Refusal("its linear has other results or an epilogue", f"%{value.name}")
    if not index.only_reader(value):
        return Refusal("a value inside the pattern has other uses", f"%{value.name}")
    if value.type.dtype != activations:
        reason = f"its linear gives {value.type.dtype} for {activations}"
        return Refusal(reason, f"%{value.name}")
    return node


def _add_refused(match: Match) -> Refusal | None:
    if match["a"] == match["b"]:
        return Refusal("both operands are one value", f"%{match['a'].name}")
    found = [_addable(match.index, match[name]) for name in ("a", "b")]
    refusals = [item for item in found if isinstance(item, Refusal)]
    if len(refusals) < 2:
        return None
    # A cast is what a reader must see first: the fusion would change the result there.
    return next((r for r in refusals if "precision" in r.reason), refusals[0])


def _fuse_add(match: Match) -> Replacement:
    index = match.index
    able = [name for name in ("a", "b") if isinstance(_addable(index, match[name]), Node)]
    # The later one: by then the other operand exists.
    chosen = max(able, key=lambda name: index.maker[match[name].name])
    maker = index.maker[match[chosen].name]
    node = index.graph.nodes[maker]
    addend = match["b" if chosen == "a" else "a"]
    fused = replace(node, operands=(*node.operands, addend), results=(match["y"],))
    return Replacement((fused,), removes=(maker,))


def _fuse_norm(match: Match) -> Replacement:
    operands = (match["rows"], match["weights"], match["norm"])
    eps = {"eps": match.attr("y", "eps")}
    return Replacement(
        (Node("combine_norm", operands, (match["y"],), eps, match.node("c").loc),)
    )  # fmt: skip


def _cast_refusal(index: Index, value: Value) -> Refusal | None:
    """Return a refusal if a value was just cast: fusing across the cast would skip a rounding."""
    node = index.node_of(value, "cast")
    if node is None:
        return None
    wide, narrow = node.operands[0].type.dtype, value.type.dtype
    what = f"fusing across the cast from {wide} to {narrow} would change precision"
    return Refusal(what, f"%{value.name}")


def _summed_over_ranks(match: Match) -> Refusal:
    return Refusal("the sum over the ranks comes between the expert sum and the norm",
                   f"%{match['c'].name}")  # fmt: skip


def _rounded(match: Match) -> Refusal | None:
    return _cast_refusal(match.index, match["r"])


RULES = (
    Rule("situ", parse_pattern("%y = situ(%gate, %up)"), _fuse_situ, _situ_refused),
    Rule(
        "output_gate",
        parse_pattern("%a = mla_absorb_v(%o, %kv_b)\n%y = sigmoid_mul(%a, %z)"),
        _fuse_output_gate,
    ),
    Rule(
        "rounded_output_gate",
        parse_pattern("%a = mla_absorb_v(%o, %kv_b)\n%r = cast(%a)\n%y = sigmoid_mul(%r, %z)"),
        _fuse_output_gate,
        _rounded,
    ),
    Rule("add", parse_pattern("%y = add(%a, %b)"), _fuse_add, _add_refused),
    Rule(
        "combine_norm",
        parse_pattern("%c = combine(%rows, %weights)\n%y = rms_norm(%c, %norm)"),
        _fuse_norm,
    ),
    Rule(
        "rounded_combine_norm",
        parse_pattern("%c = combine(%rows, %weights)\n%r = cast(%c)\n%y = rms_norm(%r, %norm)"),
        _fuse_norm,
        _rounded,
    ),
    Rule(
        "reduced_combine",
        parse_pattern("%c = combine(%rows, %weights)\n%s... = all_reduce(%c)"),
        _fuse_norm,
        _summed_over_ranks,
        handles=frozenset({"all_reduce.y"}),
    ),
)


def expected(module: Module) -> int | None:
    """Every SiTU, output gate, add and expert sum is fused; a sum over ranks splits the last."""
    anchors = ANCHORS if not module.mesh else tuple(op for op in ANCHORS if op != "combine")
    return count_ops(module.graphs, anchors)


def run(module: Module, ctx: PassContext) -> Module:
    """Fuse every epilogue."""
    return apply_rules(module, RULES, ctx.log)
