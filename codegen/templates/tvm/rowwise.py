"""What templates that work row by row share: rows at run time, plain layouts, bytes as cost."""

from __future__ import annotations

from collections.abc import Mapping

from k3c.codegen.template import operand_bytes, result_bytes
from k3c.codegen.templates.tvm.single_launch import SingleLaunch
from k3c.ir.graph import Node
from k3c.targets.catalogue import Cost, Scalar
from k3c.targets.target import Target


class RowTemplate(SingleLaunch):
    """Defaults of a template whose rows are a run-time integer and that packs no weight."""

    def layouts(self, node: Node, target: Target) -> Mapping[int, str]:
        """Return the layouts of packed weights: none."""
        return {}

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: rows."""
        return (("rows", node.results[0].type.sizes[0]),)

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of scratch: none."""
        return 0

    def cost(self, node: Node, target: Target) -> Cost:
        """Return every operand read once and every result written once."""
        return Cost(operand_bytes(node), result_bytes(node), 0)


def fitting_lanes(width: int, target: Target) -> int:
    """Return the target's lanes where they divide a row, else 1."""
    return target.lanes if width % target.lanes == 0 else 1
