"""From kernel requests and plans to one shared object.

Kernels are compiled one by one and kept by key; then all of them, and the entry function of each
plan, are linked in sorted order: two builds of the same input are byte-identical.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from k3c.artifact import Kernel, Plan
from k3c.codegen.kernel_build import build_kernels
from k3c.codegen.kernel_key import KernelRequest, kernel_key, kernel_symbol
from k3c.codegen.tvm_entry import entry_object
from k3c.errors import CodegenError, DeviceFault
from k3c.targets.target import Target

_LINK_FLAGS = ("-shared", "-nostdlib", "-lm", "-lc", "-Wl,--build-id=none", "-Wl,--hash-style=gnu")


def build_library(
    requests: Iterable[KernelRequest], plans: Sequence[Plan], target: Target, path: Path
) -> tuple[Kernel, ...]:
    """Compile kernels and the entry functions of plans into the shared object `path`.

    Args:
        requests: The kernels; duplicates are built once.
        plans: The plans whose entry functions to add; all their kernels must be requested.
        target: The device.
        path: The file to write.

    Returns:
        The kernels, sorted by symbol, with `path`'s name as their binary.

    Raises:
        CodegenError: A template or an entry function does not compile.
        DeviceFault: g++ is missing.
    """
    by_symbol = {kernel_symbol(r, target): r for r in requests}
    _check_requested(plans, by_symbol.keys())
    objects = build_kernels(tuple(by_symbol.values()), target)
    entries = {plan.entry: entry_object(plan, target) for plan in plans}
    link({**objects, **entries}, path)
    return tuple(_entry(r, target, path.name) for _, r in sorted(by_symbol.items()))


def link(objects: dict[str, bytes], path: Path) -> None:
    """Link objects, in the order of their names, into the shared object `path`.

    Raises:
        DeviceFault: g++ is missing.
        CodegenError: The linker fails.
    """
    linker = shutil.which("g++")
    if linker is None:
        hint = "install it, e.g. apt-get install g++"
        raise DeviceFault("g++ is not on the PATH: kernels cannot be linked", str(path), hint)
    with tempfile.TemporaryDirectory(prefix="k3c-") as folder:
        files = [_write(Path(folder) / f"{name}.o", objects[name]) for name in sorted(objects)]
        made = Path(folder) / "kernels.so"
        command = [linker, "-o", str(made), *files, *_LINK_FLAGS]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CodegenError(f"g++ failed: {done.stderr.strip()[-500:]}", str(path))
        shutil.copyfile(made, path)


def _entry(request: KernelRequest, target: Target, binary: str) -> Kernel:
    key, symbol = kernel_key(request, target), kernel_symbol(request, target)
    return Kernel(
        key,
        symbol,
        binary,
        request.template.name,
        dict(request.constants),
        entry=symbol,
        threads=0,
        shared_bytes=0,
        arch=target.arch,
        min_driver="",
        pdl=False,
    )


def _check_requested(plans: Sequence[Plan], symbols: Iterable[str]) -> None:
    known = set(symbols)
    for plan in plans:
        called = {c.kernel for commands in plan.commands.values() for c in commands}
        missing = sorted(called - known)
        assert not missing, f"{plan.bucket.name} calls {missing[0]}, which is not built"


def _write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)
