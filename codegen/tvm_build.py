"""From kernel requests and plans to one shared object.

Kernels are compiled one by one and kept by key; then all of them, and the entry function of each
plan, are linked in sorted order: two builds of the same input are byte-identical.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

from k3c.artifact import Kernel, Plan
from k3c.codegen import object_cache
from k3c.codegen.kernel_key import Constants, kernel_key, kernel_symbol
from k3c.codegen.tvm_entry import entry_object
from k3c.codegen.tvm_lower import kernel_object
from k3c.errors import CodegenError, DeviceFault
from k3c.targets.catalogue import Template
from k3c.targets.target import Target

_LINK_FLAGS = ("-shared", "-nostdlib", "-lm", "-lc", "-Wl,--build-id=none", "-Wl,--hash-style=gnu")

# A worker spends seconds on importing TVM, about as long as some kernels take.
_KERNELS_PER_WORKER = 8
_FEWEST_WORKERS = 2


@dataclass(frozen=True)
class KernelRequest:
    """A kernel that a plan calls: its template and the constants it is specialised on."""

    template: Template
    constants: Constants = field(default_factory=dict)

    def kernel(self, target: Target, binary: str) -> Kernel:
        """Return the kernel's entry in the manifest."""
        key = kernel_key(self.template, self.constants, target)
        name = self.template.name
        symbol = kernel_symbol(name, key)
        return Kernel(
            key,
            symbol,
            binary,
            name,
            dict(self.constants),
            entry=symbol,
            threads=0,
            shared_bytes=0,
            arch=target.arch,
            min_driver="",
            pdl=False,
        )


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
    by_symbol = {r.kernel(target, path.name).symbol: r for r in requests}
    _check_requested(plans, by_symbol.keys())
    objects = _build_kernels(dict(sorted(by_symbol.items())), target)
    entries = {plan.entry: entry_object(plan, target) for plan in plans}
    link({**objects, **entries}, path)
    return tuple(r.kernel(target, path.name) for _, r in sorted(by_symbol.items()))


def _build_kernels(requests: Mapping[str, KernelRequest], target: Target) -> dict[str, bytes]:
    """Return the object of every kernel, by symbol; many missing ones are built on all cores."""
    keys = {s: kernel_key(r.template, r.constants, target) for s, r in requests.items()}
    missing = [s for s, key in keys.items() if object_cache.load(key) is None]
    workers = min(len(missing) // _KERNELS_PER_WORKER, len(os.sched_getaffinity(0)))
    if workers < _FEWEST_WORKERS:
        return {s: build_kernel(r, target) for s, r in requests.items()}
    # Spawned, not forked: TVM and torch have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        built = pool.map(build_kernel, [requests[s] for s in missing], repeat(target))
        fresh = dict(zip(missing, built, strict=True))
    return {s: fresh.get(s) or build_kernel(r, target) for s, r in requests.items()}


def build_kernel(request: KernelRequest, target: Target) -> bytes:
    """Return the object of one kernel, from the cache where it is there.

    Raises:
        CodegenError: The template's function does not compile.
    """
    template, constants = request.template, request.constants
    key = kernel_key(template, constants, target)
    found = object_cache.load(key)
    if found is not None:
        return found
    try:
        function = template.build(constants, target)
        built = kernel_object(function, kernel_symbol(template.name, key), target)
    # TVM's errors have many classes and some derive from BaseException's other children.
    except Exception as exc:
        listed = ", ".join(f"{k}={v}" for k, v in sorted(constants.items()))
        what = f"template {template.name} does not compile: {_last_line(exc)}"
        raise CodegenError(what, f"{listed}; {target.name}") from exc
    object_cache.store(key, built)
    return built


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


def _check_requested(plans: Sequence[Plan], symbols: Iterable[str]) -> None:
    known = set(symbols)
    for plan in plans:
        called = {c.kernel for commands in plan.commands.values() for c in commands}
        missing = sorted(called - known)
        assert not missing, f"{plan.bucket.name} calls {missing[0]}, which is not built"


def _write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def _last_line(exc: Exception) -> str:
    lines = [line for line in str(exc).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(exc).__name__
