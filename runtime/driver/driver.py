"""What the runtime needs of a device: one interface for CPUs and GPUs.

The loader calls a driver's methods in the order in which they stand here. Memory is asked for
before the first step only; a step uses nothing but its bucket's `Executor`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from k3c.artifact import Manifest, Member, Plan

Array = npt.NDArray
HowToRun = Literal["whole", "command"]
Collectives = Literal["none", "local"]


@dataclass(frozen=True)
class Settings:
    """How a driver runs an artifact.

    Attributes:
        device: Which of the machine's devices, counted from 0; a CPU is device 0.
        executor: "whole" makes a step with one call (a compiled function, a graph); "command" makes
            every launch from here: slower, and names the launch that failed.
        collectives: "local" lets a rank copy its own part into the place of every other rank's, for
            measurements of one rank alone; "none" refuses plans that need other ranks.
        say: Takes a line of progress.
    """

    device: int
    executor: HowToRun
    collectives: Collectives
    say: Callable[[str], None]


@dataclass(frozen=True)
class WeightsFile:
    """The weights to load: the file, its entry in the manifest, and whether to check its parts."""

    path: Path
    nbytes: int
    member: Member
    check: bool


class Memory(Protocol):
    """One space on the device: `nbytes` bytes, exactly as planned, from `address`."""

    @property
    def address(self) -> int:
        """The first byte; 0 for an empty space."""
        ...

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return a copy of some bytes, after everything that was launched before."""
        ...

    def write(self, offset: int, data: bytes) -> None:
        """Overwrite some bytes, after everything that was launched before."""
        ...

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy bytes from one place to another, in order with everything that is launched."""
        ...


class Executor(Protocol):
    """Runs the steps of one bucket on the memory it was bound to.

    At most two steps of a device may be started and not waited for.
    """

    @property
    def inputs(self) -> Mapping[str, Array]:
        """The host's side of the input fields; a step reads them where it uploads."""
        ...

    def start(self, upload: bool) -> None:
        """Start a step.

        Args:
            upload: Send the inputs first; without, the step takes what is on the device.

        Raises:
            DeviceFault: A launch failed.
        """
        ...

    def finish(self) -> Mapping[str, Array]:
        """Wait for the oldest step that was started and return its output fields.

        They hold until the step after the next one is started. `tokens` is there at once; of the
        others only a field that is looked at is brought to the host, and that must happen before
        the next step is started.

        Raises:
            DeviceFault: The device failed.
        """
        ...


class Driver(Protocol):
    """A device."""

    @property
    def runs_ahead(self) -> bool:
        """Whether `Executor.start` returns before the step is done."""
        ...

    @property
    def hashes_weights(self) -> bool:
        """Whether `load_weights` checks the hashes of the file's parts: then it is read once."""
        ...

    def check(self, manifest: Manifest, where: str) -> None:
        """Refuse a device that cannot run the artifact; reads nothing but the manifest.

        Args:
            manifest: The artifact's table of contents.
            where: The artifact's directory, for messages.

        Raises:
            ArtifactError: The artifact was compiled for something else.
            DeviceFault: The device or its driver is missing, too old or too small.
        """
        ...

    def allocate(self, space: str, nbytes: int) -> Memory:
        """Allocate one space of zero bytes, exactly as large as planned.

        Raises:
            DeviceFault: There is not that much memory.
        """
        ...

    def load_weights(self, weights: WeightsFile) -> Memory:
        """Make space weights hold the weights.

        Raises:
            ArtifactError: The file is shorter than planned, or its hash differs.
            DeviceFault: There is not that much memory.
        """
        ...

    def open_kernels(self, directory: Path, manifest: Manifest) -> None:
        """Open every kernel of the artifact; none is looked up on disk later.

        Raises:
            ArtifactError: A kernel is missing or not what the manifest says.
            DeviceFault: A library does not open here.
        """
        ...

    def bind(self, plan: Plan, memory: Mapping[str, Memory]) -> Executor:
        """Prepare the steps of a bucket.

        Raises:
            ArtifactError: The plan names something that is not there.
            DeviceFault: The device refuses it.
        """
        ...

    @property
    def survives(self) -> bool:
        """Whether the device still works after a fault."""
        ...

    def close(self) -> None:
        """Give back everything; nothing of the artifact may be used after that.

        Raises:
            DeviceFault: The device failed.
        """
        ...


DTYPES: Mapping[str, type[np.generic]] = {"i32": np.int32, "i64": np.int64, "f32": np.float32}
