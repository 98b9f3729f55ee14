"""The smallest modules: a linear map, an embedding table, a vector of parameters, a norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from k3c.export.ops import library as ops
from k3c.model.options import ModelOptions


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Return an uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Matrix(nn.Module):
    """A weight [rows, columns] in the options' weight dtype."""

    def __init__(self, rows: int, columns: int, options: ModelOptions) -> None:
        super().__init__()
        self.weight = parameter(rows, columns, dtype=options.weight)


class Linear(Matrix):
    """y = x W^T. With `wide` the result keeps the accumulator's precision."""

    def __init__(
        self, out_features: int, in_features: int, options: ModelOptions, *, wide: bool = False
    ) -> None:
        super().__init__(out_features, in_features, options)
        self.wide = wide

    def forward(self, x: Tensor) -> Tensor:
        """Return A[T, N], or f32[T, N] when wide, for x A[T, K]."""
        return ops.linear(x, self.weight, self.wide)


class Embedding(Matrix):
    """Rows of a table."""

    def __init__(self, rows: int, width: int, options: ModelOptions) -> None:
        super().__init__(rows, width, options)
        self.act = options.act

    def forward(self, ids: Tensor) -> Tensor:
        """Return A[T, D] for ids i32[T]."""
        return ops.embed(ids, self.weight, self.act)


class Vector(nn.Module):
    """A small parameter called `weight` that another op reads."""

    def __init__(self, *shape: int, options: ModelOptions) -> None:
        super().__init__()
        self.weight = parameter(*shape, dtype=options.vector)


class RMSNorm(Vector):
    """RMSNorm over the last axis."""

    def __init__(self, width: int, eps: float, options: ModelOptions) -> None:
        super().__init__(width, options=options)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return A[T, D] for x A[T, D]."""
        return ops.rms_norm(x, self.weight, self.eps)


def retype_weights(module: nn.Module, dtype_of: Callable[[str], torch.dtype]) -> None:
    """Change the element types of the linear and embedding weights below `module`.

    Args:
        module: Any module of the model, on any device, `meta` included.
        dtype_of: The dtype of a weight by its name relative to `module`.
    """
    for name, child in module.named_modules():
        if isinstance(child, Matrix):
            weight = child.weight.data.to(dtype_of(f"{name}.weight"))
            child.weight = nn.Parameter(weight, requires_grad=False)
