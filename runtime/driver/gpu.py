"""The driver of a GPU: memory, kernels and buckets; what CUDA and HIP share.

One context, one stream: everything is ordered. Only the loading of weights uses streams of its
own, and ends before anything else begins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from k3c.artifact import Kernel, Manifest, Plan
from k3c.errors import ArtifactError, ConfigError, DeviceFault
from k3c.runtime.binding import Bound, bind_commands
from k3c.runtime.driver.driver import Executor, Memory, Settings, WeightsFile
from k3c.runtime.driver.gpu_api import GIB, Api
from k3c.runtime.driver.gpu_device import Gpu, GpuMemory
from k3c.runtime.driver.gpu_executor import GpuExecutor
from k3c.runtime.driver.gpu_steps import CommandStep, GraphStep, parameter_bytes
from k3c.runtime.driver.gpu_weights import stream_weights

NAMED_KERNELS = 3  # of those that do not fit the device, in a message


class GpuDriver(ABC):
    """One GPU. A subclass says which library drives it and what it can run.

    Attributes:
        oldest_driver: Version of the first driver that has every function of the table.
        functions: The handle of each opened kernel, by symbol.
    """

    oldest_driver: ClassVar[str]
    runs_ahead = True
    hashes_weights = True

    def __init__(self, settings: Settings) -> None:
        """Open the driver library; the device is opened by `check`.

        Raises:
            DeviceFault: The library is missing.
        """
        self._settings = settings
        self.api, self.device = self.make_api(), settings.device
        self._gpu: Gpu | None = None
        self._kernels: tuple[Kernel, ...] = ()
        self.functions: dict[str, int] = {}
        self._modules: list[int] = []
        self._spaces: list[int] = []
        self._executors: list[GpuExecutor] = []

    @abstractmethod
    def make_api(self) -> Api:
        """Return the driver library."""

    @abstractmethod
    def driver_version(self) -> str:
        """Return the driver's version, as "12.4"."""

    @abstractmethod
    def device_arch(self) -> str:
        """Return the device's architecture, as an artifact names it."""

    @abstractmethod
    def runs(self, arch: str) -> bool:
        """Return whether the device runs binaries of an architecture."""

    @abstractmethod
    def target_name(self) -> str:
        """Return the name of the device's target, for the command that compiles for it."""

    @property
    def gpu(self) -> Gpu:
        """The opened device."""
        assert self._gpu is not None, "the device is used before `check` opened it"
        return self._gpu

    def check(self, manifest: Manifest, where: str) -> None:
        """Refuse a device or driver that cannot run the artifact, then take the device.

        Raises:
            ArtifactError: The artifact, or a kernel of it, was compiled for something else.
            ConfigError: There is no such device.
            DeviceFault: The driver is missing or too old, or there is too little memory.
        """
        self.api.call("init", 0, where="start of the GPU driver")
        self._check_version(manifest)
        count = self.api.integer("device_count")
        if not 0 <= self.device < count:
            raise ConfigError(f"device {self.device} is asked for, this machine has {count}")
        self.device = self.api.integer("device_get", self.device)
        self._check_arch(manifest, where)
        self._gpu = Gpu(self.api, self.device)
        self._check_memory(manifest)

    def allocate(self, space: str, nbytes: int) -> GpuMemory:
        """Allocate one space with one call, and fill it with zeros.

        Raises:
            DeviceFault: There is not that much memory.
        """
        memory, where = self._allocate(space, nbytes), f"space {space}"
        if nbytes:
            self.api.call("memory_set", memory.address, 0, nbytes, self.gpu.stream, where=where)
        return memory

    def load_weights(self, weights: WeightsFile) -> GpuMemory:
        """Allocate space weights and stream the file into it.

        Raises:
            ArtifactError: The file is short, or its hash differs.
            DeviceFault: The device lacks memory, or the file cannot be read.
        """
        memory = self._allocate("weights", weights.nbytes)
        stream_weights(self.gpu, weights, memory.address, self._settings.say)
        return memory

    def open_kernels(self, directory: Path, manifest: Manifest) -> None:
        """Load every module and look up every kernel, before any graph is built.

        Raises:
            DeviceFault: The driver does not load a binary, or it does not hold its kernel.
        """
        self.gpu.enter()
        modules: dict[str, int] = {}
        for kernel in manifest.kernels:
            if kernel.binary not in modules:
                image = (directory / kernel.binary).read_bytes()
                made = self.api.created("module_load", image, where=kernel.binary)
                modules[kernel.binary] = made
                self._modules.append(made)
            module, where = modules[kernel.binary], f"{kernel.entry} of {kernel.binary}"
            function = self.api.created(
                "module_function", module, kernel.entry.encode(), where=where
            )
            self.functions[kernel.symbol] = function
        self._kernels = manifest.kernels

    def bind(self, plan: Plan, memory: Mapping[str, Memory]) -> Executor:
        """Build the bucket's graph, or pack its launches.

        Raises:
            ArtifactError: The plan names something that is not there, or a kernel takes other
                parameters.
            DeviceFault: The driver refuses the graph.
        """
        gpu = self.gpu
        gpu.enter()
        commands = self.commands(plan, memory)
        kind = CommandStep if self._settings.executor == "command" else GraphStep
        step = kind(self.api, commands, self.functions, gpu.stream)
        self._executors.append(GpuExecutor(gpu, plan, memory["io"].address, step))
        return self._executors[-1]

    def commands(self, plan: Plan, memory: Mapping[str, Memory]) -> list[Bound]:
        """Return every command of a step with addresses put in, checked against its kernel.

        Raises:
            ArtifactError: The plan names something that is not there, or a kernel takes other
                parameters.
        """
        addresses = {space: m.address for space, m in memory.items()}
        commands = bind_commands(plan, addresses, self._kernels)
        for symbol, bound in {c.kernel.symbol: c for c in commands if c.kernel}.items():
            function, label = self.functions[symbol], f"{symbol}, {bound.label}"
            shared = bound.kernel.shared_bytes if bound.kernel else 0
            self.api.prepare(function, parameter_bytes(bound), shared, label)
        return commands

    def graph(self, commands: Sequence[Bound]) -> GraphStep:
        """Return commands as a graph.

        Raises:
            DeviceFault: The driver refuses it.
        """
        return GraphStep(self.api, commands, self.functions, self.gpu.stream)

    @property
    def survives(self) -> bool:
        """Whether the device still does what it is told."""
        return self.api.functions["stream_wait"](self.gpu.stream) == 0

    def close(self) -> None:
        """Free everything on the device; nothing of this driver may be used after that."""
        self.gpu.enter()
        self.gpu.wait("close")
        for executor in self._executors:
            executor.close()
        for short, handles in (("module_unload", self._modules), ("memory_free", self._spaces)):
            for handle in handles:
                self.api.call(short, handle, where="close")
        self.gpu.close()

    def _allocate(self, space: str, nbytes: int) -> GpuMemory:
        self.gpu.enter()
        address = 0
        if nbytes:
            where = f"space {space}, {nbytes} bytes"
            address = self.api.created("memory_alloc", nbytes, where=where)
            self._spaces.append(address)
        return GpuMemory(self.gpu, address, nbytes)

    def _name(self) -> str:
        return f"device {self.device} ({self.api.device_name(self.device)})"

    def _check_version(self, manifest: Manifest) -> None:
        wanted = [self.oldest_driver, manifest.target.min_driver]
        wanted += [kernel.min_driver for kernel in manifest.kernels]
        needed = max((v for v in wanted if v), key=_numbers)
        found = self.driver_version()
        if _numbers(found) < _numbers(needed):
            what = f"the driver of {self.api.library} knows version {found}, {needed} is needed"
            raise DeviceFault(what, manifest.target.name, f"update {self.api.product}")

    def _check_arch(self, manifest: Manifest, where: str) -> None:
        """Compare the device with the target, and with every kernel by itself."""
        target, found = manifest.target, self.device_arch()
        hint = f"k3c compile MODEL --target {self.target_name()} -o OUTPUT"
        if not self.runs(target.arch):
            what = f"compiled for {target.arch} ({target.name}), {self._name()} is {found}"
            raise ArtifactError(what, where, hint)
        strange = [k for k in manifest.kernels if not self.runs(k.arch)]
        if strange:
            named = ", ".join(f"{k.symbol} for {k.arch}" for k in strange[:NAMED_KERNELS])
            what = f"{len(strange)} of {len(manifest.kernels)} kernels are not for {found}: {named}"
            raise ArtifactError(what, where, hint)

    def _check_memory(self, manifest: Manifest) -> None:
        planned = sum(manifest.space_bytes.values())
        free, total = self.api.memory_bytes()
        if planned > free:
            sizes = ", ".join(f"{s} {n / GIB:.2f}" for s, n in manifest.space_bytes.items())
            what = f"{planned} bytes are planned ({sizes} GiB), {free} of {total} bytes are free"
            hint = f"stop what else runs there, or k3c compile MODEL --target {self.target_name()}"
            raise DeviceFault(what, self._name(), f"{hint} --max-num-seqs FEWER -o OUTPUT")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in version.split("."))
