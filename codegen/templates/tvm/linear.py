"""linear for the few rows of a decode step: every panel of weights is read once.

Each thread streams a contiguous range of panels. For one row the product is bound by memory; from
about six rows on, AVX2's registers no longer hold all accumulators, and a panel is read again, from
the second-level cache, for each block of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
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

MAX_ROWS = 8
# Rows whose accumulators fit the registers, by lanes: 2 a row of 16 (AVX2) or 32 (AVX-512).
_ROWS_IN_REGISTERS = {8: 5, 16: 8}
# Steps of K in flight by rows: two FMAs start each cycle and take four, so 8 sums must be open.
_UNROLL = {1: 4, 2: 2, 3: 2}


class LinearDecode(SingleLaunch):
    """`linear` specialised on up to 8 rows."""

    name = "linear_decode"
    op = "linear"
    reference = "linear"

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        refusal = refuse_linear(node, target)
        rows = node.operands[0].type.sizes[0]
        if refusal is None and not 1 <= rows <= MAX_ROWS:
            return Refusal(f"linear_decode takes 1 to {MAX_ROWS} rows", rows)
        return refusal

    def layouts(self, node: Node, target: Target) -> Mapping[int, str]:
        """Return the panel layout of the weight."""
        return {1: node_layout(node, target).name}

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the compile-time constants, rows among them."""
        return {**linear_constants(node, target), "rows": node.operands[0].type.sizes[0]}

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: none."""
        return ()

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of x as f32."""
        return x_workspace_bytes(node, node.operands[0].type.sizes[0])

    def cost(self, node: Node, target: Target) -> Cost:
        """Return bytes and operations of one launch."""
        return linear_cost(node, target)

    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        shape, rows = LinearShape.of(constants), int(constants["rows"])

        def body(buffers: LinearBuffers) -> None:
            with B.parallel(shape.layout.panels) as panel:
                for block in _row_blocks(rows, shape.lanes):
                    unroll = _unroll(len(block), shape.inner)
                    sums = accumulate(shape, buffers, (panel, 0), block, unroll)
                    write_rows(shape, buffers, panel, block.start, sums)

        return linear_function(shape, rows, True, body)


def _row_blocks(rows: int, lanes: int) -> list[range]:
    """Split rows into the fewest blocks that fit the registers, as even as they can be."""
    count = -(-rows // _ROWS_IN_REGISTERS[lanes])
    edges = [rows * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def _unroll(rows: int, inner: int) -> int:
    wanted = _UNROLL.get(rows, 1)
    while inner % wanted:
        wanted //= 2
    return wanted


LINEAR_DECODE = LinearDecode()
