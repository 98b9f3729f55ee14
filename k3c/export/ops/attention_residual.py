"""Attention Residuals: the running prefix, the bank of committed blocks, and their mixture."""

from __future__ import annotations

import torch
from torch import Tensor

from k3c.export.ops.registry import define, internal


@define(
    "(Tensor prefix, Tensor delta, Tensor restart) -> Tensor",
    lambda prefix, delta, restart: torch.empty_like(delta),
)
def residual_join(prefix: Tensor, delta: Tensor, restart: Tensor | int) -> Tensor:
    """Add a sublayer's output to the running prefix, or restart the prefix with it.

    Args:
        prefix: A[T, D]; not read when restarting, so it may hold anything then.
        delta: A[T, D].
        restart: Layer attribute; non-zero: the result is `delta`.

    Returns:
        A[T, D], rounded to A before anything reads it.
    """
    return delta.clone() if int(restart) else prefix + delta


@define(
    "(Tensor prefix, Tensor bank, Tensor res_norm, Tensor res_proj, Tensor rows, float eps)"
    " -> Tensor",
    lambda prefix, bank, res_norm, res_proj, rows, eps: torch.empty_like(prefix),
)
def attn_res(
    prefix: Tensor, bank: Tensor, res_norm: Tensor, res_proj: Tensor, rows: Tensor | int, eps: float
) -> Tensor:
    """Mix the committed blocks and the prefix with weights from their normalised scores.

    The scores read RMS-normalised sources, the mixture reads raw ones; both stay in the internal
    precision. With no visible bank row the result is the prefix.

    Args:
        prefix: A[T, D], the last source.
        bank: A[NB, T, D]; rows past `rows` are not read.
        res_norm: f32[D] norm weight of this site.
        res_proj: f32[1, D] query of this site.
        rows: Layer attribute: number of visible bank rows.
        eps: RMS epsilon.

    Returns:
        A[T, D].
    """
    sources = internal(torch.cat([bank[: int(rows)], prefix[None]]))
    query = (res_norm * res_proj[0]).to(sources.dtype)
    scores = (sources @ query) * torch.rsqrt(sources.square().mean(-1) + eps)
    weights = torch.softmax(scores, dim=0)
    return (weights[..., None] * sources).sum(0).to(prefix.dtype)


@define(
    "(Tensor bank, Tensor prefix, Tensor row) -> Tensor",
    lambda bank, prefix, row: torch.empty_like(bank),
)
def bank_commit(bank: Tensor, prefix: Tensor, row: Tensor | int) -> Tensor:
    """Return the bank with `prefix` A[T, D] written to bank row `row`; -1 changes nothing."""
    bank = bank.clone()
    if int(row) >= 0:
        bank[int(row)] = prefix
    return bank
