"""A plan's commands with everything put in: addresses, layer attributes, and whom they wait for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from k3c.artifact import Arg, Buffer, Command, Kernel, LayerCall, Plan
from k3c.errors import ArtifactError


@dataclass(frozen=True)
class Bound:
    """One command of one call.

    Attributes:
        command: What the plan says.
        kernel: What a launch launches; None for other kinds.
        values: The arguments in order: an address, or an integer.
        after: The commands of the step, by their place in it, that it waits for.
        label: Bucket, graph, layer and node, for errors.
    """

    command: Command
    kernel: Kernel | None
    values: tuple[int, ...]
    after: tuple[int, ...]
    label: str

    @property
    def addresses(self) -> tuple[bool, ...]:
        """Whether each argument is an address."""
        return tuple(bool(arg.buffer) for arg in self.command.args)


def bind_commands(
    plan: Plan, addresses: Mapping[str, int], kernels: Iterable[Kernel]
) -> list[Bound]:
    """Return every command of every call of a step, in order.

    Args:
        plan: The plan.
        addresses: First byte of each space.
        kernels: The manifest's kernels; commands name them by symbol.

    Raises:
        ArtifactError: A command names a kernel, buffer or attribute that is not there.
    """
    buffers, known = {b.id: b for b in plan.buffers}, {k.symbol: k for k in kernels}
    bound: list[Bound] = []
    ends: tuple[int, ...] = ()
    for call in plan.calls:
        resolve, first = _Resolver(call, buffers, addresses), len(bound)
        commands = plan.commands[call.graph]
        for command in commands:
            label = f"{plan.bucket.name}, {call.graph} layer {call.layer}, {command.label}"
            kernel = _kernel(command, known, label)
            values = tuple(resolve.value(arg, label) for arg in command.args)
            after = tuple(first + i for i in command.after) or ends
            bound.append(Bound(command, kernel, values, after, label))
        ends = _ends(commands, first) or ends
    return bound


def _ends(commands: tuple[Command, ...], first: int) -> tuple[int, ...]:
    """Return the commands of a call that no other of its commands waits for."""
    waited = {i for command in commands for i in command.after}
    return tuple(first + i for i in range(len(commands)) if i not in waited)


def _kernel(command: Command, known: Mapping[str, Kernel], label: str) -> Kernel | None:
    if command.kind != "launch":
        return None
    if command.kernel not in known:
        what = f"command launches {command.kernel!r}, which is no kernel of the manifest"
        raise ArtifactError(what, label, "compile again")
    return known[command.kernel]


class _Resolver:
    """Turns the plan's arguments into values for one layer."""

    def __init__(
        self, call: LayerCall, buffers: Mapping[str, Buffer], addresses: Mapping[str, int]
    ) -> None:
        self._call, self._buffers, self._addresses = call, buffers, addresses

    def value(self, arg: Arg, label: str) -> int:
        try:
            if arg.buffer:
                return self._address(self._buffers[arg.buffer])
            return self._call.attrs[arg.layer_attr] if arg.layer_attr else arg.value
        except KeyError as exc:
            what = f"argument {exc} is not in the plan"
            raise ArtifactError(what, label, "compile again") from exc

    def _address(self, buffer: Buffer) -> int:
        base = self._call.bases[buffer.space] if buffer.per_layer else 0
        return self._addresses[buffer.space] + base + buffer.offset
