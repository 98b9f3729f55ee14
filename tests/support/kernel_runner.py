"""Run one kernel as the runtime does: through ctypes, on 64-byte aligned buffers, without tvm.

Every buffer stands between guard bytes that read as NaN; outputs and workspace start as NaN; the
guards and the read-only inputs are compared after the launch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3c.codegen.kernel_build import build_kernel
from k3c.codegen.kernel_key import KernelRequest, kernel_symbol
from k3c.codegen.template import pack, packed_nbytes
from k3c.codegen.tvm_build import link
from k3c.export.ops import REFERENCE
from k3c.ir.graph import LayerAttr, Node
from k3c.ir.ops import OPS
from k3c.ir.types import TensorType
from k3c.targets.catalogue import Template
from k3c.targets.target import Target, load_target
from tests.support.nodes import TORCH, Operand, compare, node, to_numpy, value, with_layouts

__all__ = ["check", "compare", "node", "run", "value", "with_layouts"]

GUARD_BYTES = 192
NAN_BYTE = 0xFF


class AnyValue(ctypes.Structure):
    """TVMFFIAny: a type index, padding, a value."""

    _fields_ = (("type_index", ctypes.c_int32), ("pad", ctypes.c_int32), ("value", ctypes.c_int64))


class GuardedBuffer:
    """Bytes at a 64-byte aligned address between two guards."""

    def __init__(self, nbytes: int) -> None:
        whole = np.full(nbytes + 2 * GUARD_BYTES + 64, NAN_BYTE, np.uint8)
        start = GUARD_BYTES + (-(whole.ctypes.data + GUARD_BYTES)) % 64
        self._whole = whole
        self._before = whole[:start]
        self._after = whole[start + nbytes :]
        self.data = whole[start : start + nbytes]
        self.address = self.data.ctypes.data

    def check(self, what: str) -> None:
        """Assert that the guards are as they were."""
        assert (self._before == NAN_BYTE).all(), f"{what}: written before its first byte"
        assert (self._after == NAN_BYTE).all(), f"{what}: written past its last byte"


@dataclass(frozen=True)
class Prepared:
    """A kernel with its buffers, ready to launch again and again."""

    function: Any
    arguments: Any
    count: int
    buffers: tuple[GuardedBuffer, ...]
    outputs: tuple[GuardedBuffer, ...]

    def launch(self) -> None:
        """Run the kernel once."""
        result = AnyValue()
        status = self.function(None, self.arguments, self.count, ctypes.byref(result))
        assert status == 0, f"kernel returned status {status}"


def prepare(
    template: Template, n: Node, tensors: Sequence[Operand],
    layer_attrs: Mapping[str, int] | None = None, target: Target | None = None,
) -> Prepared:  # fmt: skip
    """Compile the template for a node and fill its buffers."""
    target = target or load_target("cpu")
    n = with_layouts(template, n, target)
    refusal = template.accepts(n, target)
    assert refusal is None, f"{template.name} refuses: {refusal}"
    operands = [_operand_buffer(v.type, t) for v, t in zip(n.operands, tensors, strict=True)]
    in_place = _in_place(n)
    fresh = {i: GuardedBuffer(r.type.nbytes) for i, r in enumerate(n.results) if i not in in_place}
    outputs = [operands[in_place[i]] if i in in_place else fresh[i] for i in range(len(n.results))]
    buffers = [*operands, *fresh.values()]
    scratch = template.workspace_bytes(n, target)
    if scratch:
        buffers.append(GuardedBuffer(scratch))
    scalars = [_scalar(s, layer_attrs or {}) for _, s in template.scalars(n)]
    words = [(4, b.address) for b in buffers] + [(1, s) for s in scalars]
    arguments = (AnyValue * len(words))(*[AnyValue(t, 0, v) for t, v in words])
    function = load_kernel(template, template.constants(n, target), target)
    return Prepared(function, arguments, len(words), tuple(buffers), tuple(outputs))


def run(
    template: Template, n: Node, tensors: Sequence[Operand],
    layer_attrs: Mapping[str, int] | None = None, target: Target | None = None,
) -> list[Tensor]:  # fmt: skip
    """Run a kernel on fresh buffers and return its results, in-place ones included."""
    ready = prepare(template, n, tensors, layer_attrs, target)
    before = [b.data.copy() for b in ready.buffers[: len(tensors)]]
    ready.launch()
    for i, buffer in enumerate(ready.buffers):
        buffer.check(f"{template.name} argument {i}")
    changed = set(_in_place(n).values())
    for i, (old, buffer) in enumerate(zip(before, ready.buffers, strict=False)):
        assert i in changed or (old == buffer.data).all(), f"{template.name} wrote operand {i}"
    return [_to_tensor(r.type, b) for r, b in zip(n.results, ready.outputs, strict=True)]


def check(
    template: Template, n: Node, tensors: Sequence[Operand], bound: float,
    layer_attrs: Mapping[str, int] | None = None, **reference_attrs: Any,
) -> list[Tensor]:  # fmt: skip
    """Run a kernel twice, bitwise equal, and compare it with its reference op.

    Args:
        template: The template.
        n: A node with bound shapes.
        tensors: One torch tensor an operand; (packed, scale) for mxfp4.
        bound: Largest allowed max|diff| / max|ref| of each float result; integers must be equal.
        layer_attrs: Values of the layer attributes.
        reference_attrs: Attributes of the reference beyond (or instead of) the node's.

    Returns:
        The kernel's results.
    """
    got = run(template, n, tensors, layer_attrs)
    again = run(template, n, tensors, layer_attrs)
    for i, (a, b) in enumerate(zip(got, again, strict=True)):
        assert _bytes(a).equal(_bytes(b)), f"{template.name} result {i} differs from run to run"
    known = layer_attrs or {}
    attrs = {k: known[v.name] if isinstance(v, LayerAttr) else v for k, v in n.attrs.items()}
    copies = [t.clone() if isinstance(t, Tensor) else t for t in tensors]
    want = REFERENCE[template.reference](*copies, **{**attrs, **reference_attrs})
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        compare(f"{template.name} result {i}", a, b, bound)
    return got


def load_kernel(template: Template, constants: Mapping[str, Any], target: Target) -> Any:
    """Return the kernel as a ctypes function."""
    symbol = kernel_symbol(KernelRequest(template, constants), target)
    items = tuple(sorted(constants.items()))
    function = getattr(_library(template, items, target, symbol), f"__tvm_ffi_{symbol}")
    function.restype = ctypes.c_int32
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p]
    return function


@cache
def _library(template: Template, constants: tuple[Any, ...], target: Target, symbol: str) -> Any:
    built = build_kernel(KernelRequest(template, dict(constants)), target)
    with tempfile.TemporaryDirectory(prefix="k3c-test-") as folder:
        path = Path(folder) / "kernel.so"
        link({symbol: built}, path)
        return open_library(path)


def open_library(path: Path) -> Any:
    """Load a shared object of kernels and give it TVM's C runtime."""
    runtime = _tvm_runtime()
    library = ctypes.CDLL(str(path))
    for name in ("ParallelLaunch", "AllocWorkspace", "FreeWorkspace"):
        address = ctypes.cast(getattr(runtime, f"TVMBackend{name}"), ctypes.c_void_p).value
        try:
            slot = ctypes.c_void_p.in_dll(library, f"__TVMBackend{name}")
        except ValueError:  # this library does not use it
            continue
        slot.value = address
    return library


