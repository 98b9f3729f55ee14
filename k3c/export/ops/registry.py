"""How an op is declared: one plain torch body, one shape rule, one torch custom op.

The body is the oracle of everything that implements the op later. It computes in float32, or in
float64 when its activations are float64, and rounds where the specification rounds. `REFERENCE`
finds the body of every IR op, at model and at kernel level, by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Reference = Callable[..., tuple[Tensor, ...]]

REFERENCE: dict[str, Reference] = {}

# The registered ops; modules call `library.rms_norm(...)` so that export keeps them opaque.
library: Any = torch.ops.k3c

_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
}


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the torch dtype of an IR dtype name; a torch dtype passes through."""
    return _DTYPES[dtype] if isinstance(dtype, str) else dtype


def internal_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision that ops compute in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def internal(x: Tensor) -> Tensor:
    """Return `x` in the internal precision of its dtype."""
    return x.to(internal_dtype(x.dtype))


def optional_float(value: float | str | None) -> float | None:
    """Return the number, or None where the IR writes "none"."""
    return None if value is None or isinstance(value, str) else float(value)


def as_tuple(function: Callable[..., Any]) -> Reference:
    """Return `function` with a single tensor result wrapped in a tuple."""

    def call(*operands: Any, **attrs: Any) -> tuple[Tensor, ...]:
        results = function(*operands, **attrs)
        return (results,) if isinstance(results, Tensor) else tuple(results)

    return call


def define(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated body as the torch op `k3c::<its name>` and as a reference.

    Args:
        schema: The torch schema; layer attributes are 0-d int32 tensors there.
        fake: The shape rule, same arguments, run on tensors without data.

    Returns:
        A decorator that returns the plain body unchanged.
    """

    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        name = body.__name__
        op = torch.library.custom_op(f"k3c::{name}", body, mutates_args=(), schema=schema)
        op.register_fake(fake)
        REFERENCE[name] = as_tuple(body)
        return body

    return register


def reference(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated body as the reference of the kernel-level op `name` only."""

    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        REFERENCE[name] = as_tuple(body)
        return body

    return register
