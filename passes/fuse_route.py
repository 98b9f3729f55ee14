"""One node chooses the experts and sorts the rows by expert.

Before:  %weights, %experts = route_topk(%logits, %bias) {k, renormalize, scale, num_experts,
             first_expert}
         %offsets, %order = dispatch(%experts) {num_experts, first_expert}
After:   %weights, %offsets, %order = route_dispatch(%logits, %bias) {all of these}

With a map of experts between them (map_experts of the choice), the map is the third operand.
Saves a launch and a round trip of the choice. Runs after lower_moe, and only where the catalogue
implements route_dispatch.
"""

from __future__ import annotations

from k3c.ir.graph import Module, Node
from k3c.ir.pattern import Match, parse_pattern
from k3c.ir.refusal import Refusal
from k3c.ir.rewrite import Replacement, Rule, apply_rules
from k3c.passes.context import NO_DEAD_NODES, PassContext, absent

NAME = "fuse_route"
REQUIRES = (NO_DEAD_NODES, absent("grouped_linear"))
ENSURES = ()
REQUIRED = False
ANCHORS: tuple[str, ...] = ()

_PATTERN = """
    %weights, %experts = route_topk(%logits, %bias)
    %offsets, %order = dispatch(%experts)
"""


def _other_experts(match: Match) -> Refusal | None:
    """Refuse where the weights are those of other experts than the order lists."""
    route, dispatch = match.node("weights").attrs, match.node("offsets").attrs
    all_experts = match["bias"].type.sizes[0]
    weighted = route.get("num_experts", 0) or all_experts, route.get("first_expert", 0)
    listed = dispatch["num_experts"], dispatch.get("first_expert", 0)
    if weighted != listed:
        reason = f"weights of {weighted[0]} experts from {weighted[1]} on, an order of {listed[0]}"
        return Refusal(f"{reason} from {listed[1]} on", f"%{match['weights'].name}")
    return None


def _fuse(match: Match) -> Replacement:
    route = match.node("weights")
    node = Node(
        "route_dispatch",
        (match["logits"], match["bias"]),
        (match["weights"], match["offsets"], match["order"]),
        {**route.attrs, **match.node("offsets").attrs},
        route.loc,
    )
    return Replacement((node,))


_MAPPED = """
    %chosen, %experts = route_topk(%logits, %bias)
    %weights, %local = map_experts(%chosen, %experts, %map)
    %offsets, %order = dispatch(%local)
"""


def _other_slots(match: Match) -> Refusal | None:
    """Refuse where the choice is cut before the map, or the order lists other slots."""
    route, dispatch = match.node("chosen").attrs, match.node("offsets").attrs
    mapped, listed = match.node("weights").attrs["num_experts"], dispatch["num_experts"]
    cut = route.get("num_experts", 0) or dispatch.get("first_expert", 0)
    if cut or mapped != listed:
        reason = f"a map to {mapped} physical experts, an order of {listed}"
        return Refusal(reason, f"%{match['weights'].name}")
    return None


def _fuse_mapped(match: Match) -> Replacement:
    route = match.node("chosen")
    operands = match["logits"], match["bias"], match["map"]
    results = match["weights"], match["offsets"], match["order"]
    attrs = {**route.attrs, "num_experts": match.node("weights").attrs["num_experts"]}
    return Replacement((Node("route_dispatch", operands, results, attrs, route.loc),))


_HANDLES = frozenset({"route_topk.num_experts", "route_topk.first_expert", "dispatch.first_expert"})
RULES = (
    Rule("route_dispatch", parse_pattern(_PATTERN), _fuse, _other_experts, handles=_HANDLES),
    Rule("mapped", parse_pattern(_MAPPED), _fuse_mapped, _other_slots, handles=_HANDLES),
)


def expected(module: Module) -> int | None:
    """No number: it depends on the catalogue."""
    return None


def run(module: Module, ctx: PassContext) -> Module:
    """Fuse every routing."""
    return apply_rules(module, RULES, ctx.log) if ctx.implements("route_dispatch") else module
