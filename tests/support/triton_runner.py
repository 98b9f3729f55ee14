"""Runs GPU templates: on a device where there is one, else in Triton's interpreter.

`check` has the contract of `tests.support.kernel_runner.check`. Three backends:
- a CPU machine: the interpreter, in a child process;
- `K3C_RECORD_KERNELS=<folder>`: nothing runs; the kernels of target `h200` are compiled into the
  folder, named by template, stage and constants;
- `K3C_DEVICE_KERNELS=<folder>`: the recorded kernels run on the device.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from k3c.codegen.kernel_key import KernelRequest
from k3c.codegen.template import pack, packed_nbytes
from k3c.codegen.triton_aot import TYPES, GpuBinary
from k3c.export.ops import REFERENCE
from k3c.ir.graph import LayerAttr, Node
from k3c.ir.ops import OPS
from k3c.targets.catalogue import Stage
from k3c.targets.target import Target, load_target
from tests.support.nodes import TORCH, Operand, compare, node, to_numpy, value, with_layouts

__all__ = ["GPU_TARGETS", "ON_DEVICE", "check", "compiles", "node", "run", "value"]

GPU_TARGETS = ("h200", "b200", "b300", "gb300", "mi355x")
ON_DEVICE = "K3C_DEVICE_KERNELS" in os.environ
GUARD_BYTES = 256
NAN_BYTE = 0xFF


@dataclass(frozen=True)
class Launch:
    """Everything of one stage but its buffers."""

    template: Any
    stage: Stage
    scalars: tuple[int, ...]

    @property
    def types(self) -> list[str]:
        """Types of the run-time arguments."""
        return str(self.stage.constants[TYPES]).split()

    @property
    def file_name(self) -> str:
        """Where a recorded kernel lies."""
        text = json.dumps(dict(self.stage.constants), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:20]
        return f"{self.template.name}-{self.stage.name}-{digest}.kernel"


def check(
    template: Any, n: Node, tensors: Sequence[Operand], bound: float,
    layer_attrs: Mapping[str, int] | None = None, **reference_attrs: Any,
) -> list[Tensor]:  # fmt: skip
    """Run a template twice, bitwise equal, and compare it with its reference op.

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
    known = layer_attrs or {}
    attrs = {k: known[v.name] if isinstance(v, LayerAttr) else v for k, v in n.attrs.items()}
    copies = [t.clone() if isinstance(t, Tensor) else t for t in tensors]
    want = REFERENCE[template.reference](*copies, **{**attrs, **reference_attrs})
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        compare(f"{template.name} result {i}", a, b, bound)
    return got


def run(
    template: Any, n: Node, tensors: Sequence[Operand],
    layer_attrs: Mapping[str, int] | None = None, target: Target | None = None,
) -> list[Tensor]:  # fmt: skip
    """Run all stages twice on poisoned outputs and workspace; return the results.

    Operands that are not overwritten in place must be unchanged, bytes around every buffer too.
    """
    target = target or load_target("h200")
    n = with_layouts(template, n, target)
    refusal = template.accepts(n, target)
    assert refusal is None, f"{template.name} refuses: {refusal}"
    launches = _launches(template, n, layer_attrs or {}, target)
    if "K3C_RECORD_KERNELS" in os.environ:
        _record(launches, target)
        pytest.skip("recorded, not run")
    buffers = _buffers(template, n, tensors, target)
    first, second = _execute(launches, buffers), _execute(launches, buffers)
    _check_untouched(template, n, buffers, first)
    shared = OPS[n.op].in_place
    places = _result_places(n, shared)
    for i, place in enumerate(places):
        same = (first[place] == second[place]).all()
        assert same, f"{template.name} result {i} differs from run to run"
    return [
        torch.from_numpy(first[place].copy()).view(TORCH[r.type.dtype.name]).view(r.type.sizes)
        for place, r in zip(places, n.results, strict=True)
    ]


def compiles(template: Any, n: Node, target: Target) -> list[GpuBinary]:
    """Compile every stage of a template for a target, through the cache.

    Returns:
        The binaries, in order.
    """
    from k3c.codegen.kernel_build import build_kernel

    n = with_layouts(template, n, target)
    refusal = template.accepts(n, target)
    assert refusal is None, f"{template.name} refuses: {refusal}"
    made = []
    for stage in template.stages(n, target):
        request = KernelRequest(template, stage.constants, stage.name)
        made.append(GpuBinary.from_bytes(build_kernel(request, target)))
        assert made[-1].code[:4] == b"\x7fELF", f"{request.name} is no ELF file"
    return made


def _launches(
    template: Any, n: Node, attrs: Mapping[str, int], target: Target
) -> tuple[Launch, ...]:
    scalars = tuple(
        attrs[given.name] if isinstance(given, LayerAttr) else given
        for _, given in template.scalars(n)
    )
    return tuple(Launch(template, stage, scalars) for stage in template.stages(n, target))


