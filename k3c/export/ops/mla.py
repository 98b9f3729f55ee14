"""Multi-head latent attention without positions: the paged cache and attention in two forms."""

from __future__ import annotations

import torch
from torch import Tensor

from k3c.export.ops.norm import rms_norm
from k3c.export.ops.registry import define, internal, reference
from k3c.export.ops.segments import Segment, live_segments


@define(
    "(Tensor kv, Tensor norm, Tensor kv_cache, Tensor seg_start, Tensor seg_tokens, Tensor context,"
    " Tensor page_table, float eps) -> Tensor",
    lambda kv, norm, kv_cache, *rest: torch.empty_like(kv_cache),
)
def mla_append(
    kv: Tensor, norm: Tensor, kv_cache: Tensor,
    seg_start: Tensor, seg_tokens: Tensor, context: Tensor, page_table: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    """Write this step's rows to the cache: the latent normalised, the shared key dims raw.

    Args:
        kv: A[T, r + dr].
        norm: f32[r].
        kv_cache: A or float8 e4m3 [pages, page, r + dr].
        seg_start: i32[B].
        seg_tokens: i32[B].
        context: i32[B]; position of each segment's first row.
        page_table: i32[B, M].
        eps: RMS epsilon of the latent norm.

    Returns:
        The new kv_cache; padding rows write nothing.
    """
    latent = norm.shape[0]
    rows = torch.cat([rms_norm(kv[:, :latent], norm, eps), kv[:, latent:]], -1)
    rows = _as_cached(rows, kv_cache.dtype)
    cache, page = kv_cache.clone(), kv_cache.shape[1]
    for segment in live_segments(seg_start, seg_tokens, context):
        position = segment.context + torch.arange(segment.tokens, device=kv.device)
        pages = page_table[segment.index].long()[position // page]
        cache[pages, position % page] = rows[segment.rows]
    return cache


def _as_cached(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows as a cache of `dtype` holds them; float8 saturates, a NaN stays one."""
    if dtype.itemsize > 1:
        return rows.to(dtype)
    limit = torch.finfo(dtype).max
    return rows.clamp(-limit, limit).to(dtype)


def _cached_rows(kv_cache: Tensor, page_table: Tensor, segment: Segment) -> Tensor:
    """Return A[length, r + dr]: every cached row of the segment's request, this step's included."""
    length, page = segment.context + segment.tokens, kv_cache.shape[1]
    pages = page_table[segment.index, : -(-length // page)].long()
    return kv_cache[pages].flatten(0, 1)[:length]


def _softmax_causal(scores: Tensor, context: int) -> Tensor:
    """Softmax over the last axis of f32[n, T, length]; row t sees positions 0 .. context + t."""
    visible = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).tril(context)
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)


@reference("mla_absorb_q")
def mla_absorb_q(q: Tensor, kv_b: Tensor, *, heads: int, nope_dim: int, v_dim: int) -> Tensor:
    """Carry queries into the latent space: [Wk^T q_nope ; q_pe] for each head.

    Args:
        q: A[T, n * (dn + dr)].
        kv_b: [n * (dn + dv), r]; per head dn key rows, then dv value rows.
        heads: n.
        nope_dim: dn.
        v_dim: dv.

    Returns:
        f32[T, n, r + dr].
    """
    query = internal(q).unflatten(-1, (heads, -1))
    keys = kv_b.to(query.dtype).unflatten(0, (heads, nope_dim + v_dim))[:, :nope_dim]
    latent = torch.einsum("tnd,ndr->tnr", query[..., :nope_dim], keys)
    return torch.cat([latent, query[..., nope_dim:]], -1)


@reference("mla_attend")
def mla_attend(
    q_lat: Tensor, kv_cache: Tensor, seg_start: Tensor, seg_tokens: Tensor, context: Tensor,
    page_table: Tensor, *, scale: float, latent_dim: int,
) -> Tensor:  # fmt: skip
    """Attend in the latent space: causal softmax over every cached row of each request.

    Args:
        q_lat: f32[T, n, r + dr].
        kv_cache: A or float8 e4m3 [pages, page, r + dr].
        seg_start: i32[B].
        seg_tokens: i32[B].
        context: i32[B].
        page_table: i32[B, M].
        scale: Factor of the scores.
        latent_dim: r.

    Returns:
        f32[T, n, r]; padding rows are zero.
    """
    out = torch.zeros_like(q_lat[..., :latent_dim])
    for segment in live_segments(seg_start, seg_tokens, context):
        rows = _cached_rows(kv_cache, page_table, segment).to(q_lat.dtype)
        scores = torch.einsum("tnc,sc->nts", q_lat[segment.rows], rows) * scale
        weights = _softmax_causal(scores, segment.context)
        out[segment.rows] = torch.einsum("nts,sr->tnr", weights, rows[:, :latent_dim])
    return out


def latent_to_values(
    o_lat: Tensor, kv_b: Tensor, *, heads: int, nope_dim: int, v_dim: int
) -> Tensor:
    """Return Wv o_lat of each head, f32[T, n * dv], for o_lat f32[T, n, r]."""
    values = kv_b.to(o_lat.dtype).unflatten(0, (heads, nope_dim + v_dim))[:, nope_dim:]
    return torch.einsum("tnr,nvr->tnv", o_lat, values).flatten(-2)


@define(
    "(Tensor q, Tensor kv_b, Tensor kv_cache, Tensor seg_start, Tensor seg_tokens, Tensor context,"
    " Tensor page_table, int heads, int nope_dim, int v_dim) -> Tensor",
    lambda q, kv_b, kv_cache, seg_start, seg_tokens, context, page_table, heads, nope_dim, v_dim: (
        q.new_empty((q.shape[0], heads * v_dim))
    ),
)
def mla_attention(
    q: Tensor, kv_b: Tensor, kv_cache: Tensor, seg_start: Tensor, seg_tokens: Tensor,
    context: Tensor, page_table: Tensor, heads: int, nope_dim: int, v_dim: int,
) -> Tensor:  # fmt: skip
    """Attend causally over each request's cache, which holds this step's rows already.

    The absorbed form: queries go to the latent space, and stay in the internal precision until
    the values come out. Scale (dn + dr)^-0.5.

    Args:
        q: A[T, n * (dn + dr)].
        kv_b: [n * (dn + dv), r].
        kv_cache: A[pages, page, r + dr].
        seg_start: i32[B].
        seg_tokens: i32[B].
        context: i32[B].
        page_table: i32[B, M].
        heads: n.
        nope_dim: dn.
        v_dim: dv.

    Returns:
        A[T, n * dv]; padding rows are zero.
    """
    dims = {"heads": heads, "nope_dim": nope_dim, "v_dim": v_dim}
    scale = (q.shape[1] // heads) ** -0.5
    q_lat = mla_absorb_q(q, kv_b, **dims)
    o_lat = mla_attend(
        q_lat, kv_cache, seg_start, seg_tokens, context, page_table,
        scale=scale, latent_dim=kv_b.shape[1],
    )  # fmt: skip
    return latent_to_values(o_lat, kv_b, **dims).to(q.dtype)


def mla_attention_expanded(
    q: Tensor, kv_b: Tensor, kv_cache: Tensor, seg_start: Tensor, seg_tokens: Tensor,
    context: Tensor, page_table: Tensor, heads: int, nope_dim: int, v_dim: int,
) -> Tensor:  # fmt: skip
    """The expanded form of `mla_attention`: keys and values of every head, rounded to A."""
    out = q.new_zeros((q.shape[0], heads * v_dim))
    queries = internal(q).unflatten(-1, (heads, -1))
    latent = kv_b.shape[1]
    for segment in live_segments(seg_start, seg_tokens, context):
        rows = internal(_cached_rows(kv_cache, page_table, segment))
        expanded = (rows[:, :latent] @ kv_b.to(rows.dtype).mT).to(q.dtype).to(rows.dtype)
        per_head = expanded.unflatten(-1, (heads, nope_dim + v_dim))
        shared = rows[:, None, latent:].expand(-1, heads, -1)
        keys = torch.cat([per_head[..., :nope_dim], shared], -1)
        query = queries[segment.rows]
        scores = torch.einsum("tnd,snd->nts", query, keys) * query.shape[-1] ** -0.5
        weights = _softmax_causal(scores, segment.context)
        values = torch.einsum("nts,snv->tnv", weights, per_head[..., nope_dim:])
        out[segment.rows] = values.flatten(-2).to(q.dtype)
    return out
