"""A norm moves into the only product that reads it.

Before:  %n = rms_norm(%x, %norm) {eps}
         %y = linear(%n, %w [, %addend]) {epilogues}
After:   %y = norm_linear(%x, %norm, %w [, %addend]) {eps, epilogues}

The row's scale is one number, which the GEMM's blocks work out again while they wait for weights.
Saves a launch and a round trip of %n, which is rounded as before. Runs after fuse_epilogue, which
has put norms behind an expert sum into combine_norm, and only where the catalogue implements
norm_linear.
"""

from __future__ import annotations

from dataclasses import replace

from k3c.ir.graph import Module
from k3c.ir.pattern import Match, parse_pattern
from k3c.ir.rewrite import Replacement, Rule, apply_rules
from k3c.passes.context import NO_DEAD_NODES, PassContext

NAME = "fuse_norm_linear"
REQUIRES = (NO_DEAD_NODES,)
ENSURES = ()
REQUIRED = False
ANCHORS: tuple[str, ...] = ()

_PATTERN = """
    %n = rms_norm(%x, %norm)
    %y... = linear(%n, %w)
"""


def _fuse(match: Match) -> Replacement:
    linear = match.node("y")
    node = replace(
        linear,
        op="norm_linear",
        operands=(match["x"], match["norm"], *linear.operands[1:]),
        attrs={**linear.attrs, "eps": match.attr("n", "eps")},
    )
    return Replacement((node,))


_HANDLES = frozenset({"linear.epilogues", "linear.beta", "linear.linear_beta", "linear.addend"})
RULES = (Rule("norm_linear", parse_pattern(_PATTERN), _fuse, handles=_HANDLES),)


def expected(module: Module) -> int | None:
    """No number: it depends on the catalogue."""
    return None


def run(module: Module, ctx: PassContext) -> Module:
    """Fuse every norm that one product reads."""
    return apply_rules(module, RULES, ctx.log) if ctx.implements("norm_linear") else module
