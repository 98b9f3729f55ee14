"""The CUDA driver API: symbols, structures, and what it does unlike HIP."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_size_t, c_ubyte, c_uint, c_void_p
from typing import Any, ClassVar

from k3c.errors import ArtifactError
from k3c.runtime.driver.gpu_api import Api, Symbols

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
STATIC_SHARED_LIMIT = 48 << 10  # a kernel that wants more dynamic shared memory has to say so
INVALID_VALUE = 1
DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
PROGRAMMATIC = 1  # both the port (of a kernel node) and the type of an edge


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("parameters", c_void_p),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


class _CopyEnd(ctypes.Structure):
    _fields_ = (
        ("x", c_size_t),
        ("y", c_size_t),
        ("z", c_size_t),
        ("level", c_size_t),
        ("memory_type", c_uint),
        ("host", c_void_p),
        ("device", c_void_p),
        ("array", c_void_p),
        ("reserved", c_void_p),
        ("pitch", c_size_t),
        ("height", c_size_t),
    )


class CopyNode(ctypes.Structure):
    """CUDA_MEMCPY3D_v2."""

    _fields_ = (
        ("source", _CopyEnd),
        ("to", _CopyEnd),
        ("width_bytes", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
    )


class EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", c_ubyte),
        ("to_port", c_ubyte),
        ("type", c_ubyte),
        ("reserved", c_ubyte * 5),
    )


class InstantiateParameters(ctypes.Structure):
    """CUDA_GRAPH_INSTANTIATE_PARAMS."""

    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("upload_stream", c_void_p),
        ("error_node", c_void_p),
        ("result", c_uint),
    )


class CudaApi(Api):
    """libcuda."""

    library = "libcuda.so.1"
    override = "K3C_LIBCUDA"
    product = "the NVIDIA driver"
    symbols: ClassVar[Symbols] = {
        "init": ("cuInit", "u"),
        "error_name": ("cuGetErrorName", "ip"),
        "error_text": ("cuGetErrorString", "ip"),
        "driver_version": ("cuDriverGetVersion", "p"),
        "device_count": ("cuDeviceGetCount", "p"),
        "device_get": ("cuDeviceGet", "pi"),
        "device_name": ("cuDeviceGetName", "pii"),
        "device_attribute": ("cuDeviceGetAttribute", "pii"),
        "context_retain": ("cuDevicePrimaryCtxRetain", "pi"),
        "context_release": ("cuDevicePrimaryCtxRelease_v2", "i"),
        "context_set": ("cuCtxSetCurrent", "p"),
        "memory_info": ("cuMemGetInfo_v2", "pp"),
        "memory_alloc": ("cuMemAlloc_v2", "pz"),
        "memory_free": ("cuMemFree_v2", "p"),
        "memory_set": ("cuMemsetD8Async", "pczp"),
        "host_alloc": ("cuMemHostAlloc", "pzu"),
        "host_free": ("cuMemFreeHost", "p"),
        "copy_in": ("cuMemcpyHtoDAsync_v2", "ppzp"),
        "copy_out": ("cuMemcpyDtoHAsync_v2", "ppzp"),
        "copy": ("cuMemcpyDtoDAsync_v2", "ppzp"),
        "stream_create": ("cuStreamCreate", "pu"),
        "stream_wait": ("cuStreamSynchronize", "p"),
        "stream_destroy": ("cuStreamDestroy_v2", "p"),
        "event_create": ("cuEventCreate", "pu"),
        "event_record": ("cuEventRecord", "pp"),
        "event_wait": ("cuEventSynchronize", "p"),
        "event_elapsed": ("cuEventElapsedTime", "ppp"),
        "event_destroy": ("cuEventDestroy_v2", "p"),
        "module_load": ("cuModuleLoadData", "pp"),
        "module_unload": ("cuModuleUnload", "p"),
        "module_function": ("cuModuleGetFunction", "ppp"),
        "function_set": ("cuFuncSetAttribute", "pii"),
        "function_parameter": ("cuFuncGetParamInfo", "pzpp"),
        "launch": ("cuLaunchKernel", "puuuuuuuppp"),
        "graph_create": ("cuGraphCreate", "pu"),
        "graph_add_kernel": ("cuGraphAddKernelNode_v2", "pppzp"),
        "graph_add_copy": ("cuGraphAddMemcpyNode", "pppzpp"),
        "graph_add_empty": ("cuGraphAddEmptyNode", "pppz"),
        "graph_add_edges": ("cuGraphAddDependencies_v2", "ppppz"),
        "graph_nodes": ("cuGraphGetNodes", "ppp"),
        "graph_instantiate": ("cuGraphInstantiateWithParams", "ppp"),
        "graph_upload": ("cuGraphUpload", "pp"),
        "graph_launch": ("cuGraphLaunch", "pp"),
        "graph_destroy": ("cuGraphDestroy", "p"),
        "graph_exec_destroy": ("cuGraphExecDestroy", "p"),
    }

    def __init__(self) -> None:
        """Open the library; no context is taken yet."""
        super().__init__()
        self._context = 0

    def make_current(self, device: int) -> None:
        """Make the device's primary context current: the one that other libraries share."""
        where = f"device {device}"
        self._context = self._context or self.created("context_retain", device, where=where)
        self.call("context_set", self._context, where=where)

    def release(self, device: int) -> None:
        """Give up the device's primary context."""
        self.call("context_release", device, where=f"device {device}")
        self._context = 0

    def prepare(self, function: int, parameters: Sequence[int], shared: int, label: str) -> None:
        """Compare the kernel's parameters with what it will be given; raise its shared memory."""
        found, size, offset = list[int](), c_size_t(), c_size_t()
        query = self.functions["function_parameter"]
        code = query(function, 0, byref(offset), byref(size))
        while not code:
            found.append(size.value)
            code = query(function, len(found), byref(offset), byref(size))
        if code != INVALID_VALUE:
            raise self.fault("function_parameter", code, label)
        if found != list(parameters):
            what = f"the kernel takes parameters of {found} bytes, the plan gives {[*parameters]}"
            raise ArtifactError(what, label, "compile again: its calling convention is another")
        if shared > STATIC_SHARED_LIMIT:
            self.call("function_set", function, MAX_DYNAMIC_SHARED, shared, where=label)

    def kernel_node(self, function: int, launch: Sequence[int], parameters: int) -> KernelNode:
        """Return CUDA_KERNEL_NODE_PARAMS_v2."""
        x, y, z, threads, shared = launch
        return KernelNode(function, (x, y, z), (threads, 1, 1), shared, parameters)

    def add_copy(
        self, graph: int, after: Any, count: int, copy: tuple[int, int, int], where: str
    ) -> int:
        """Add a one-dimensional copy from device to device."""
        to, source, nbytes = copy
        node = CopyNode(width_bytes=nbytes, height=1, depth=1)
        for end, address in ((node.source, source), (node.to, to)):
            end.memory_type, end.device, end.pitch, end.height = DEVICE_MEMORY, address, nbytes, 1
        args = (graph, after, count, byref(node), self._context)
        return self.created("graph_add_copy", *args, where=where)

    def add_early_edge(self, graph: int, before: int, after: int, where: str) -> None:
        """Add a programmatic dependency: the later kernel waits for the earlier one by itself."""
        edge = EdgeData(from_port=PROGRAMMATIC, type=PROGRAMMATIC)
        ends = byref(c_void_p(before)), byref(c_void_p(after))
        self.call("graph_add_edges", graph, *ends, byref(edge), 1, where=where)

    def instantiate(self, graph: int, describe: Callable[[int], str], where: str) -> int:
        """Instantiate; an error names the command whose node the driver refuses."""
        made, parameters = c_void_p(), InstantiateParameters()
        code = self.functions["graph_instantiate"](byref(made), graph, byref(parameters))
        if code or parameters.result:
            node = parameters.error_node
            label = describe(node) if node else where
            raise self.fault("graph_instantiate", code or parameters.result, label)
        return made.value or 0
