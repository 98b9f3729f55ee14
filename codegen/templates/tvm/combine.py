"""combine and combine_norm: weighted sum of a token's expert rows, and the norm after it.

A row whose weight is 0 is not read: its expert may lie on another rank, and nobody wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.script import tirx as T

from k3c.codegen.template import refuse_dtype
from k3c.codegen.templates.tvm.rowwise import RowTemplate, fitting_lanes
from k3c.codegen.templates.tvm.vector import (
    hold,
    horizontal_sum,
    narrow,
    rounded,
    span,
    splat,
    storage,
    widen,
)
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Constant, Cost
from k3c.targets.target import Target


class _Combine(RowTemplate):
    """The weighted sum; `combine_norm` has the norm's weight as third operand."""

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        return refuse_dtype(node, 0, ("f32", "bf16")) or refuse_dtype(node, 1, ("f32",))

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the compile-time constants."""
        rows = node.operands[0].type
        return {
            "k": rows.sizes[1],
            "width": rows.sizes[2],
            "act": rows.dtype.name,
            "lanes": fitting_lanes(rows.sizes[2], target),
        }

    def cost(self, node: Node, target: Target) -> Cost:
        """Return bytes once, and a multiplication and an addition per routed element."""
        moved = super().cost(node, target)
        return Cost(moved.read_bytes, moved.write_bytes, 2 * node.operands[0].type.elements)


class Combine(_Combine):
    """`combine`: rows A[T, k, L], weights f32[T, k] -> A[T, L]."""

    name, op, reference = "combine", "combine", "combine"

    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        k, width, lanes = (int(constants[name]) for name in ("k", "width", "lanes"))
        act = str(constants["act"])

        @T.prim_func
        def kernel(parts_h: T.handle, weights_h: T.handle, out_h: T.handle, rows: T.int64):
            T.func_attr({"tirx.noalias": True})
            parts = T.decl_buffer((rows, k, width), storage(act), data=parts_h)
            weights = T.decl_buffer((rows, k), "float32", data=weights_h)
            out = T.decl_buffer((rows, width), storage(act), data=out_h)
            for row in T.parallel(rows):
                acc = T.alloc_buffer((lanes,), "float32")
                for d in range(width // lanes):
                    acc[span(0, lanes)] = splat(0.0, lanes)
                    for j in range(k):
                        part = T.meta_var(widen(parts[row, j, span(d * lanes, lanes)], act, lanes))
                        if weights[row, j] != T.float32(0):
                            acc[span(0, lanes)] += part * splat(weights[row, j], lanes)
                    out[row, span(d * lanes, lanes)] = narrow(acc[span(0, lanes)], act, lanes)

        return kernel


class CombineNorm(_Combine):
    """`combine_norm`: rows A[T, k, L], weights f32[T, k], norm f32[L] -> A[T, L]."""

    name, op, reference = "combine_norm", "combine_norm", "combine_norm"

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the compile-time constants."""
        eps = node.attrs["eps"]
        assert isinstance(eps, int | float), f"eps {eps!r} is no number"
        return {**super().constants(node, target), "eps": float(eps)}

    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel. The sum is rounded into `out` and read back for the norm."""
        k, width, lanes = (int(constants[name]) for name in ("k", "width", "lanes"))
        act, eps = str(constants["act"]), float(constants["eps"])

        @T.prim_func
        def kernel(
            parts_h: T.handle,
            weights_h: T.handle,
            norm_h: T.handle,
            out_h: T.handle,
            rows: T.int64,
        ):
            T.func_attr({"tirx.noalias": True})
            parts = T.decl_buffer((rows, k, width), storage(act), data=parts_h)
            weights = T.decl_buffer((rows, k), "float32", data=weights_h)
            norm = T.decl_buffer((width,), "float32", data=norm_h)
            out = T.decl_buffer((rows, width), storage(act), data=out_h)
            for row in T.parallel(rows):
                acc = T.alloc_buffer((lanes,), "float32")
                squares = T.alloc_buffer((lanes,), "float32")
                squares[span(0, lanes)] = splat(0.0, lanes)
                for d in range(width // lanes):
                    acc[span(0, lanes)] = splat(0.0, lanes)
                    for j in range(k):
                        part = T.meta_var(widen(parts[row, j, span(d * lanes, lanes)], act, lanes))
                        if weights[row, j] != T.float32(0):
                            acc[span(0, lanes)] += part * splat(weights[row, j], lanes)
                    total = T.meta_var(hold(rounded(acc[span(0, lanes)], act, lanes)))
                    squares[span(0, lanes)] += total * total
                    out[row, span(d * lanes, lanes)] = narrow(total, act, lanes)
                mean = T.meta_var(horizontal_sum(squares, 0, lanes) / T.float32(width))
                inverse = T.meta_var(hold(T.float32(1) / T.sqrt(mean + T.float32(eps))))
                for d in range(width // lanes):
                    here = T.meta_var(span(d * lanes, lanes))
                    value = T.meta_var(widen(out[row, here], act, lanes))
                    scaled = T.meta_var(value * splat(inverse, lanes) * norm[here])
                    out[row, here] = narrow(scaled, act, lanes)

        return kernel


TEMPLATES = (Combine(), CombineNorm())
