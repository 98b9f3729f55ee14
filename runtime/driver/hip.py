"""The driver of AMD GPUs: the calls of libamdhip64 that `gpu` makes.

No AMD GPU has run this yet. It is tested against a library that only counts and imitates; what the
real one does, and how fast, is unknown.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_uint, c_void_p
from typing import Any, ClassVar

from k3c.runtime.driver.gpu import GpuDriver
from k3c.runtime.driver.gpu_api import Api, Symbols, version_text

DEVICE_TO_DEVICE = 3  # hipMemcpyDeviceToDevice
PROPERTIES_BYTES, ARCH_OFFSET = 1472, 1160  # hipDeviceProp_tR0600 and its gcnArchName
TARGETS = {"gfx950": "mi355x"}


class KernelNode(ctypes.Structure):
    """hipKernelNodeParams."""

    _fields_ = (
        ("block", c_uint * 3),
        ("extra", c_void_p),
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("parameters", c_void_p),
        ("shared_bytes", c_uint),
    )


class HipApi(Api):
    """libamdhip64."""

    library = "libamdhip64.so"
    override = "K3C_LIBHIP"
    product = "ROCm"
    symbols: ClassVar[Symbols] = {
        "init": ("hipInit", "u"),
        "error_name": ("hipDrvGetErrorName", "ip"),
        "error_text": ("hipDrvGetErrorString", "ip"),
        "driver_version": ("hipDriverGetVersion", "p"),
        "device_count": ("hipGetDeviceCount", "p"),
        "device_get": ("hipDeviceGet", "pi"),
        "device_name": ("hipDeviceGetName", "pii"),
        "device_properties": ("hipGetDevicePropertiesR0600", "pi"),
        "device_set": ("hipSetDevice", "i"),
        "memory_info": ("hipMemGetInfo", "pp"),
        "memory_alloc": ("hipMalloc", "pz"),
        "memory_free": ("hipFree", "p"),
        "memory_set": ("hipMemsetD8Async", "pczp"),
        "host_alloc": ("hipHostMalloc", "pzu"),
        "host_free": ("hipHostFree", "p"),
        "copy_in": ("hipMemcpyHtoDAsync", "ppzp"),
        "copy_out": ("hipMemcpyDtoHAsync", "ppzp"),
        "copy": ("hipMemcpyDtoDAsync", "ppzp"),
        "stream_create": ("hipStreamCreateWithFlags", "pu"),
        "stream_wait": ("hipStreamSynchronize", "p"),
        "stream_destroy": ("hipStreamDestroy", "p"),
        "event_create": ("hipEventCreateWithFlags", "pu"),
        "event_record": ("hipEventRecord", "pp"),
        "event_wait": ("hipEventSynchronize", "p"),
        "event_elapsed": ("hipEventElapsedTime", "ppp"),
        "event_destroy": ("hipEventDestroy", "p"),
        "module_load": ("hipModuleLoadData", "pp"),
        "module_unload": ("hipModuleUnload", "p"),
        "module_function": ("hipModuleGetFunction", "ppp"),
        "launch": ("hipModuleLaunchKernel", "puuuuuuuppp"),
        "graph_create": ("hipGraphCreate", "pu"),
        "graph_add_kernel": ("hipGraphAddKernelNode", "pppzp"),
        "graph_add_copy": ("hipGraphAddMemcpyNode1D", "pppzppzi"),
        "graph_add_empty": ("hipGraphAddEmptyNode", "pppz"),
        "graph_nodes": ("hipGraphGetNodes", "ppp"),
        "graph_instantiate": ("hipGraphInstantiateWithFlags", "ppl"),
        "graph_upload": ("hipGraphUpload", "pp"),
        "graph_launch": ("hipGraphLaunch", "pp"),
        "graph_destroy": ("hipGraphDestroy", "p"),
        "graph_exec_destroy": ("hipGraphExecDestroy", "p"),
    }

    def make_current(self, device: int) -> None:
        """Make a device the calling thread's."""
        self.call("device_set", device, where=f"device {device}")

    def release(self, device: int) -> None:
        """Nothing was taken."""

    def prepare(self, function: int, parameters: Sequence[int], shared: int, label: str) -> None:
        """Nothing to do: HIP does not tell a kernel's parameters, and has no limit to raise."""

    def kernel_node(self, function: int, launch: Sequence[int], parameters: int) -> KernelNode:
        """Return hipKernelNodeParams."""
        x, y, z, threads, shared = launch
        return KernelNode((threads, 1, 1), None, function, (x, y, z), parameters, shared)

    def add_copy(
        self, graph: int, after: Any, count: int, copy: tuple[int, int, int], where: str
    ) -> int:
        """Add a one-dimensional copy from device to device."""
        args = (graph, after, count, *copy, DEVICE_TO_DEVICE)
        return self.created("graph_add_copy", *args, where=where)

    def add_early_edge(self, graph: int, before: int, after: int, where: str) -> None:
        """Never asked for: no kernel for an AMD GPU waits by itself."""
        raise AssertionError(f"{where}: HIP has no programmatic dependent launch")

    def instantiate(self, graph: int, describe: Callable[[int], str], where: str) -> int:
        """Instantiate."""
        made = c_void_p()
        self.call("graph_instantiate", byref(made), graph, 0, where=where)
        return made.value or 0


class HipDriver(GpuDriver):
    """One AMD GPU."""

    oldest_driver = "6.0"  # hipGetDevicePropertiesR0600

    def make_api(self) -> Api:
        """Return libamdhip64."""
        return HipApi()

    def driver_version(self) -> str:
        """Return the HIP version."""
        return version_text(self.api.integer("driver_version"), 10_000_000, 100_000)

    def device_arch(self) -> str:
        """Return the architecture without its feature flags, as `gfx950`."""
        properties = ctypes.create_string_buffer(PROPERTIES_BYTES)
        self.api.call("device_properties", properties, self.device)
        name = ctypes.string_at(ctypes.addressof(properties) + ARCH_OFFSET)
        return name.decode(errors="replace").partition(":")[0]

    def runs(self, arch: str) -> bool:
        """Return whether the device runs binaries of an architecture: of its own alone."""
        return arch.partition(":")[0] == self.device_arch()

    def target_name(self) -> str:
        """Return the target of the device's architecture."""
        return TARGETS.get(self.device_arch(), self.device_arch())
