"""linear for any number of rows: register tiles over the panels that decode streams.

A task is a panel; it stays in the nearest cache while the tiles walk over the rows. The last tile
repeats the last row instead of reading past it, and stores only rows that exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3c.codegen.templates.tvm.linear_common import (
    LinearBuffers,
    accumulate,
    linear_function,
    write_rows,
)
from k3c.codegen.templates.tvm.linear_node import (
    LinearShape,
    linear_constants,
    linear_cost,
    node_layout,
    refuse_linear,
    x_workspace_bytes,
)
from k3c.codegen.templates.tvm.single_launch import SingleLaunch
from k3c.codegen.templates.tvm.vector import B
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Constant, Cost, Scalar
from k3c.targets.target import Target

# Rows of a tile by lanes: with two accumulators a row, 12 of 16 or 24 of 32 registers.
_TILE_ROWS = {8: 6, 16: 12}


class LinearPrefill(SingleLaunch):
    """`linear` with rows as a run-time integer."""

    name = "linear_prefill"
    op = "linear"
    reference = "linear"

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        return refuse_linear(node, target)

    def layouts(self, node: Node, target: Target) -> Mapping[int, str]:
        """Return the panel layout of the weight."""
        return {1: node_layout(node, target).name}

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the compile-time constants."""
        return linear_constants(node, target)

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: rows."""
        return (("rows", node.operands[0].type.sizes[0]),)

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of x as f32."""
        return x_workspace_bytes(node, _TILE_ROWS[target.lanes])

    def cost(self, node: Node, target: Target) -> Cost:
        """Return bytes and operations of one launch."""
        return linear_cost(node, target)

    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        shape = LinearShape.of(constants)

        tile = _TILE_ROWS[shape.lanes]

        def body(buffers: LinearBuffers) -> None:
            with B.parallel(shape.layout.panels) as panel, B.serial(buffers.count) as index:
                sums = accumulate(shape, buffers, (panel, index), range(tile), 1)
                write_rows(shape, buffers, panel, index * tile, sums)

        return linear_function(shape, tile, False, body)


LINEAR_PREFILL = LinearPrefill()
