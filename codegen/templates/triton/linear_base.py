"""What the templates of `linear` and `norm_linear` share: one set of kernels serves both ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from k3c.codegen.templates.triton.linear_node import (
    LinearShape,
    absent_pointers,
    epilogue_constants,
    epsilon,
    linear_cost,
    node_layout,
    refuse_linear,
    weight_index,
)
from k3c.codegen.triton_template import TritonTemplate
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Cost, Scalar, Stage
from k3c.targets.target import Target

# Rows whose weights are streamed once past one tile of x; more rows take the tiled product.
DECODE_ROWS = 16
# Weights that a kernel asks for before its inputs are ready: more would push out what is in use.
PREFETCH_BYTES = 24 << 20
# Columns of the product that a block of the stage which adds partial sums takes.
_FINISH_COLUMNS = 256


class LinearTemplate(TritonTemplate):
    """Base of the templates; `row_range` says how many rows they take."""

    row_range: ClassVar[tuple[int, int]]

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        refusal = refuse_linear(node)
        if refusal is not None:
            return refusal
        rows, (low, high) = node.operands[0].type.sizes[0], self.row_range
        return None if low <= rows <= high else Refusal(f"want {low} to {high} rows", rows)

    def layouts(self, node: Node, target: Target) -> Mapping[int, str]:
        """Return the layout of the weight."""
        return {weight_index(node): node_layout(node).name}

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: rows and K."""
        rows, inner = node.operands[0].type.sizes
        return (("rows", rows), ("inner", inner))

    def cost(self, node: Node, target: Target) -> Cost:
        """Return bytes and operations of all stages."""
        return linear_cost(node)

    def linear_stage(
        self, node: Node, target: Target, name: str, blocks: int, **options: Any
    ) -> Stage:
        """Return a stage; constexprs that its kernel does not have are left out."""
        shape = LinearShape.of(node)
        known = {
            "K": shape.inner,
            "COLUMNS": shape.packed_rows,
            "NORM": int(shape.norm),
            "ADDEND": int(shape.addend),
            "EPS": epsilon(node),
            **epilogue_constants(node),
            **absent_pointers(node, self.workspace_bytes(node, target) > 0),
        }
        taken = self.kernels[name].arg_names
        constexprs = {k: v for k, v in known.items() if k in taken} | options
        pdl = target.kind == "cuda"
        return self.stage(node, target, name, (blocks, 1, 1), pdl=pdl, **constexprs)

    def finish_stage(self, node: Node, target: Target, split: int, skip: bool) -> Stage:
        """Return the stage that adds the `split` parts of the product.

        Args:
            node: The node.
            target: The device.
            split: Parts.
            skip: Whether the workspace starts with the normalised rows.
        """
        shape = LinearShape.of(node)
        blocks = shape.rows * -(-shape.packed_rows // _FINISH_COLUMNS)
        return self.linear_stage(
            node, target, "finish", blocks, num_warps=2,
            BLOCK_N=_FINISH_COLUMNS, SPLIT=split, SKIP=int(skip),
        )  # fmt: skip
