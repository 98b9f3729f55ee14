"""Ops of one rank: experts and vocabulary rows of its own, and collectives over one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3c.export.ops.linear import embed
from k3c.export.ops.moe import grouped_linear, route_topk
from k3c.export.ops.norm import rms_norm
from k3c.export.ops.registry import as_dtype, reference

Mxfp4 = tuple[Tensor, Tensor]


@reference("embed")
def local_embed(
    ids: Tensor, table: Tensor, *, result_dtypes: Sequence[torch.dtype | str], first_row: int = 0
) -> Tensor:
    """Return rows `ids` i32[T] in the dtype of the IR result; zero where another rank has the row.

    Args:
        ids: i32[T].
        table: [V, D], rows first_row .. first_row + V - 1 of the whole table.
        result_dtypes: The result's dtype.
        first_row: First row of this rank's part.

    Returns:
        A[T, D].
    """
    rows = ids - first_row
    mine = (rows >= 0) & (rows < table.shape[0])
    found = embed(rows.clamp(0, table.shape[0] - 1), table, as_dtype(result_dtypes[0]))
    return torch.where(mine[:, None], found, 0.0)


@reference("route_topk")
def local_route_topk(
    logits: Tensor, bias: Tensor, *, k: int, renormalize: bool, scale: float,
    num_experts: int = 0, first_expert: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`route_topk` where the weights of experts of other ranks are 0.

    Args:
        logits: f32[T, E] of all experts.
        bias: f32[E].
        k: Experts a token.
        renormalize: Divide the weights by their sum, over the experts of all ranks.
        scale: Factor of the weights, after that.
        num_experts: Experts of this rank; 0: all.
        first_expert: The first of them.

    Returns:
        weights f32[T, k] and experts i32[T, k], numbered over all ranks.
    """
    weights, experts = route_topk(logits, bias, k, renormalize, scale)
    mine = _local(experts, num_experts or logits.shape[1], first_expert) >= 0
    return torch.where(mine, weights, 0.0), experts


