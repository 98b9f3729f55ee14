"""dispatch: sort the routed rows of this rank's experts by expert, stably, by counting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.script import tirx as T

from k3c.codegen.template import first_expert, refuse_dtype
from k3c.codegen.templates.tvm.rowwise import RowTemplate
from k3c.codegen.templates.tvm.vector import hold
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Constant, Scalar
from k3c.targets.target import Target

_I32_BYTES = 4


class Dispatch(RowTemplate):
    """`dispatch`: experts i32[T, k] -> offsets i32[E + 1], order i32[T, k] of ids t * k + j."""

    name, op, reference = "dispatch", "dispatch", "dispatch"

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        return refuse_dtype(node, 0, ("i32",))

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the compile-time constants."""
        return {
            "experts": node.results[0].type.sizes[0] - 1,
            "k": node.operands[0].type.sizes[1],
        }

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: tokens, the first expert of this rank."""
        return ("rows", node.operands[0].type.sizes[0]), first_expert(node)

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of each expert's next free place."""
        return node.results[0].type.sizes[0] * _I32_BYTES

    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel. One thread: it moves k numbers a token."""
        experts, k = int(constants["experts"]), int(constants["k"])

        @T.prim_func
        def kernel(
            experts_h: T.handle,
            offsets_h: T.handle,
            order_h: T.handle,
            cursor_h: T.handle,
            rows: T.int64,
            first: T.int64,
        ):
            T.func_attr({"tirx.noalias": True})
            expert = T.decl_buffer((rows * k,), "int32", data=experts_h)
            offsets = T.decl_buffer((experts + 1,), "int32", data=offsets_h)
            order = T.decl_buffer((rows * k,), "int32", data=order_h)
            cursor = T.decl_buffer((experts + 1,), "int32", data=cursor_h)
            for e in range(experts + 1):
                offsets[e] = 0
            for i in range(rows * k):
                local = T.meta_var(hold(T.Cast("int64", expert[i]) - first))
                if local >= T.int64(0) and local < T.int64(experts):
                    offsets[local + 1] = offsets[local + 1] + 1
            for e in range(experts):
                cursor[e] = offsets[e]
                offsets[e + 1] = offsets[e + 1] + offsets[e]
            for i in range(rows * k):
                local = T.meta_var(hold(T.Cast("int64", expert[i]) - first))
                if local >= T.int64(0) and local < T.int64(experts):
                    order[cursor[local]] = T.Cast("int32", i)
                    cursor[local] = cursor[local] + 1

        return kernel


TEMPLATES = (Dispatch(),)
