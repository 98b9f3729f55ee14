"""Latent mixture of experts: router, products with MXFP4 experts, weighted sum."""

from __future__ import annotations

import torch
from torch import Tensor

from k3c.export.ops.registry import define, internal
from k3c.model.mxfp4 import dequantize

# Added to the sum of the chosen probabilities before dividing by it.
_RENORMALIZE_EPS = 1e-20


def routing_weights(probabilities: Tensor, renormalize: bool, scale: float) -> Tensor:
    """Return the weights f32[T, k] of the chosen experts from their sigmoid scores."""
    if renormalize:
        total = probabilities.sum(-1, keepdim=True) + _RENORMALIZE_EPS
        probabilities = probabilities / total
    return probabilities * scale


@define(
    "(Tensor logits, Tensor bias, int k, bool renormalize, float scale) -> (Tensor, Tensor)",
    lambda logits, bias, k, renormalize, scale: (
        logits.new_empty((logits.shape[0], k)),
        logits.new_empty((logits.shape[0], k), dtype=torch.int32),
    ),
)
def route_topk(
    logits: Tensor, bias: Tensor, k: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Choose the k experts with the largest sigmoid(logits) + bias.

    Args:
        logits: f32[T, E].
        bias: f32[E]; takes part in the choice, not in the weights.
        k: Experts a token.
        renormalize: Divide the weights by their sum.
        scale: Factor of the weights, after that.

    Returns:
        weights f32[T, k] and experts i32[T, k], best first, ties to the lower index. A NaN counts
        as the lowest score; a NaN that is chosen, for want of others, weighs NaN.
    """
    scores = torch.sigmoid(logits)
    choice = torch.nan_to_num(scores + bias, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :k]
    weights = routing_weights(scores.gather(-1, order), renormalize, scale)
    return weights, order.to(torch.int32)


@define(
    "(Tensor x, Tensor packed, Tensor scale, Tensor experts) -> Tensor",
    lambda x, packed, scale, experts: x.new_empty((*experts.shape, packed.shape[1])),
)
def grouped_linear(x: Tensor, packed: Tensor, scale: Tensor, experts: Tensor) -> Tensor:
    """Multiply each row with the matrix of its expert.

    Args:
        x: A[T, K], the same for all of a token's experts, or A[T, k, K].
        packed: u8[E, N, K/2].
        scale: u8[E, N, K/32].
        experts: i32[T, k].

    Returns:
        A[T, k, N].
    """
    rows = x[:, None].expand(-1, experts.shape[1], -1) if x.dim() == 2 else x
    flat, wide = experts.flatten().long(), internal(rows).flatten(0, 1)
    used, counts = flat.unique(return_counts=True)
    weights = dequantize(packed[used], scale[used], wide.dtype)
    order = flat.argsort(stable=True)
    groups = zip(wide[order].split(counts.tolist()), weights, strict=True)
    out = torch.empty((len(flat), packed.shape[1]), dtype=x.dtype, device=x.device)
    out[order] = torch.cat([group @ weight.mT for group, weight in groups]).to(x.dtype)
    return out.unflatten(0, experts.shape)


@define(
    "(Tensor rows, Tensor weights) -> Tensor",
    lambda rows, weights: rows.new_empty((rows.shape[0], rows.shape[2])),
)
def combine(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum A[T, L] of rows A[T, k, L] with weights f32[T, k], rounded once.

    A row of weight 0 is not read: nobody has written it where its expert lies on another rank.
    """
    wide = internal(rows)
    factors = weights[..., None].to(wide.dtype)
    return torch.where(factors == 0, 0.0, wide * factors).sum(1).to(rows.dtype)
