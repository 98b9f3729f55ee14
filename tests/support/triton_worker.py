"""Runs Triton kernels in Triton's interpreter. Works only in a process with TRITON_INTERPRET=1.

The variable decides at import time what `@triton.jit` makes, so one process cannot both interpret
and compile.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
import torch

from k3c.codegen.triton_aot import OPTIONS, TYPES, decode

_TORCH = {
    "*bf16": torch.bfloat16,
    "*fp32": torch.float32,
    "*fp8e4nv": torch.float8_e4m3fn,
    "*i32": torch.int32,
    "*i64": torch.int64,
    "*u8": torch.uint8,
}


def interpret(launch: dict[str, Any], wrapped: list[np.ndarray[Any, Any]], guard: int) -> None:
    """Run one stage on the buffers that start `guard` bytes into `wrapped`."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "start me with TRITON_INTERPRET=1"
    _patch_interpreter()
    kernel = _template(launch["module"], launch["template"]).kernels[launch["stage"]]
    pointers = []
    for data, kind in zip(wrapped, launch["types"], strict=False):
        inside = torch.from_numpy(data)[guard:]
        pointers.append(inside.view(_TORCH[kind]))
    constants = launch["constants"]
    constexprs = {k: decode(v) for k, v in constants.items() if k != TYPES and k not in OPTIONS}
    if "PDL" in constexprs:
        constexprs["PDL"] = 0
    # As the compiler does: constexprs by name, the other parameters in order.
    runtime = [name for name in kernel.arg_names if name not in constexprs]
    given = dict(zip(runtime, [*pointers, *launch["scalars"]], strict=True))
    kernel[tuple(launch["grid"])](**given, **constexprs)


def _template(module: str, name: str) -> Any:
    for found in vars(importlib.import_module(module)).values():
        for item in found if isinstance(found, tuple) else (found,):
            if getattr(item, "name", None) == name and getattr(item, "kernels", None):
                return item() if isinstance(item, type) else item
    raise AssertionError(f"{module} has no template {name}")


def _patch_interpreter() -> None:
    """Mend what the interpreter does with bf16 and float8: wrong casts, and dots of bf16."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "k3c_patched", False):
        return
    original_dot, original_convert = builder.create_dot, interpreter._convert_float

    def widen(handle: Any) -> Any:
        if handle.data.dtype != np.uint16:
            return handle
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, interpreter.tl.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return original_dot(self, widen(a), widen(b), d, *rest)

    def convert(values: Any, from_type: Any, to_type: Any, *rest: Any) -> Any:
        if from_type == interpreter.tl.float32 and to_type == interpreter.tl.bfloat16:
            return _round_to_bf16(values)
        if from_type == interpreter.tl.float32 and to_type == interpreter.tl.float8e4nv:
            return _as_float8(values)
        if from_type == interpreter.tl.float8e4nv and to_type == interpreter.tl.float32:
            return _from_float8(values)
        if from_type == interpreter.tl.float8e4nv and to_type == interpreter.tl.bfloat16:
            return _round_to_bf16(_from_float8(values))
        return original_convert(values, from_type, to_type, *rest)

    builder.create_dot = create_dot
    interpreter._convert_float = convert
    builder.k3c_patched = True


def _round_to_bf16(values: Any) -> np.ndarray[Any, Any]:
    """Return the bits u16 of float32 values rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded)


def _as_float8(values: Any) -> np.ndarray[Any, Any]:
    """Return the bits u8 of float32 values rounded to float8 e4m3."""
    wide = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
    return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _from_float8(values: Any) -> np.ndarray[Any, Any]:
    """Return the float32 values of float8 e4m3 bits u8; the interpreter takes NaN for 480."""
    narrow = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8))
    return narrow.view(torch.float8_e4m3fn).float().numpy()
