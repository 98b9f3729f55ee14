"""The C libraries that compiled kernels call at run time; an artifact carries them."""

from __future__ import annotations

from pathlib import Path


def runtime_libraries() -> tuple[Path, ...]:
    """Return libtvm_ffi and libtvm_runtime, in the order in which a process must open them."""
    import tvm.libinfo
    import tvm_ffi.libinfo

    found = (tvm_ffi.libinfo.find_libtvm_ffi(), tvm.libinfo.find_libtvm_runtime())
    return tuple(Path(str(path)) for path in found)
