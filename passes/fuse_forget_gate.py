"""The second half of the forget path moves into the KDA kernel.

Before:  %f = linear(%f_a, %w_f_b)
         %o, %c, %s = kda(%q, %k, %v, %z, %f, %b, conv weights, %a_log, %dt_bias, %o_norm, ...)
After:   %o, %c, %s = kda_fb(%q, %k, %v, %z, %f_a, %b, conv weights, %a_log, %dt_bias, %o_norm,
             %w_f_b, ...) {as kda}

The rank of the forget path is one head's width, so each head makes its own 128 values of %f from
%f_a where it needs them. Saves a launch and a round trip of %f A[T, P]; %f is rounded as before.
Runs after fuse_kda, and only where the catalogue implements kda_fb.
"""

from __future__ import annotations

from k3c.ir.graph import Module, Node
from k3c.ir.pattern import Match, parse_pattern
from k3c.ir.refusal import Refusal
from k3c.ir.rewrite import Replacement, Rule, apply_rules
from k3c.passes.context import NO_DEAD_NODES, PassContext, absent

NAME = "fuse_forget_gate"
REQUIRES = (NO_DEAD_NODES, absent("kda_recurrence"))
ENSURES = ()
REQUIRED = False
ANCHORS: tuple[str, ...] = ()

_SMALL = ("conv_q", "conv_k", "conv_v", "a_log", "dt_bias", "o_norm")
_REST = ("conv_state", "kda_state", "seg_start", "seg_tokens", "slots", "context")


def _names(*names: str) -> str:
    return ", ".join(f"%{name}" for name in names)


_PATTERN = f"""
    %f = linear(%f_a, %f_b)
    %o, %conv_out, %state_out = kda({_names("q", "k", "v", "z", "f", "b", *_SMALL, *_REST)})
"""


def _unfit(match: Match) -> Refusal | None:
    if match.weight("f_b") is None:
        return Refusal("f_b is computed, not a weight", f"%{match['f_b'].name}")
    if match["f"].type.dtype != match["f_a"].type.dtype:
        return Refusal(f"the forget input is {match['f'].type.dtype}", f"%{match['f'].name}")
    return None


def _fuse(match: Match) -> Replacement:
    names = ("q", "k", "v", "z", "f_a", "b", *_SMALL, "f_b", *_REST)
    kda = match.node("o")
    operands = tuple(match[name] for name in names)
    return Replacement((Node("kda_fb", operands, kda.results, kda.attrs, kda.loc),))


RULES = (Rule("kda_fb", parse_pattern(_PATTERN), _fuse, _unfit),)


def expected(module: Module) -> int | None:
    """No number: it depends on the catalogue."""
    return None


def run(module: Module, ctx: PassContext) -> Module:
    """Fuse the forget path of every KDA layer."""
    return apply_rules(module, RULES, ctx.log) if ctx.implements("kda_fb") else module
