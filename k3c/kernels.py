"""Which templates a target has, and how its kernels get into an artifact."""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Sequence
from pathlib import Path

from k3c.artifact import Kernel, Plan
from k3c.artifact_dir import KERNELS_FILE, KERNELS_FOLDER, LIBRARY_FOLDER
from k3c.artifact_writer import ArtifactWriter
from k3c.codegen.kernel_key import KernelRequest, kernel_key, kernel_symbol
from k3c.targets.catalogue import Catalogue
from k3c.targets.target import Target

_TOOLS = {
    "cpu": ("torch", "apache-tvm", "apache-tvm-ffi", "numpy"),
    "cuda": ("torch", "triton", "numpy"),
    "hip": ("torch", "triton", "numpy"),
}


def catalogue_of(target: Target) -> Catalogue:
    """Return the templates of a kind of target."""
    if target.kind == "cpu":
        from k3c.codegen.templates.tvm import CPU_TEMPLATES

        return Catalogue(CPU_TEMPLATES)
    from k3c.codegen.templates.triton import GPU_TEMPLATES

    return Catalogue(GPU_TEMPLATES)


def tool_versions(target: Target) -> dict[str, str]:
    """Return the versions of the tools that make an artifact for a target."""
    return {name: importlib.metadata.version(name) for name in _TOOLS[target.kind]}


def add_kernels(
    writer: ArtifactWriter, requests: Sequence[KernelRequest], plans: Sequence[Plan], target: Target
) -> tuple[Kernel, ...]:
    """Build kernels and add them to an artifact: one library for a CPU, a file each for a GPU.

    Returns:
        The kernels, sorted by symbol.

    Raises:
        CodegenError: A template does not compile.
        DeviceFault: A tool is missing.
    """
    if target.kind == "cpu":
        return _add_library(writer, requests, plans, target)
    return _add_binaries(writer, requests, plans, target)


def _add_library(
    writer: ArtifactWriter, requests: Sequence[KernelRequest], plans: Sequence[Plan], target: Target
) -> tuple[Kernel, ...]:
    """Add the library of kernels and entry functions, and the C libraries that it calls."""
    from k3c.codegen.runtime_libraries import runtime_libraries
    from k3c.codegen.tvm_build import build_library

    with tempfile.TemporaryDirectory(prefix="k3c-") as folder:
        library = Path(folder) / KERNELS_FILE
        kernels = build_library(requests, plans, target, library)
        writer.add_file(KERNELS_FILE, library)
    for path in runtime_libraries():
        writer.add_file(f"{LIBRARY_FOLDER}/{path.name}", path)
    return kernels


def _add_binaries(
    writer: ArtifactWriter, requests: Sequence[KernelRequest], plans: Sequence[Plan], target: Target
) -> tuple[Kernel, ...]:
    from k3c.codegen.index_program import IndexProgram
    from k3c.codegen.kernel_build import build_kernels
    from k3c.codegen.overflow_check import check_overflows
    from k3c.codegen.triton_aot import BINARY, GpuBinary

    by_symbol = {kernel_symbol(r, target): r for r in requests}
    binaries = {s: GpuBinary.from_bytes(d) for s, d in build_kernels(requests, target).items()}
    programs = {s: IndexProgram.from_bytes(b.addresses.encode()) for s, b in binaries.items()}
    check_overflows(plans, programs)
    kernels = []
    for symbol, built in binaries.items():
        request = by_symbol[symbol]
        name = f"{KERNELS_FOLDER}/{symbol}.{BINARY[target.kind]}"
        writer.add_bytes(name, built.code)
        entry = Kernel(
            key=kernel_key(request, target),
            symbol=symbol,
            binary=name,
            template=request.name,
            constants=dict(request.constants),
            entry=built.entry,
            threads=built.threads,
            shared_bytes=built.shared_bytes,
            arch=target.arch,
            min_driver=target.min_driver,
            pdl=built.pdl,
        )
        kernels.append(entry)
    return tuple(kernels)
