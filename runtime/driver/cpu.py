"""The CPU driver: memory by mmap, kernels from a shared object."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3c.artifact import WEIGHTS_DATA_START, Kernel, Manifest, Plan
from k3c.artifact_dir import LIBRARY_FOLDER
from k3c.cpu_features import machine_features
from k3c.errors import ArtifactError, ConfigError, DeviceFault
from k3c.runtime.driver.cpu_executor import CommandStep, CpuExecutor, EntryStep
from k3c.runtime.driver.cpu_features import check_machine
from k3c.runtime.driver.driver import Executor, Memory, Settings, WeightsFile
from k3c.runtime.driver.kernel_libraries import LIBRARIES, KernelLibraries


@dataclass(frozen=True)
class CpuMemory:
    """The bytes of one space.

    Attributes:
        array: u8[nbytes]; read-only for mapped weights.
        address: Of the first byte, page aligned; 0 for an empty space.
    """

    array: npt.NDArray[np.uint8]
    address: int

    @property
    def nbytes(self) -> int:
        """Size in bytes, exactly as planned."""
        return self.array.nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return a copy of some bytes."""
        return self.array[offset : offset + nbytes].tobytes()

    def write(self, offset: int, data: bytes) -> None:
        """Overwrite some bytes."""
        self.array[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy bytes from one place to another."""
        self.array[to : to + nbytes] = self.array[source : source + nbytes]


def _view(mapped: mmap.mmap, start: int, nbytes: int) -> CpuMemory:
    array = np.frombuffer(mapped, np.uint8, nbytes, start)
    return CpuMemory(array, array.__array_interface__["data"][0])


def allocate(space: str, nbytes: int) -> CpuMemory:
    """Allocate one space as one anonymous map of exactly `nbytes` zero bytes.

    Raises:
        DeviceFault: The machine does not give that much memory.
    """
    if nbytes == 0:
        return CpuMemory(np.zeros(0, np.uint8), 0)
    try:
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as exc:
        available = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
        raise DeviceFault(
            f"cannot allocate {nbytes} B for space {space}, {available} B are free: {exc}",
            hint="compile for fewer requests or a shorter context",
        ) from exc
    # Huge pages cut TLB misses of the cache walks; a system without them refuses, harmlessly.
    if nbytes >= 2**21 and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return _view(mapped, 0, nbytes)


def map_weights(path: Path, nbytes: int) -> CpuMemory:
    """Map a weights file read-only.

    Args:
        path: A safetensors file whose data start at byte 4096.
        nbytes: Planned bytes of space weights.

    Raises:
        ArtifactError: The file is shorter than planned.
    """
    if nbytes == 0:
        return CpuMemory(np.zeros(0, np.uint8), 0)
    with path.open("rb") as file:
        found = os.fstat(file.fileno()).st_size - WEIGHTS_DATA_START
        if found < nbytes:
            raise ArtifactError(f"{found} B of weights, the plan needs {nbytes} B", str(path))
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_WILLNEED)
    return _view(mapped, WEIGHTS_DATA_START, nbytes)


class CpuDriver:
    """This machine's CPU."""

    runs_ahead = False
    hashes_weights = False

    def __init__(self, settings: Settings) -> None:
        """Open nothing yet.

        Raises:
            ConfigError: The device is not 0.
        """
        if settings.device != 0:
            raise ConfigError(f"device {settings.device}, a cpu artifact runs on device 0")
        self._settings = settings
        self._libraries: KernelLibraries | None = None
        self._kernels: tuple[Kernel, ...] = ()

    def check(self, manifest: Manifest, where: str) -> None:
        """Refuse a CPU that cannot run the kernels.

        Raises:
            ArtifactError: Kind, architecture or a feature does not match.
        """
        check_machine(manifest.target, machine_features())

    def allocate(self, space: str, nbytes: int) -> CpuMemory:
        """Allocate one space as one anonymous map.

        Raises:
            DeviceFault: The machine does not give that much memory.
        """
        return allocate(space, nbytes)

    def load_weights(self, weights: WeightsFile) -> CpuMemory:
        """Map the weights read-only; they are read when they are touched.

        Raises:
            ArtifactError: The file is shorter than planned.
        """
        return map_weights(weights.path, weights.nbytes)

    def open_kernels(self, directory: Path, manifest: Manifest) -> None:
        """Open the TVM libraries and the kernel libraries.

        Raises:
            ArtifactError: A TVM library is not in the artifact.
            DeviceFault: A library does not open here.
        """
        for name in LIBRARIES:
            if f"{LIBRARY_FOLDER}/{name}" not in manifest.members:
                what = f"{LIBRARY_FOLDER}/{name} is missing"
                raise ArtifactError(what, str(directory), "compile again")
        binaries = sorted({kernel.binary for kernel in manifest.kernels})
        paths = [directory / name for name in binaries]
        self._libraries = KernelLibraries(directory / LIBRARY_FOLDER, paths)
        self._kernels = manifest.kernels

    def bind(self, plan: Plan, memory: Mapping[str, Memory]) -> Executor:
        """Bind a plan's launches and io fields to the memory.

        Raises:
            ArtifactError: The plan names something that is not there.
        """
        assert self._libraries is not None, "bind before open_kernels"
        addresses = {space: m.address for space, m in memory.items()}
        io = memory["io"]
        assert isinstance(io, CpuMemory), f"io memory is {type(io).__name__}"
        if self._settings.executor == "command":
            step = CommandStep(self._libraries, plan, addresses, self._kernels)
        else:
            step = EntryStep(self._libraries, plan, addresses)
        return CpuExecutor(plan, io.array, step.run)

    @property
    def survives(self) -> bool:
        """A CPU fault leaves memory in an unknown state."""
        return False

    def close(self) -> None:
        """Nothing to do: memory goes when nobody refers to it."""
