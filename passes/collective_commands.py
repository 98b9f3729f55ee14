"""The commands of collective nodes: the runtime does them between ranks, without a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from k3c.artifact import Arg, Command
from k3c.ir.graph import Node
from k3c.passes.assign_buffers import Assignment


@dataclass(frozen=True)
class Place:
    """Where a rank stands: the size of each mesh axis, and its coordinate, the same along all."""

    axes: Mapping[str, int]
    rank: int


def collective_commands(node: Node, assignment: Assignment, place: Place) -> list[Command]:
    """Return one command for each operand; those of one node follow each other as one message."""
    ranks = place.axes[str(node.attrs["axis"])]
    commands: list[Command] = []
    for operand, result in zip(node.operands, node.results, strict=True):
        to, source = (assignment.owner[value.name] for value in (result, operand))
        args = (
            Arg(buffer=to),
            Arg(buffer=source),
            Arg(value=operand.type.nbytes),
            Arg(value=ranks),
            Arg(value=place.rank),
        )
        label = f"{node.op} -> %{result.name}"
        commands.append(Command("collective", node.op, args, (source,), (to,), label))
    return commands
