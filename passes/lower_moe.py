"""Routed experts as grouped GEMMs over rows sorted by expert.

Before:  %a, %b = grouped_linear(%x, %w13, %experts)
         %y = grouped_linear(%h, %w2, %experts)
After:   %offsets, %order = dispatch(%experts) {num_experts}
         %a, %b = grouped_gemm(%x, %w13, %offsets, %order)
         %y = grouped_gemm(%h, %w2, %offsets, %order)

The first expert of the rank, where there is one, goes to the dispatch.
All grouped GEMMs of one routing share its dispatch. Saves reading an expert's matrix once for every
row instead of once. Runs after fuse_projections, before fuse_epilogue.
"""

from __future__ import annotations

from k3c.ir.edit import count_ops
from k3c.ir.graph import Attr, Module, Node, Value
from k3c.ir.pattern import Match, parse_pattern
from k3c.ir.rewrite import Replacement, Rule, apply_rules
from k3c.ir.types import I32, TensorType
from k3c.passes.context import NO_DEAD_NODES, PassContext, absent

NAME = "lower_moe"
REQUIRES = (NO_DEAD_NODES,)
ENSURES = (absent("grouped_linear"),)
REQUIRED = True
ANCHORS = ("grouped_linear",)


def _dispatch(match: Match) -> Node | None:
    """Return the dispatch of this routing, if an earlier match made it."""
    nodes = (match.index.graph.nodes[p] for p in match.index.read_by(match["experts"]))
    return next((node for node in nodes if node.op == "dispatch"), None)


def _new_dispatch(match: Match) -> Node:
    experts, count = match["experts"], match["w"].type.sizes[0]
    offsets = Value(match.index.fresh("offsets"), TensorType(I32, (count + 1,)))
    order = Value(match.index.fresh("order"), experts.type)
    loc = match.node("y").loc
    attrs: dict[str, Attr] = {"num_experts": count}
    if "first_expert" in match.node("y").attrs:
        attrs["first_expert"] = match.node("y").attrs["first_expert"]
    return Node("dispatch", (experts,), (offsets, order), attrs, loc)


def _lower(match: Match) -> Replacement:
    known = _dispatch(match)
    dispatch = known or _new_dispatch(match)
    node = match.node("y")
    operands = (match["x"], match["w"], *dispatch.results)
    attrs = {name: value for name, value in node.attrs.items() if name != "first_expert"}
    gemm = Node("grouped_gemm", operands, node.results, attrs, node.loc)
    return Replacement((gemm,) if known else (dispatch, gemm))


RULES = (
    Rule("grouped_gemm", parse_pattern("%y... = grouped_linear(%x, %w, %experts)"), _lower,
         handles=frozenset({"grouped_linear.first_expert", "grouped_linear.total_experts"})),
)  # fmt: skip


def expected(module: Module) -> int | None:
    """Every grouped product is lowered."""
    return count_ops(module.graphs, ANCHORS)


def run(module: Module, ctx: PassContext) -> Module:
    """Lower every grouped product."""
    return apply_rules(module, RULES, ctx.log)
