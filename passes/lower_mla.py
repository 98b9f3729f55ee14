"""MLA in absorbed form: three kernels that never expand the cache.

Before:  %a = mla_attention(%q, %kv_b, %kv_cache, segments) {heads, nope_dim, v_dim}
After:   %q_lat = mla_absorb_q(%q, %kv_b_q) {heads, nope_dim, v_dim}
         %o_lat = mla_attend(%q_lat, %kv_cache, segments) {latent_dim, scale}
         %a = mla_absorb_v(%o_lat, %kv_b_v) {heads, nope_dim, v_dim}

kv_b becomes two weights of the same source, because each half is packed for its own kernel.
Saves reading and writing keys and values of every head for every cached token.
Runs after fuse_kda, before fuse_epilogue, which puts the output gate into mla_absorb_v.
"""

from __future__ import annotations

from dataclasses import replace

from k3c.ir.edit import count_ops
from k3c.ir.graph import Module, Node, Value
from k3c.ir.pattern import Match, parse_pattern
from k3c.ir.refusal import Refusal
from k3c.ir.rewrite import Replacement, Rule, apply_rules
from k3c.ir.types import F32, TensorType
from k3c.passes.context import NO_DEAD_NODES, PassContext, absent

NAME = "lower_mla"
REQUIRES = (NO_DEAD_NODES,)
ENSURES = (absent("mla_attention"),)
REQUIRED = True
ANCHORS = ("mla_attention",)

_WHERE = ("seg_start", "seg_tokens", "context", "page_table")
_PATTERN = f"""
    %a = mla_attention(%q, %kv_b, %kv_cache, {", ".join(f"%{name}" for name in _WHERE)})
"""


def _kv_b_is_a_weight(match: Match) -> Refusal | None:
    if match.weight("kv_b") is None:
        return Refusal("kv_b is computed, so it cannot be packed twice", f"%{match['kv_b'].name}")
    return None


def _lower(match: Match) -> Replacement:
    fresh, node, kv_b = match.index.fresh, match.node("a"), match.weight("kv_b")
    assert kv_b is not None, "checked"
    rows, (_, latent) = match["q"].type.shape[0], kv_b.value.type.sizes
    heads, row = node.attrs["heads"], match["kv_cache"].type.shape[-1]
    assert isinstance(heads, int), f"heads {heads}"
    query_width = match["q"].type.shape[1]
    assert isinstance(query_width, int), f"query width {query_width}"
    for_q, for_v = (
        replace(kv_b, value=replace(kv_b.value, name=fresh(f"{kv_b.value.name}_{half}")))
        for half in ("q", "v")
    )
    q_lat = Value(fresh("q_lat"), TensorType(F32, (rows, heads, row)))
    o_lat = Value(fresh("o_lat"), TensorType(F32, (rows, heads, latent)))
    where = tuple(match[name] for name in _WHERE)
    attend = {"scale": (query_width // heads) ** -0.5, "latent_dim": latent}
    nodes = (
        Node("mla_absorb_q", (match["q"], for_q.value), (q_lat,), node.attrs, node.loc),
        Node("mla_attend", (q_lat, match["kv_cache"], *where), (o_lat,), attend, node.loc),
        Node("mla_absorb_v", (o_lat, for_v.value), (match["a"],), node.attrs, node.loc),
    )
    return Replacement(nodes, weights=(for_q, for_v))


RULES = (Rule("absorbed", parse_pattern(_PATTERN), _lower, _kv_b_is_a_weight),)


def expected(module: Module) -> int | None:
    """Every attention is lowered."""
    return count_ops(module.graphs, ANCHORS)


def run(module: Module, ctx: PassContext) -> Module:
    """Lower every MLA attention."""
    return apply_rules(module, RULES, ctx.log)
