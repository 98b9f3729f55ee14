"""Nodes, operands and the comparison of results, for tests of kernels on any target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3c.ir.graph import Node, Value
from k3c.ir.types import DTYPES, Layout, TensorType
from k3c.targets.catalogue import Template
from k3c.targets.target import Target

Operand = Tensor | tuple[Tensor, Tensor]
TORCH = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}
NAMES = {v: k for k, v in TORCH.items()}


def value(name: str, dtype: str, *shape: int, layout: str = "row_major") -> Value:
    """Return a value of an IR type."""
    return Value(name, TensorType(DTYPES[dtype], shape, Layout(layout)))


def node(
    op: str, tensors: Sequence[Operand], results: Sequence[tuple[Any, ...]], **attrs: Any
) -> Node:
    """Return a node whose operand types are those of `tensors`; results are (dtype, *shape)."""
    operands = tuple(_value_of(f"x{i}", t) for i, t in enumerate(tensors))
    made = tuple(value(f"y{i}", r[0], *r[1:]) for i, r in enumerate(results))
    return Node(op, operands, made, attrs)


def with_layouts(template: Template, n: Node, target: Target) -> Node:
    """Return the node with the layouts that the template asks for on its operands."""
    operands = list(n.operands)
    for index, name in template.layouts(n, target).items():
        old = operands[index]
        operands[index] = Value(old.name, replace(old.type, layout=Layout(name)))
    return replace(n, operands=tuple(operands))


def compare(what: str, got: Tensor, want: Tensor, bound: float) -> None:
    """Assert equal integers, or floats within max|diff| / max|ref| <= bound."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    if not got.dtype.is_floating_point:
        assert torch.equal(got, want.to(got.dtype)), f"{what}: integers differ"
        return
    a, b = got.double(), want.double()
    assert torch.isfinite(a).all(), f"{what}: {int((~torch.isfinite(a)).sum())} values not finite"
    scale = float(b.abs().max()) if b.numel() else 0.0
    error = float((a - b).abs().max()) if b.numel() else 0.0
    limit = bound * (scale or 1.0)
    assert error <= limit, f"{what}: error {error:.3g} > {limit:.3g} (bound {bound:.3g})"


def to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return the elements; bfloat16 as uint16 bits."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def _value_of(name: str, operand: Operand) -> Value:
    if isinstance(operand, tuple):
        *lead, half = operand[0].shape
        return value(name, "mxfp4", *lead, 2 * half)
    return value(name, NAMES[operand.dtype], *operand.shape)