def _buffers(
    template: Any, n: Node, tensors: Sequence[Operand], target: Target
) -> list[np.ndarray[Any, Any]]:
    """Return the bytes of operands, poisoned results and poisoned workspace."""
    made = []
    for operand, given in zip(n.operands, tensors, strict=True):
        parts = given if isinstance(given, tuple) else (given,)
        packed = pack(operand.type, [_bytes_of(t) for t in parts])
        assert packed.nbytes == packed_nbytes(operand.type), f"{operand.type}: {packed.nbytes} B"
        made.append(packed.reshape(-1).view(np.uint8))
    shared = OPS[n.op].in_place
    fresh = [r.type.nbytes for i, r in enumerate(n.results) if i not in shared]
    workspace = template.workspace_bytes(n, target)
    sizes = [*fresh, *([workspace] if workspace else [])]
    return [*made, *(np.full(size, NAN_BYTE, np.uint8) for size in sizes)]


def _bytes_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.contiguous().view(torch.uint8).numpy()
    return to_numpy(tensor)


def _result_places(n: Node, shared: Mapping[int, int]) -> list[int]:
    places, cursor = [], len(n.operands)
    for i in range(len(n.results)):
        if i in shared:
            places.append(shared[i])
        else:
            places.append(cursor)
            cursor += 1
    return places


def _check_untouched(
    template: Any, n: Node, before: Sequence[np.ndarray[Any, Any]], after: Sequence[Any]
) -> None:
    changed = set(OPS[n.op].in_place.values())
    for i in range(len(n.operands)):
        same = i in changed or (before[i] == after[i]).all()
        assert same, f"{template.name} wrote operand {i}"


def _execute(
    launches: Sequence[Launch], buffers: Sequence[np.ndarray[Any, Any]]
) -> list[np.ndarray[Any, Any]]:
    """Run the launches on copies that stand between guard bytes; return the copies."""
    guard = np.full(GUARD_BYTES, NAN_BYTE, np.uint8)
    tails = [-(b.nbytes + GUARD_BYTES) % 64 for b in buffers]
    wrapped = [
        np.concatenate([guard, b, guard, guard[:tail]])
        for b, tail in zip(buffers, tails, strict=True)
    ]
    backend = _on_device if ON_DEVICE else _interpreted
    done = backend(launches, wrapped)
    results = []
    for i, (old, new) in enumerate(zip(buffers, done, strict=True)):
        head, body, rest = np.split(new, [GUARD_BYTES, GUARD_BYTES + old.nbytes])
        assert (head == NAN_BYTE).all(), f"argument {i}: written before its first byte"
        assert (rest == NAN_BYTE).all(), f"argument {i}: written past its last byte"
        results.append(body)
    return results


def _interpreted(
    launches: Sequence[Launch], wrapped: list[np.ndarray[Any, Any]]
) -> list[np.ndarray[Any, Any]]:
    return _worker().apply(interpret_all, (_described(launches), wrapped))


def _described(launches: Sequence[Launch]) -> list[dict[str, Any]]:
    return [
        {
            "module": type(launch.template).__module__,
            "template": launch.template.name,
            "stage": launch.stage.name,
            "constants": dict(launch.stage.constants),
            "types": launch.types,
            "scalars": launch.scalars,
            "grid": launch.stage.grid,
        }
        for launch in launches
    ]


def interpret_all(
    launches: list[dict[str, Any]], wrapped: list[np.ndarray[Any, Any]]
) -> list[np.ndarray[Any, Any]]:
    """Run launches in this process, which interprets Triton."""
    from tests.support.triton_worker import interpret

    for launch in launches:
        interpret(launch, wrapped, GUARD_BYTES)
    return wrapped


@cache
def _worker() -> Any:
    """Return a child process whose Triton interprets."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        return multiprocessing.get_context("spawn").Pool(1)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def _record(launches: Sequence[Launch], target: Target) -> None:
    from k3c.codegen.kernel_build import build_kernel

    folder = Path(os.environ["K3C_RECORD_KERNELS"])
    folder.mkdir(parents=True, exist_ok=True)
    for launch in launches:
        request = KernelRequest(launch.template, launch.stage.constants, launch.stage.name)
        (folder / launch.file_name).write_bytes(build_kernel(request, target))


def _on_device(
    launches: Sequence[Launch], wrapped: list[np.ndarray[Any, Any]]
) -> list[np.ndarray[Any, Any]]:
    from tests.support.triton_device import launch_all

    folder = Path(os.environ["K3C_DEVICE_KERNELS"])
    steps = []
    for launch in launches:
        binary = GpuBinary.from_bytes((folder / launch.file_name).read_bytes())
        steps.append((binary, launch.stage.grid, launch.types, launch.scalars))
    return launch_all(steps, wrapped, GUARD_BYTES)
