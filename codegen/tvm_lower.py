"""From one TIR function to the bytes of an object file.

Kernels go through TVM's own lowering. Two things differ from `tvm.compile`: the device of a kernel
whose parameters are raw pointers is stated after lowering (a pass moves allocations out of an
earlier statement of it), and functions that already have a C signature skip most passes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx as tir

from k3c.targets.target import Target

_DEVICE_CPU = 1


def tvm_target(target: Target) -> Any:
    """Return the target as TVM describes it."""
    return tvm.target.Target({"kind": "llvm", "mcpu": target.mcpu, "opt-level": 3})


def kernel_object(function: Any, symbol: str, target: Target) -> bytes:
    """Compile a kernel, exported as the packed function `__tvm_ffi_<symbol>`."""
    named = function.with_attr("global_symbol", symbol)
    bound = _bind(tvm.IRModule({symbol: named}), target)
    lower, _, _ = tir.get_tir_pipeline("s_tir")
    return _finish(lower(bound), target)


def plain_object(functions: dict[str, Any], target: Target) -> bytes:
    """Compile functions that already have a C signature; each is exported under its name."""
    bound = _bind(tvm.IRModule(functions), target)
    passes = [tir.transform.FlattenBuffer(), tir.transform.AnnotateEntryFunc()]
    return _finish(tvm.ir.transform.Sequential(passes)(bound), target)


def _bind(module: Any, target: Target) -> Any:
    host = tvm_target(target)
    return tir.transform.BindTarget(host.with_host(host))(module)


def _finish(module: Any, target: Target) -> bytes:
    functions = {name: _with_device(f) for name, f in module.functions.items()}
    placed = tvm.IRModule(functions, attrs=module.attrs)
    passes = [tir.transform.LowerTVMBuiltin(), tir.transform.LowerIntrin()]
    lowered = tvm.ir.transform.Sequential(passes)(placed)
    generate = tvm.get_global_func("target.build.llvm")
    assert generate is not None, "this build of tvm has no LLVM"
    return _object_bytes(generate(lowered, tvm_target(target)))


def _with_device(function: Any) -> Any:
    body = tir.AttrStmt("default", "device_id", tir.const(0, "int32"), function.body)
    cpu = tir.const(_DEVICE_CPU, "int32")
    return function.with_body(tir.AttrStmt("default", "device_type", cpu, body))


def _object_bytes(module: Any) -> bytes:
    with tempfile.TemporaryDirectory(prefix="k3c-") as folder:
        path = Path(folder) / "kernel.o"
        module.write_to_file(str(path), "o")
        return path.read_bytes()