@reference("map_experts")
def map_experts(
    weights: Tensor, experts: Tensor, expert_map: Tensor | None = None, *, num_experts: int,
    first_expert: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Number chosen experts within this rank, and take the weights of the others away.

    Args:
        weights: f32[T, k].
        experts: i32[T, k], logical experts.
        expert_map: i32[E, C]: how many replicas each logical expert has, then for each replica its
            physical expert on this rank, or -1 where another rank has it. Token t takes replica
            t mod the number of replicas. None: the experts from `first_expert` on, once each.
        num_experts: Physical experts of this rank.
        first_expert: The first of them, where they are not mapped.

    Returns:
        weights f32[T, k], 0 for an expert of another rank; physical experts i32[T, k], -1 there.
    """
    if expert_map is None:
        local = _local(experts, num_experts, first_expert)
    else:
        rows = expert_map[experts.long()]
        token = torch.arange(len(experts), device=experts.device)[:, None]
        local = rows.gather(-1, (1 + token % rows[..., 0])[..., None].long()).squeeze(-1)
    return torch.where(local >= 0, weights, 0.0), local.to(torch.int32)


@reference("dispatch")
def dispatch(experts: Tensor, *, num_experts: int, first_expert: int = 0) -> tuple[Tensor, Tensor]:
    """Sort the rows of this rank's experts by expert.

    Args:
        experts: i32[T, k], numbered over all ranks.
        num_experts: E, experts of this rank.
        first_expert: The first of them.

    Returns:
        offsets i32[E + 1] and order i32[T, k]: flat row ids t * k + j, by expert, stable; the rows
        of expert first_expert + e are order.flatten()[offsets[e] : offsets[e + 1]]. Entries from
        offsets[E] on are not written: -1 here.
    """
    flat = _local(experts, num_experts, first_expert).flatten().long()
    counts = torch.bincount(flat[flat >= 0], minlength=num_experts).cumsum(0)
    offsets = torch.cat([counts.new_zeros(1), counts]).to(torch.int32)
    order = torch.full_like(experts, -1).flatten()
    rows = flat.argsort(stable=True)[int((flat < 0).sum()) :]
    order[: len(rows)] = rows.to(torch.int32)
    return offsets, order.view(experts.shape)


@reference("route_dispatch")
def route_dispatch(
    logits: Tensor, bias: Tensor, expert_map: Tensor | None = None, *, k: int, renormalize: bool,
    scale: float, num_experts: int, first_expert: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`route_topk`, then `map_experts` of its choice, then `dispatch`.

    Returns:
        weights f32[T, k], 0 for experts of other ranks; offsets i32[num_experts + 1] and order
        i32[T, k] as `dispatch` gives them.
    """
    mine = {"num_experts": num_experts, "first_expert": first_expert}
    chosen = route_topk(logits, bias, k, renormalize, scale)
    weights, experts = map_experts(*chosen, expert_map, **mine)
    return weights, *dispatch(experts, num_experts=num_experts)


@reference("grouped_linear")
def local_grouped_linear(
    x: Tensor, weight: Mxfp4, experts: Tensor, *, first_expert: int = 0, total_experts: int = 0
) -> Tensor:
    """`grouped_linear` over the experts of this rank.

    Args:
        x: A[T, K] or A[T, k, K].
        weight: (packed u8[E, N, K/2], scale u8[E, N, K/32]) of this rank's experts.
        experts: i32[T, k], numbered over all ranks.
        first_expert: The first expert of this rank.
        total_experts: Experts of all ranks; changes nothing.

    Returns:
        A[T, k, N]; rows of other ranks' experts are not written: NaN here.
    """
    local = _local(experts, weight[0].shape[0], first_expert)
    rows = grouped_linear(x, *weight, local.clamp(min=0))
    return torch.where((local >= 0)[..., None], rows, torch.nan)


@reference("norm_columns")
def norm_columns(
    x: Tensor, weight: Tensor, *, columns: int, first_column: int, eps: float
) -> Tensor:
    """Return columns first_column .. first_column + columns - 1 of rms_norm(x A[T, D], f32[D])."""
    return rms_norm(x, weight, eps)[:, first_column : first_column + columns].contiguous()


@reference("all_reduce")
def all_reduce(*parts: Tensor, axis: str) -> tuple[Tensor, ...]:
    """Return the sums over the ranks of `axis`, each rounded to its dtype; here of one rank."""
    return parts


@reference("all_gather")
def all_gather(part: Tensor, *, axis: str) -> Tensor:
    """Return the parts of the ranks of `axis`, stacked in order of rank; here of one rank."""
    return part[None]


@reference("dispatch_tokens")
def dispatch_tokens(*own: Tensor, axis: str) -> tuple[Tensor, ...]:
    """Return the rows of all ranks of `axis` in order of rank, with their choice of experts.

    Here of one rank. A row whose experts all lie elsewhere may stay unwritten.
    """
    return own


@reference("combine_tokens")
def combine_tokens(part: Tensor, *, axis: str) -> Tensor:
    """Return this rank's rows of the sum over the ranks of `axis`, rounded; here of one rank."""
    return part


@reference("join_columns")
def join_columns(parts: Tensor, *, columns: int) -> Tensor:
    """Return A[T, columns]: the columns of parts A[R, T, N], part after part; the rest is padding.

    `columns` is the width of the IR result.
    """
    return parts.transpose(0, 1).flatten(1)[:, :columns].contiguous()


@reference("advance")
def advance(
    tokens: Tensor, ids: Tensor, context: Tensor, seg_tokens: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Make the input of the next decode step from the tokens of this one.

    Args:
        tokens: i32[B].
        ids: i32[T]; row s is segment s.
        context: i32[B].
        seg_tokens: i32[B]; a segment without tokens stays as it is.
        position: i32[B].

    Returns:
        ids with the tokens, context and position one further. The token -1 of a broken row becomes
        id 0: the next step may start before anybody has read the token.
    """
    live = (seg_tokens > 0).to(torch.int32)
    next_ids = ids.clone()
    next_ids[: len(tokens)] = torch.where(live > 0, tokens.clamp(min=0), ids[: len(tokens)])
    return next_ids, context + live, position + live


def _local(experts: Tensor, count: int, first: int) -> Tensor:
    """Return the experts numbered within a rank; -1 for those of others."""
    local = experts - first
    return torch.where((local >= 0) & (local < count), local, -1)
