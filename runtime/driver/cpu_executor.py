"""Two ways to run a plan on a CPU: its compiled entry function, or command by command.

Both give equal bits. All arguments are bound when one is made; a step allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from k3c.artifact import SPACES, Kernel, Plan
from k3c.errors import ArtifactError
from k3c.runtime.binding import Bound, bind_commands
from k3c.runtime.driver.driver import DTYPES, Array
from k3c.runtime.driver.kernel_libraries import TYPE_INT, TYPE_OPAQUE_POINTER, KernelLibraries


def io_views(plan: Plan, memory: Array) -> dict[str, Array]:
    """Return the plan's io fields as arrays that lie in the io memory.

    Args:
        plan: The plan.
        memory: u8[io bytes], shared by all plans.

    Raises:
        ArtifactError: A field lies outside the memory or names an unknown buffer.
    """
    buffers = {b.id: b for b in plan.buffers}
    views = {}
    for field in plan.io:
        buffer, dtype = buffers.get(field.buffer), np.dtype(DTYPES[field.dtype])
        nbytes = dtype.itemsize * int(np.prod(field.shape))
        if buffer is None or buffer.offset + nbytes > memory.nbytes or nbytes > buffer.nbytes:
            raise ArtifactError(
                f"io field {field.name} needs {nbytes} B, buffer {field.buffer!r} does not hold it",
                f"plan {plan.bucket.name}",
                "compile again",
            )
        views[field.name] = np.ndarray(field.shape, dtype, memory.data, buffer.offset)
    return views


class CpuExecutor:
    """Runs a bucket's step at once; its io fields are the memory that the kernels use."""

    def __init__(self, plan: Plan, memory: Array, run: Callable[[], None]) -> None:
        """Make the views of the fields.

        Args:
            plan: The plan.
            memory: u8[io bytes].
            run: Runs the step.

        Raises:
            ArtifactError: A field does not fit.
        """
        self._fields, self.run = io_views(plan, memory), run

    @property
    def inputs(self) -> Mapping[str, Array]:
        """The io fields: there is nothing to upload."""
        return self._fields

    def start(self, upload: bool) -> None:
        """Run the step to its end.

        Raises:
            DeviceFault: A launch failed.
        """
        self.run()

    def finish(self) -> Mapping[str, Array]:
        """Return the io fields; the step is done."""
        return self._fields


class EntryStep:
    """One call of the plan's entry function, which makes all launches itself."""

    def __init__(
        self, libraries: KernelLibraries, plan: Plan, addresses: Mapping[str, int]
    ) -> None:
        """Bind the entry function.

        Args:
            libraries: The open kernel libraries.
            plan: The plan.
            addresses: First byte of each space.

        Raises:
            ArtifactError: The entry function is missing.
        """
        args = [(TYPE_OPAQUE_POINTER, addresses[space]) for space in SPACES]
        self.calls = [libraries.packed_call(plan.entry, args, f"bucket {plan.bucket.name}")]

    def run(self) -> None:
        """Run the step once.

        Raises:
            DeviceFault: A launch failed.
        """
        self.calls[0]()


class CommandStep:
    """Every launch of the plan as a call of its own: slower, and names the launch that failed."""

    def __init__(
        self,
        libraries: KernelLibraries,
        plan: Plan,
        addresses: Mapping[str, int],
        kernels: Iterable[Kernel],
    ) -> None:
        """Bind every launch of every layer.

        Args:
            libraries: The open kernel libraries.
            plan: The plan.
            addresses: First byte of each space.
            kernels: The manifest's kernels; commands name them by symbol.

        Raises:
            ArtifactError: A command names a kernel, buffer or attribute that is not there.
        """
        bound = bind_commands(plan, addresses, kernels)
        self.calls = [_packed_call(libraries, command) for command in bound]

    def __len__(self) -> int:
        return len(self.calls)

    def run(self) -> None:
        """Run the step once.

        Raises:
            DeviceFault: A launch failed; the label says which.
        """
        for call in self.calls:
            call()


def _packed_call(libraries: KernelLibraries, bound: Bound) -> Callable[[], None]:
    if bound.kernel is None:
        what = f"command is a {bound.command.kind}, a CPU runs launches only"
        raise ArtifactError(what, bound.label, "compile again")
    args = [
        (TYPE_OPAQUE_POINTER if is_address else TYPE_INT, value)
        for value, is_address in zip(bound.values, bound.addresses, strict=True)
    ]
    return libraries.packed_call(bound.kernel.entry, args, bound.label)
