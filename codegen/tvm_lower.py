"""From one TIR function to the bytes of an object file.

The passes are the few of TVM's pipeline that kernels written loop by loop need: those that hoist
conditions or partition loops take minutes on a kernel with a chain of column ranges. The device of
a function whose parameters are raw pointers is stated last: passes move allocations out of an
earlier statement of it. Functions that already have a C signature skip most passes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import tvm
from tvm import s_tir
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
    return _finish(tvm.ir.transform.Sequential(_kernel_passes())(bound), target)


def plain_object(functions: dict[str, Any], target: Target) -> bytes:
    """Compile functions that already have a C signature; each is exported under its name."""
    bound = _bind(tvm.IRModule(functions), target)
    passes = [tir.transform.FlattenBuffer(), tir.transform.AnnotateEntryFunc()]
    return _finish(tvm.ir.transform.Sequential(passes)(bound), target)


def _kernel_passes() -> list[Any]:
    return [
        s_tir.transform.StmtSimplify(),
        tir.transform.FlattenBuffer(),
        tir.transform.NarrowDataType(32),
        tir.transform.VectorizeLoop(True),
        tir.transform.UnrollLoop(),
        s_tir.transform.StmtSimplify(),
        s_tir.transform.RewriteUnsafeSelect(),
        tir.transform.VerifyMemory(),
        tir.transform.AnnotateEntryFunc(),
        tir.transform.ConvertSSA(),
        tir.transform.MakePackedAPI(),
    ]


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
