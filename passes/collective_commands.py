"""The commands of collective nodes: the runtime does them between ranks, without a kernel."""

from __future__ import annotations

from collections.abc import Mapping

from k3c.artifact import Arg, Command, RankAttr
from k3c.ir.graph import Graph, Node
from k3c.ir.ops import COLLECTIVES
from k3c.passes.assign_buffers import Assignment

PLACE_ATTRS = {axis: f"{axis}_place" for axis in ("tp", "ep", "dp", "pp")}


def place_attrs(graph: Graph) -> dict[str, RankAttr]:
    """Return the layer attributes that a graph's collectives read: the rank's place on an axis."""
    axes = {str(node.attrs["axis"]) for node in graph.nodes if node.op in COLLECTIVES}
    return {PLACE_ATTRS[axis]: RankAttr(axis, 1) for axis in sorted(axes)}


def collective_commands(
    node: Node, assignment: Assignment, mesh: Mapping[str, int]
) -> list[Command]:
    """Return one command for each operand; those of one node follow each other as one message.

    Args:
        node: The collective.
        assignment: Where its operands and results are.
        mesh: Size of each axis.
    """
    axis = str(node.attrs["axis"])
    commands: list[Command] = []
    for operand, result in zip(node.operands, node.results, strict=True):
        to, source = (assignment.owner[value.name] for value in (result, operand))
        args = (
            Arg(buffer=to),
            Arg(buffer=source),
            Arg(value=min(operand.type.nbytes, result.type.nbytes)),
            Arg(value=mesh[axis]),
            Arg(layer_attr=PLACE_ATTRS[axis]),
        )
        label = f"{node.op} -> %{result.name}"
        commands.append(Command("collective", node.op, args, (source,), (to,), label))
    return commands
