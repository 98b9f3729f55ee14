"""Elementwise activations."""

from __future__ import annotations

import torch
from torch import Tensor

from k3c.export.ops.registry import REFERENCE, as_tuple, define, internal, optional_float


@define(
    "(Tensor gate, Tensor up, float beta, float? linear_beta) -> Tensor",
    lambda gate, up, beta, linear_beta: torch.empty_like(gate),
)
def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | str | None) -> Tensor:
    """Return beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta).

    The sigmoid reads the uncapped gate. Without `linear_beta` the up branch passes unchanged.

    Args:
        gate: A[..., I].
        up: A[..., I].
        beta: Cap of the gate's linear factor.
        linear_beta: Cap of the up branch; None or "none" for no cap.

    Returns:
        A[..., I], rounded once.
    """
    g, u, cap = internal(gate), internal(up), optional_float(linear_beta)
    if cap is not None:
        u = cap * torch.tanh(u / cap)
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * u).to(gate.dtype)


@define("(Tensor a, Tensor z) -> Tensor", lambda a, z: torch.empty_like(a))
def sigmoid_mul(a: Tensor, z: Tensor) -> Tensor:
    """Return a * sigmoid(z) for A[T, N] tensors; the sigmoid is rounded to A before the product."""
    return a * torch.sigmoid(internal(z)).to(a.dtype)


REFERENCE["add"] = as_tuple(torch.add)
