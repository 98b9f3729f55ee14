"""Compiles kernels for any target, on all cores, and keeps each by its key."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from typing import Any

from k3c.codegen import object_cache
from k3c.codegen.kernel_key import (
    KernelRequest,
    kernel_identity,
    kernel_key,
    kernel_makers,
    kernel_symbol,
)
from k3c.errors import CodegenError
from k3c.targets.target import Target

# A worker spends seconds on importing its compiler, about as long as some kernels take.
_KERNELS_PER_WORKER = 8
_FEWEST_WORKERS = 2
MAKERS = "makers"  # suffix of what made a kernel, for `k3c compile --explain`


def build_kernels(requests: Sequence[KernelRequest], target: Target) -> dict[str, bytes]:
    """Return every kernel by symbol, sorted; many missing ones are built on all cores.

    A CPU kernel is an object file; a GPU kernel is a `GpuBinary` as bytes.

    Raises:
        CodegenError: A template does not compile.
    """
    by_symbol = {kernel_symbol(r, target): r for r in requests}
    ordered = dict(sorted(by_symbol.items()))
    missing = [s for s, r in ordered.items() if object_cache.load(kernel_key(r, target)) is None]
    fresh = _build_on_all_cores({s: ordered[s] for s in missing}, target)
    return {s: fresh.get(s) or build_kernel(r, target) for s, r in ordered.items()}


def build_kernel(request: KernelRequest, target: Target) -> bytes:
    """Return one kernel, from the cache where it is there.

    Raises:
        CodegenError: The template's function does not compile.
    """
    key = kernel_key(request, target)
    found = object_cache.load(key)
    if found is not None:
        return found
    try:
        built = _compile(request, target)
    # Compilers' errors have many classes and some derive from BaseException's other children.
    except Exception as exc:
        listed = ", ".join(f"{k}={v}" for k, v in sorted(request.constants.items()))
        what = f"template {request.name} does not compile: {_last_line(exc)}"
        raise CodegenError(what, f"{listed}; {target.name}") from exc
    object_cache.store(key, built)
    made_by = json.dumps(kernel_makers(request, target)).encode()
    object_cache.store(kernel_identity(request, target), made_by, MAKERS)
    return built


def why_missing(request: KernelRequest, target: Target) -> str | None:
    """Say why a kernel must be built; None where the cache has it.

    Returns:
        What has changed since it was built last, or that it never was.
    """
    if object_cache.load(kernel_key(request, target)) is not None:
        return None
    before = object_cache.load(kernel_identity(request, target), MAKERS)
    if before is None:
        return "not built before"
    known, now = json.loads(before), kernel_makers(request, target)
    changed = [name for name in now if known.get(name) != now[name]]
    return f"{' and '.join(changed)} changed" if changed else "its entry is gone or damaged"


def _build_on_all_cores(requests: Mapping[str, KernelRequest], target: Target) -> dict[str, bytes]:
    workers = min(len(requests) // _KERNELS_PER_WORKER, len(os.sched_getaffinity(0)))
    if workers < _FEWEST_WORKERS:
        return {}
    # Spawned, not forked: compilers have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        built = pool.map(build_kernel, requests.values(), repeat(target), chunksize=4)
        return dict(zip(requests, built, strict=True))


def _compile(request: KernelRequest, target: Target) -> bytes:
    template: Any = request.template
    if target.kind == "cpu":
        from k3c.codegen.tvm_lower import kernel_object

        function = template.build(request.constants, target)
        return kernel_object(function, kernel_symbol(request, target), target)
    from k3c.codegen.triton_aot import compile_kernel

    function = template.kernels[request.stage]
    return compile_kernel(function, dict(request.constants), target).to_bytes()


def _last_line(exc: Exception) -> str:
    lines = [line for line in str(exc).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(exc).__name__
