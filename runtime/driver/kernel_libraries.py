"""Kernel libraries of a CPU artifact: opened and called by ctypes, without any Python `tvm`.

A kernel is a packed function `int __tvm_ffi_<symbol>(void*, TVMFFIAny* args, int n, TVMFFIAny*)`.
Its parallel loops call three functions of libtvm_runtime through weak pointers in the kernel's
library, which this module sets. Return codes are checked at every call.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from k3c.errors import ArtifactError, DeviceFault

LIBRARIES = ("libtvm_ffi.so", "libtvm_runtime.so")  # in the order that they need each other
BACKEND_FUNCTIONS = (
    "TVMBackendParallelLaunch",
    "TVMBackendAllocWorkspace",
    "TVMBackendFreeWorkspace",
)
SYMBOL_PREFIX = "__tvm_ffi_"
TYPE_INT = 1
TYPE_OPAQUE_POINTER = 4
OBJECT_HEADER_BYTES = 24  # TVMFFIObject: reference counts, type index, padding, deleter
PACKED_ARGTYPES = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
THREADS_VARIABLE = "TVM_NUM_THREADS"


class TvmAny(ctypes.Structure):
    """TVMFFIAny: a tagged 16-byte value."""

    _fields_ = (
        ("type_index", ctypes.c_int32),
        ("zero_padding", ctypes.c_int32),
        ("payload", ctypes.c_int64),
    )


class _ByteArray(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t))

    def text(self) -> str:
        return ctypes.string_at(self.data, self.size).decode(errors="replace") if self.data else ""


class _ErrorCell(ctypes.Structure):
    _fields_ = (("kind", _ByteArray), ("message", _ByteArray))


def set_thread_count() -> int:
    """Tell TVM's thread pool to use every core this process may run on, unless the user said.

    Sets TVM_NUM_THREADS in the environment, which TVM reads at its first parallel loop.

    Returns:
        The number of threads.

    Raises:
        DeviceFault: The variable is set to something that is not a positive number.
    """
    given = os.environ.setdefault(THREADS_VARIABLE, str(len(os.sched_getaffinity(0))))
    if not given.isdigit() or int(given) < 1:
        what = f"{THREADS_VARIABLE} is {given!r}, expected a positive number"
        raise DeviceFault(what, "environment")
    return int(given)


def _open(path: Path, mode: int) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path), mode=mode)
    except OSError as exc:
        raise DeviceFault(f"cannot open a library: {exc}", str(path), "compile again here") from exc


def _open_shared(path: Path) -> ctypes.CDLL:
    """Open a TVM library, or the copy of it that this process already holds.

    Two copies in one process would both register TVM's types, which aborts it; a process that
    compiled before it runs has one already.
    """
    try:
        return ctypes.CDLL(path.name, mode=os.RTLD_NOLOAD | ctypes.RTLD_GLOBAL)
    except OSError:
        return _open(path, ctypes.RTLD_GLOBAL)


class KernelLibraries:
    """The TVM libraries and the kernel libraries of one artifact."""

    def __init__(self, library_folder: Path, kernel_libraries: Sequence[Path]) -> None:
        """Open everything; no kernel is loaded or looked up on disk later.

        Args:
            library_folder: Holds libtvm_ffi.so and libtvm_runtime.so.
            kernel_libraries: Shared objects that hold the kernels and the entry functions.

        Raises:
            DeviceFault: A library does not open here.
        """
        self.threads = set_thread_count()
        self._ffi, self._runtime = (_open_shared(library_folder / name) for name in LIBRARIES)
        # Local: two artifacts in one process may hold kernels of the same name.
        self._kernels = [_open(path, ctypes.RTLD_LOCAL) for path in kernel_libraries]
        for library in self._kernels:
            self._connect(library)

    def _connect(self, library: ctypes.CDLL) -> None:
        """Point a kernel library's weak function pointers at libtvm_runtime."""
        for name in BACKEND_FUNCTIONS:
            try:
                pointer = ctypes.c_void_p.in_dll(library, f"__{name}")
            except ValueError:
                # A library whose kernels have no parallel loop or workspace lacks the pointer.
                continue
            pointer.value = ctypes.cast(getattr(self._runtime, name), ctypes.c_void_p).value

    def function(self, name: str, argtypes: Sequence[Any]) -> Callable[..., int]:
        """Return an exported C function that returns an int.

        Args:
            name: Its exported name.
            argtypes: The ctypes types of its arguments.

        Raises:
            ArtifactError: No kernel library exports it.
        """
        for library in self._kernels:
            try:
                # Indexing makes a new object each time, so that argument types are not shared.
                found = library[name]
            except AttributeError:
                continue
            found.restype, found.argtypes = ctypes.c_int, argtypes
            return found
        raise ArtifactError(f"no kernel library exports {name}", hint="compile again")

    def packed_call(self, symbol: str, args: Sequence[tuple[int, int]], label: str) -> PackedCall:
        """Bind a kernel to its arguments, once, at load.

        Args:
            symbol: The kernel's symbol.
            args: (type index, payload) of each argument.
            label: What the call is, for errors.
        """
        packed = (TvmAny * len(args))(*((kind, 0, payload) for kind, payload in args))
        function = self.function(SYMBOL_PREFIX + symbol, PACKED_ARGTYPES)
        return PackedCall(self, function, packed, label)

    def raise_fault(self, code: int, label: str) -> None:
        """Raise what TVM says about a call that returned `code`.

        Raises:
            DeviceFault: Always.
        """
        reason = self._take_error() or "no reason given"
        raise DeviceFault(f"launch failed with code {code}, expected 0: {reason}", label)

    def _take_error(self) -> str:
        """Return and clear the error that TVM keeps for this thread; empty when there is none."""
        handle = ctypes.c_void_p()
        self._ffi.TVMFFIErrorMoveFromRaised(ctypes.byref(handle))
        if not handle.value:
            return ""
        cell = _ErrorCell.from_address(handle.value + OBJECT_HEADER_BYTES)
        text = f"{cell.kind.text()}: {cell.message.text()}"
        self._ffi.TVMFFIObjectDecRef(handle)
        return text


class PackedCall:
    """One kernel with its arguments packed; calling it launches it and checks the return code."""

    def __init__(
        self,
        libraries: KernelLibraries,
        function: Callable[..., int],
        args: ctypes.Array[TvmAny],
        label: str,
    ) -> None:
        """Keep the argument array alive and its address at hand."""
        self.libraries, self._function, self._args, self._label = libraries, function, args, label
        self._count, self._result = len(args), TvmAny()
        self._address = ctypes.addressof(args)
        self._result_address = ctypes.addressof(self._result)

    def __call__(self) -> None:
        """Launch the kernel.

        Raises:
            DeviceFault: It returned anything but 0.
        """
        code = self._function(None, self._address, self._count, self._result_address)
        if code:
            self.libraries.raise_fault(code, self._label)
