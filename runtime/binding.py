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
        addresses: Whether each argument is an address.
        after: The commands of the step, by their place in it, that it waits for.
        label: Bucket, graph, layer and node, for errors.
    """

    command: Command
    kernel: Kernel | None
    values: tuple[int, ...]
    addresses: tuple[bool, ...]
    after: tuple[int, ...]
    label: str


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
    where = f"plan {plan.bucket.name}"
    # What is the same in all layers is worked out once for each graph.
    graphs = {
        graph: [_Prepared(c, buffers, addresses, known, f"{where}, {c.label}") for c in commands]
        for graph, commands in plan.commands.items()
    }
    bound: list[Bound] = []
    ends: tuple[int, ...] = ()
    for call in plan.calls:
        first, prepared = len(bound), graphs[call.graph]
        label = f"{plan.bucket.name}, {call.graph} layer {call.layer}, "
        bound += [p.bind(call, first, ends, label) for p in prepared]
        ends = _ends(plan.commands[call.graph], first) or ends
    return bound


def _ends(commands: tuple[Command, ...], first: int) -> tuple[int, ...]:
    """Return the commands of a call that no other of its commands waits for."""
    waited = {i for command in commands for i in command.after}
    return tuple(first + i for i in range(len(commands)) if i not in waited)


class _Prepared:
    """A command whose arguments lack only what differs from layer to layer."""

    def __init__(
        self,
        command: Command,
        buffers: Mapping[str, Buffer],
        addresses: Mapping[str, int],
        known: Mapping[str, Kernel],
        where: str,
    ) -> None:
        self._command, self._kernel = command, known.get(command.kernel)
        if command.kind == "launch" and self._kernel is None:
            what = f"command launches {command.kernel!r}, which is no kernel of the manifest"
            raise ArtifactError(what, where, "compile again")
        if command.kind != "launch":
            self._kernel = None
        try:
            # Each: a value, the space whose base in the layer is added, or the layer's attribute.
            self._parts = [_part(arg, buffers, addresses) for arg in command.args]
        except KeyError as exc:
            what = f"argument {exc} is not in the plan"
            raise ArtifactError(what, where, "compile again") from exc
        self._addresses = tuple(bool(arg.buffer) for arg in command.args)

    def bind(self, call: LayerCall, first: int, ends: tuple[int, ...], label: str) -> Bound:
        """Return the command in one call, whose first command has the place `first`."""
        label += self._command.label
        bases, attrs = call.bases, call.attrs
        try:
            values = tuple(
                value + bases[space] if space else attrs[attr] if attr else value
                for value, space, attr in self._parts
            )
        except KeyError as exc:
            what = f"argument {exc} is not in the plan"
            raise ArtifactError(what, label, "compile again") from exc
        after = tuple(first + i for i in self._command.after) or ends
        return Bound(self._command, self._kernel, values, self._addresses, after, label)


def _part(
    arg: Arg, buffers: Mapping[str, Buffer], addresses: Mapping[str, int]
) -> tuple[int, str, str]:
    if not arg.buffer:
        return arg.value, "", arg.layer_attr
    buffer = buffers[arg.buffer]
    space = buffer.space if buffer.per_layer else ""
    return addresses[buffer.space] + buffer.offset, space, ""