@cache
def _tvm_runtime() -> Any:
    found = [
        next(Path(p).rglob(name))
        for package, name in (("tvm_ffi", "libtvm_ffi.so"), ("tvm", "libtvm_runtime.so"))
        for p in importlib.util.find_spec(package).submodule_search_locations  # type: ignore[union-attr]
    ]
    return [ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in found][-1]


def _in_place(n: Node) -> Mapping[int, int]:
    return OPS[n.op].in_place if n.op in OPS else {}


def _operand_buffer(type_: TensorType, operand: Operand) -> GuardedBuffer:
    tensors = operand if isinstance(operand, tuple) else (operand,)
    packed = pack(type_, [to_numpy(t) for t in tensors])
    assert packed.nbytes == packed_nbytes(type_), f"{type_}: {packed.nbytes} bytes"
    buffer = GuardedBuffer(packed.nbytes)
    buffer.data[:] = packed
    return buffer


def _to_tensor(type_: TensorType, buffer: GuardedBuffer) -> Tensor:
    flat = torch.from_numpy(buffer.data.copy())
    return flat.view(TORCH[type_.dtype.name]).view(type_.sizes)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _scalar(given: int | LayerAttr, attrs: Mapping[str, int]) -> int:
    return attrs[given.name] if isinstance(given, LayerAttr) else given
