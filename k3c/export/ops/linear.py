"""Matrix products and row look-ups. No op here has a bias."""

from __future__ import annotations

import torch
from torch import Tensor

from k3c.export.ops.registry import define, internal, internal_dtype


def matmul_wide(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T in the internal precision of x; weights of any stored dtype are exact there."""
    wide = internal(x)
    return wide @ weight.to(wide.dtype).mT


@define(
    "(Tensor x, Tensor weight, bool wide=False) -> Tensor",
    lambda x, weight, wide=False: x.new_empty(
        (*x.shape[:-1], weight.shape[0]), dtype=internal_dtype(x.dtype) if wide else x.dtype
    ),
)
def linear(x: Tensor, weight: Tensor, wide: bool = False) -> Tensor:
    """Return x W^T.

    Args:
        x: A[T, K].
        weight: [N, K] in its stored dtype.
        wide: Keep the accumulator's precision in the result (router and lm_head). The IR has no
            such attribute: there the result type says it.

    Returns:
        A[T, N], or f32[T, N] when wide.
    """
    y = matmul_wide(x, weight)
    return y if wide else y.to(x.dtype)


@define(
    "(Tensor ids, Tensor table, ScalarType dtype) -> Tensor",
    lambda ids, table, dtype: table.new_empty((ids.shape[0], table.shape[1]), dtype=dtype),
)
def embed(ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows `ids` i32[T] of table [V, D] as dtype[T, D]; the IR's result type is `dtype`."""
    return table[ids.long()].to(dtype)


@define(
    "(Tensor x, Tensor index) -> Tensor",
    lambda x, index: x.new_empty((index.shape[0], x.shape[1])),
)
def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return rows `index` i32[B] of x A[T, D] as A[B, D]."""
    return x[index.long()]
