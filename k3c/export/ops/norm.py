"""Normalisations: statistics and weights in the internal precision, one rounding at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from k3c.export.ops.registry import define, internal, internal_dtype


@define(
    "(Tensor x, Tensor weight, float eps) -> Tensor", lambda x, weight, eps: torch.empty_like(x)
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight for x A[T, D] and weight f32[D]."""
    wide = internal(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


@define(
    "(Tensor x, int heads, float scale, float eps) -> Tensor",
    lambda x, heads, scale, eps: x.new_empty(x.shape, dtype=internal_dtype(x.dtype)),
)
def l2_norm(x: Tensor, heads: int, scale: float, eps: float) -> Tensor:
    """Return x / sqrt(sum over each head of x^2 + eps) * scale, kept wide.

    Args:
        x: A[T, P], head-major.
        heads: Number of heads; P = heads * head_dim.
        scale: Factor applied after the norm.
        eps: Epsilon inside the root.

    Returns:
        f32[T, P].
    """
    wide = internal(x).unflatten(-1, (heads, -1))
    norm = torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return (wide * norm * scale).flatten(-2)


@define(
    "(Tensor o, Tensor weight, Tensor z, int heads, float eps) -> Tensor",
    lambda o, weight, z, heads, eps: torch.empty_like(o),
)
def gated_rms_norm(o: Tensor, weight: Tensor, z: Tensor, heads: int, eps: float) -> Tensor:
    """Normalise each head of o A[T, P] with weight f32[V], times sigmoid of z A[T, P]."""
    wide = internal(o).unflatten(-1, (heads, -1))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    gate = torch.sigmoid(internal(z)).unflatten(-1, (heads, -1))
    return (wide * scale * weight * gate).flatten(-2).to(o.dtype)
