"""One node for everything of a KDA layer between its projections.

Before:  short_conv, two l2_norm, kda_gate, kda_recurrence, gated_rms_norm
After:   %o, %conv_state, %kda_state = kda(%q, %k, %v, %z, %f, %b, conv weights, %a_log, %dt_bias,
             %o_norm, states, segments) {heads, lower_bound, scale, l2_eps, eps, chunk}

Saves five launches and every round trip between them (four float32 tensors of [T, P]); both states
are updated in place. Runs after fuse_projections, before fuse_epilogue.
"""

from __future__ import annotations

from k3c.ir.edit import count_ops
from k3c.ir.graph import Module, Node
from k3c.ir.pattern import Match, parse_pattern
from k3c.ir.refusal import Refusal
from k3c.ir.rewrite import Replacement, Rule, apply_rules
from k3c.passes.context import NO_DEAD_NODES, PassContext, absent

NAME = "fuse_kda"
REQUIRES = (NO_DEAD_NODES,)
ENSURES = (absent("short_conv", "l2_norm", "kda_gate", "kda_recurrence", "gated_rms_norm"),)
REQUIRED = True
ANCHORS = ("kda_recurrence",)

_SEGMENTS = ("seg_start", "seg_tokens", "slots", "context")
_OPERANDS = (
    "q", "k", "v", "z", "f", "b", "conv_q", "conv_k", "conv_v", "a_log", "dt_bias", "o_norm",
    "conv_state", "kda_state", *_SEGMENTS,
)  # fmt: skip
_WHERE = ", ".join(f"%{name}" for name in _SEGMENTS)
_PATTERN = f"""
    %qc, %kc, %vc, %conv_out = short_conv(%q, %k, %v, %conv_q, %conv_k, %conv_v, %conv_state,
                                          {_WHERE})
    %qn = l2_norm(%qc)
    %kn = l2_norm(%kc)
    %g = kda_gate(%f, %a_log, %dt_bias)
    %o, %state_out = kda_recurrence(%qn, %kn, %vc, %g, %b, %kda_state, {_WHERE})
    %y = gated_rms_norm(%o, %o_norm, %z)
"""


def _attrs_agree(match: Match) -> Refusal | None:
    scale = match.attr("kn", "scale")
    if scale != 1.0:
        return Refusal("the key norm has a scale", scale)
    if match.attr("qn", "eps") != match.attr("kn", "eps"):
        eps = f"{match.attr('qn', 'eps')} and {match.attr('kn', 'eps')}"
        return Refusal("the query and key norms have different eps", eps)
    heads = {match.attr(name, "heads") for name in ("qn", "kn", "y")}
    state_heads = match["kda_state"].type.shape[1]
    if heads != {state_heads}:
        return Refusal("the norms and the state have different heads", [*heads, state_heads])
    return None


def _fuse(match: Match) -> Replacement:
    node = Node(
        "kda",
        tuple(match[name] for name in _OPERANDS),
        (match["y"], match["conv_out"], match["state_out"]),
        {
            "heads": match.attr("y", "heads"),
            "lower_bound": match.attr("g", "lower_bound"),
            "scale": match.attr("qn", "scale"),
            "l2_eps": match.attr("qn", "eps"),
            "eps": match.attr("y", "eps"),
            "chunk": match.attr("o", "chunk"),
        },
        match.node("o").loc,
    )
    return Replacement((node,))


RULES = (Rule("kda", parse_pattern(_PATTERN), _fuse, _attrs_agree),)


def expected(module: Module) -> int | None:
    """Every recurrence is fused."""
    return count_ops(module.graphs, ANCHORS)


def run(module: Module, ctx: PassContext) -> Module:
    """Fuse every KDA layer."""
    return apply_rules(module, RULES, ctx.log)
