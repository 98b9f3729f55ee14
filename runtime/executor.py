"""Two ways to run a plan: its compiled entry function, or command by command. Both give equal bits.

All arguments are bound when an executor is made; `run` allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from k3c.artifact import SPACES, Arg, Buffer, Command, Kernel, LayerCall, Plan
from k3c.errors import ArtifactError
from k3c.runtime.driver.cpu import TYPE_INT, TYPE_OPAQUE_POINTER, CpuDriver


class Executor(Protocol):
    """Runs one bucket's step on the memory it was bound to."""

    def run(self) -> None:
        """Run the step once.

        Raises:
            DeviceFault: A launch failed.
        """
        ...


class EntryExecutor:
    """One call of the plan's entry function, which makes all launches itself."""

    def __init__(self, driver: CpuDriver, plan: Plan, addresses: Mapping[str, int]) -> None:
        """Bind the entry function.

        Args:
            driver: Has the kernel libraries open.
            plan: The plan.
            addresses: First byte of each space.

        Raises:
            ArtifactError: The entry function is missing.
        """
        args = [(TYPE_OPAQUE_POINTER, addresses[space]) for space in SPACES]
        self._call = driver.packed_call(plan.entry, args, f"bucket {plan.bucket.name}")

    def run(self) -> None:
        """Run the step once.

        Raises:
            DeviceFault: A launch failed.
        """
        self._call()


class CommandExecutor:
    """Every launch of the plan as a call of its own: slower, and names the launch that failed."""

    def __init__(
        self,
        driver: CpuDriver,
        plan: Plan,
        addresses: Mapping[str, int],
        kernels: Iterable[Kernel],
    ) -> None:
        """Bind every launch of every layer.

        Args:
            driver: Has the kernel libraries open.
            plan: The plan.
            addresses: First byte of each space.
            kernels: The manifest's kernels; commands name them by symbol.

        Raises:
            ArtifactError: A command names a kernel, buffer or attribute that is not there.
        """
        buffers, symbols = {b.id: b for b in plan.buffers}, {k.symbol for k in kernels}
        self._calls: list[Callable[[], None]] = []
        for call in plan.calls:
            resolve = _Resolver(call, buffers, addresses)
            for command in plan.commands[call.graph]:
                label = f"{plan.bucket.name}, {call.graph} layer {call.layer}, {command.label}"
                _check_launch(command, symbols, label)
                args = [resolve.arg(arg, label) for arg in command.args]
                self._calls.append(driver.packed_call(command.kernel, args, label))

    def __len__(self) -> int:
        return len(self._calls)

    def run(self) -> None:
        """Run the step once.

        Raises:
            DeviceFault: A launch failed; the label says which.
        """
        for call in self._calls:
            call()


def _check_launch(command: Command, symbols: set[str], label: str) -> None:
    if command.kind != "launch" or command.kernel not in symbols:
        found = f"{command.kind} {command.kernel!r}"
        raise ArtifactError(f"command {found}, expected a launch of a known kernel", label)


class _Resolver:
    """Turns the plan's arguments into values for one layer."""

    def __init__(
        self, call: LayerCall, buffers: Mapping[str, Buffer], addresses: Mapping[str, int]
    ) -> None:
        self._call, self._buffers, self._addresses = call, buffers, addresses

    def arg(self, arg: Arg, label: str) -> tuple[int, int]:
        """Return (type index, payload)."""
        try:
            if arg.buffer:
                return TYPE_OPAQUE_POINTER, self._address(self._buffers[arg.buffer])
            if arg.layer_attr:
                return TYPE_INT, self._call.attrs[arg.layer_attr]
        except KeyError as exc:
            what = f"argument {exc} is not in the plan"
            raise ArtifactError(what, label, "compile again") from exc
        return TYPE_INT, arg.value

    def _address(self, buffer: Buffer) -> int:
        base = self._call.bases[buffer.space] if buffer.per_layer else 0
        return self._addresses[buffer.space] + base + buffer.offset
