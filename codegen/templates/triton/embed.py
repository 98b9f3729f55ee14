"""`embed` and `gather_rows`: rows of a table, found by index."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import triton
import triton.language as tl

from k3c.codegen.template import refuse_dtype
from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs
from k3c.codegen.triton_template import TritonTemplate
from k3c.ir.graph import LayerAttr, Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Cost, Scalar, Stage
from k3c.targets.target import Target

_COLUMNS = 1024


@triton.jit
def embed_rows(
    ids, table, y, rows, table_rows, first_row,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy rows `ids` - first_row of the table; zero where this rank does not have the row."""
    wait_for_inputs(PDL)
    release_dependents(PDL)
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // across + tl.arange(0, 1)).to(tl.int64)[:, None]
    column = (tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    source = tl.load(ids + row).to(tl.int64) - first_row
    mine = (source >= 0) & (source < table_rows) & (column < WIDTH)
    values = tl.load(table + source * WIDTH + column, mask=mine, other=0)
    values = values.to(tl.float32).to(y.dtype.element_ty)
    tl.store(y + row * WIDTH + column, values, mask=column < WIDTH)


@triton.jit
def gather_rows(
    x, index, y, rows, x_rows,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy rows `index` of x."""
    wait_for_inputs(PDL)
    release_dependents(PDL)
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // across).to(tl.int64)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    source = tl.load(index + row).to(tl.int64)
    values = tl.load(x + source * WIDTH + column, mask=column < WIDTH)
    tl.store(y + row * WIDTH + column, values, mask=column < WIDTH)


class _RowCopy(TritonTemplate):
    """Base: one block copies a part of one row."""

    @abstractmethod
    def table(self, node: Node) -> int:
        """Return the place of the table among the operands; the other one is the index."""

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        place = self.table(node)
        return refuse_dtype(node, place, ("f32", "bf16")) or refuse_dtype(node, 1 - place, ("i32",))

    def cost(self, node: Node, target: Target) -> Cost:
        """Return the bytes of the rows that are copied, not of the table."""
        place, out = self.table(node), node.results[0].type
        read = out.elements * node.operands[place].type.dtype.bits // 8
        return Cost(int(read) + node.operands[1 - place].type.nbytes, out.nbytes, 0)

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the one launch."""
        rows, width = node.results[0].type.sizes
        columns = min(_COLUMNS, 1 << (width - 1).bit_length())
        grid = (rows * -(-width // columns), 1, 1)
        pdl = target.kind == "cuda"
        return (self.stage(node, target, "", grid, pdl=pdl, WIDTH=width, COLUMNS=columns),)


class Embed(_RowCopy):
    """`embed`: ids i32[T], table [V, D] -> A[T, D]; rows of other ranks are zero."""

    name, op, reference = "embed", "embed", "embed"
    kernels: ClassVar[Mapping[str, Any]] = {"": embed_rows}

    def table(self, node: Node) -> int:
        """Return the place of the table."""
        return 1

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return rows, rows of this rank's table and the first of them."""
        rows, have = node.results[0].type.sizes[0], node.operands[1].type.sizes[0]
        first = node.attrs.get("first_row", 0)
        assert isinstance(first, int | LayerAttr), f"embed: first_row is {first}"
        return (("rows", rows), ("table_rows", have), ("first_row", first))


class GatherRows(_RowCopy):
    """`gather_rows`: x A[T, D], index i32[B] -> A[B, D]."""

    name, op, reference = "gather_rows", "gather_rows", "gather_rows"
    kernels: ClassVar[Mapping[str, Any]] = {"": gather_rows}

    def table(self, node: Node) -> int:
        """Return the place of x."""
        return 0

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        dtypes = {node.operands[0].type.dtype.name, node.results[0].type.dtype.name}
        if len(dtypes) > 1:
            return Refusal("x and result differ in dtype", ", ".join(sorted(dtypes)))
        return super().accepts(node, target)

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return rows to copy and rows of x."""
        have = node.operands[0].type.sizes[0]
        return (("rows", node.results[0].type.sizes[0]), ("x_rows", have))


TEMPLATES = (Embed(), GatherRows())
