"""Attention Residuals: what stands in the place of a residual stream.

Each sublayer reads a mixture of all committed block values and the running prefix, weighted per
token by a learned query. Nothing moves between positions, so nothing is cached.
"""

from __future__ import annotations

from torch import Tensor

from k3c.export.ops import library as ops
from k3c.model.layers import Vector


def attention_residual(
    prefix: Tensor, bank: Tensor, rows: Tensor, *, norm: Vector, proj: Vector, eps: float
) -> Tensor:
    """Return the mixture that one site reads.

    Args:
        prefix: A[T, D], the running prefix, the last source.
        bank: A[NB, T, D], the committed blocks.
        rows: i32[], number of bank rows visible at this site.
        norm: Norm weight f32[D] of the site.
        proj: Query f32[1, D] of the site.
        eps: RMS epsilon of the scores.

    Returns:
        A[T, D].
    """
    return ops.attn_res(prefix, bank, norm.weight, proj.weight, rows, eps)
