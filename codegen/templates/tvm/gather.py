"""embed and gather_rows: copy the rows of a table that an index names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.script import tirx as T

from k3c.codegen.template import refuse_dtype
from k3c.codegen.templates.tvm.rowwise import RowTemplate, fitting_lanes
from k3c.codegen.templates.tvm.vector import narrow, span, storage, widen
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Constant, Cost, Scalar
from k3c.targets.target import Target


class _Gather(RowTemplate):
    """Rows of a table; `index` and `table` are the operands' places."""

    name: str
    index: int
    table: int

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        return refuse_dtype(node, self.table, ("f32", "bf16")) or refuse_dtype(
            node, self.index, ("i32",)
        )

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the compile-time constants."""
        table, out = node.operands[self.table].type, node.results[0].type
        return {
            "width": out.sizes[1],
            "stored": table.dtype.name,
            "act": out.dtype.name,
            "lanes": fitting_lanes(out.sizes[1], target),
        }

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: rows to copy, rows of the table."""
        return (*super().scalars(node), ("table_rows", node.operands[self.table].type.sizes[0]))

    def cost(self, node: Node, target: Target) -> Cost:
        """Return the bytes of the rows that are copied, not of the table."""
        table, out = node.operands[self.table].type, node.results[0].type
        row_bytes = out.elements * table.dtype.bits // 8
        return Cost(int(row_bytes) + node.operands[self.index].type.nbytes, out.nbytes, 0)

    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        width, lanes = int(constants["width"]), int(constants["lanes"])
        stored, act = str(constants["stored"]), str(constants["act"])

        @T.prim_func
        def kernel(
            first_h: T.handle,
            second_h: T.handle,
            out_h: T.handle,
            rows: T.int64,
            table_rows: T.int64,
        ):
            T.func_attr({"tirx.noalias": True})
            index_h = first_h if self.index == 0 else second_h
            table_h = second_h if self.index == 0 else first_h
            index = T.decl_buffer((rows,), "int32", data=index_h)
            table = T.decl_buffer((table_rows, width), storage(stored), data=table_h)
            out = T.decl_buffer((rows, width), storage(act), data=out_h)
            for row in range(rows):
                source = T.bind(T.Cast("int64", index[row]))
                for d in range(width // lanes):
                    values = T.meta_var(widen(table[source, span(d * lanes, lanes)], stored, lanes))
                    out[row, span(d * lanes, lanes)] = narrow(values, act, lanes)

        return kernel


class Embed(_Gather):
    """`embed`: ids i32[T], table [V, D] -> A[T, D]."""

    name, op, reference = "embed", "embed", "embed"
    index, table = 0, 1


class GatherRows(_Gather):
    """`gather_rows`: x A[T, D], index i32[B] -> A[B, D]."""

    name, op, reference = "gather_rows", "gather_rows", "gather_rows"
    index, table = 1, 0


TEMPLATES = (Embed(), GatherRows())
