"""Launches recorded kernels on a GPU through the driver of the runtime; no torch, no Triton."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from k3c.codegen.triton_aot import GpuBinary

Step = tuple[GpuBinary, tuple[int, ...], list[str], tuple[int, ...]]


class _Cuda:
    """The few driver calls that a test needs; every status is checked."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *args: Any) -> None:
        status = getattr(self._lib, name)(*args)
        assert status == 0, f"{name} returned {status}"

    @cache  # noqa: B019 - one instance lives as long as the process
    def function(self, binary: GpuBinary) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), binary.code)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, binary.entry.encode())
        self.call("cuFuncSetAttribute", function, 8, max(binary.shared_bytes, 0))
        return function


@cache
def _cuda() -> _Cuda:
    return _Cuda()


def launch_all(
    steps: Sequence[Step], wrapped: Sequence[np.ndarray[Any, Any]], guard: int
) -> list[np.ndarray[Any, Any]]:
    """Copy the buffers to the device, launch, and return what they hold then.

    Args:
        steps: Kernel, grid, argument types and scalars of each launch.
        wrapped: The buffers, each with `guard` bytes before its first.
        guard: Bytes, a multiple of 64.
    """
    cuda, addresses = _cuda(), []
    for data in wrapped:
        address = ctypes.c_uint64()
        cuda.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(data.nbytes))
        cuda.call(
            "cuMemcpyHtoD_v2",
            address,
            ctypes.c_void_p(data.ctypes.data),
            ctypes.c_size_t(data.nbytes),
        )
        addresses.append(address)
    for binary, grid, types, scalars in steps:
        _launch(
            cuda,
            binary,
            grid,
            [a.value + guard for a in addresses][: len(types) - len(scalars)],
            scalars,
        )
    cuda.call("cuCtxSynchronize")
    done = []
    for data, address in zip(wrapped, addresses, strict=True):
        out = np.empty_like(data)
        cuda.call(
            "cuMemcpyDtoH_v2",
            ctypes.c_void_p(out.ctypes.data),
            address,
            ctypes.c_size_t(data.nbytes),
        )
        cuda.call("cuMemFree_v2", address)
        done.append(out)
    return done


def _launch(
    cuda: _Cuda,
    binary: GpuBinary,
    grid: Sequence[int],
    pointers: Sequence[int],
    scalars: Sequence[int],
) -> None:
    values: list[Any] = [ctypes.c_uint64(p) for p in pointers]
    values += [ctypes.c_int32(s) for s in scalars]
    # Triton's two scratch pointers, which no kernel of ours uses.
    values += [ctypes.c_uint64(0), ctypes.c_uint64(0)]
    packed = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    sizes = (*grid, binary.threads, 1, 1, binary.shared_bytes)
    cuda.call("cuLaunchKernel", cuda.function(binary), *sizes, None, packed, None)
