"""One node for an AttnRes site: pending add, mixture, norm and, at attention sites, the commit.

Before:  %p = residual_join(%prefix, %delta) {restart}
         %m = attn_res(%p, %bank, %res_norm, %res_proj) {rows, eps}
         %y = rms_norm(%m, %norm) {eps}
         %c = bank_commit(%bank, %p) {row}                       (attention site only)
After:   %p, %y, %c = attn_res_norm(%prefix, %delta, %bank, %res_norm, %res_proj, %norm)
                          {restart, rows, commit_row: row or -1, res_eps, eps}

Saves three launches a site and the round trips of the joined prefix and of the mixture; the prefix
and the bank are updated in place. Runs after canonicalize, before fuse_projections.
Refuses where the join is rounded to a narrower dtype before the mixture: the fused node joins in
the activations' dtype.
"""

from __future__ import annotations

from k3c.ir.edit import count_ops
from k3c.ir.graph import Module, Node, Value
from k3c.ir.pattern import Match, parse_pattern
from k3c.ir.refusal import Refusal
from k3c.ir.rewrite import Replacement, Rule, apply_rules
from k3c.passes.context import BEFORE_KERNELS, NO_DEAD_NODES, PassContext, absent

NAME = "fuse_attn_res"
REQUIRES = (BEFORE_KERNELS, NO_DEAD_NODES)
ENSURES = (absent("attn_res", "residual_join", "bank_commit"),)
REQUIRED = True
ANCHORS = ("attn_res",)

_SITE = """
    %p = residual_join(%prefix, %delta)
    %m = attn_res(%p, %bank, %res_norm, %res_proj)
    %y = rms_norm(%m, %norm)
"""
_COMMIT = "    %c = bank_commit(%bank, %p)"
_ROUNDED_SITE = """
    %p = residual_join(%prefix, %delta)
    %r = cast(%p)
    %m = attn_res(%r, %bank, %res_norm, %res_proj)
    %y = rms_norm(%m, %norm)
"""
_ROUNDED_MIXTURE = """
    %m = attn_res(%p, %bank, %res_norm, %res_proj)
    %r = cast(%m)
    %y = rms_norm(%r, %norm)
"""


def _fuse(match: Match) -> Replacement:
    bank, commits = match["bank"], "c" in match
    # Without a commit the bank comes back as it was; who reads it later reads the new name.
    new_bank = match["c"] if commits else Value(match.index.fresh("bank"), bank.type)
    node = Node(
        "attn_res_norm",
        tuple(match[n] for n in ("prefix", "delta", "bank", "res_norm", "res_proj", "norm")),
        (match["p"], match["y"], new_bank),
        {
            "restart": match.attr("p", "restart"),
            "rows": match.attr("m", "rows"),
            "commit_row": match.attr("c", "row") if commits else -1,
            "res_eps": match.attr("m", "eps"),
            "eps": match.attr("y", "eps"),
        },
        match.node("m").loc,
    )
    return Replacement((node,), later={} if commits else {bank.name: new_bank})


def _changes_precision(match: Match) -> Refusal:
    wide, narrow = match.node("r").operands[0].type.dtype, match["r"].type.dtype
    return Refusal(f"fusing across the cast from {wide} to {narrow} would change precision",
                   f"%{match['r'].name}")  # fmt: skip


RULES = (
    Rule("attention_site", parse_pattern(_COMMIT + _SITE), _fuse),
    Rule("site", parse_pattern(_SITE), _fuse),
    Rule("rounded_join", parse_pattern(_ROUNDED_SITE), _fuse, _changes_precision),
    Rule("rounded_mixture", parse_pattern(_ROUNDED_MIXTURE), _fuse, _changes_precision),
)


def expected(module: Module) -> int | None:
    """Every AttnRes site is fused."""
    return count_ops(module.graphs, ANCHORS)


def run(module: Module, ctx: PassContext) -> Module:
    """Fuse every AttnRes site."""
    return apply_rules(module, RULES, ctx.log)
