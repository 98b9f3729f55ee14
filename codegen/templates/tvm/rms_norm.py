"""rms_norm: rows scaled to a mean square of one, times a weight."""

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
    span,
    splat,
    storage,
    widen,
)
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Constant, Cost
from k3c.targets.target import Target

# A square and its addition, then two multiplications.
_FLOPS_PER_ELEMENT = 4


class RmsNorm(RowTemplate):
    """`rms_norm`: x A[T, D], w f32[D] -> A[T, D]."""

    name, op, reference = "rms_norm", "rms_norm", "rms_norm"

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        return refuse_dtype(node, 0, ("f32", "bf16")) or refuse_dtype(node, 1, ("f32",))

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the compile-time constants."""
        x, eps = node.operands[0].type, node.attrs["eps"]
        assert isinstance(eps, int | float), f"eps {eps!r} is no number"
        return {
            "width": x.sizes[1],
            "act": x.dtype.name,
            "lanes": fitting_lanes(x.sizes[1], target),
            "eps": float(eps),
        }

    def cost(self, node: Node, target: Target) -> Cost:
        """Return bytes once, and the operations of the norm."""
        moved = super().cost(node, target)
        flops = _FLOPS_PER_ELEMENT * node.operands[0].type.elements
        return Cost(moved.read_bytes, moved.write_bytes, flops)

    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        width, lanes = int(constants["width"]), int(constants["lanes"])
        act, eps = str(constants["act"]), float(constants["eps"])

        @T.prim_func
        def kernel(x_h: T.handle, norm_h: T.handle, out_h: T.handle, rows: T.int64):
            T.func_attr({"tirx.noalias": True})
            x = T.decl_buffer((rows, width), storage(act), data=x_h)
            norm = T.decl_buffer((width,), "float32", data=norm_h)
            out = T.decl_buffer((rows, width), storage(act), data=out_h)
            for row in T.parallel(rows):
                squares = T.alloc_buffer((lanes,), "float32")
                squares[span(0, lanes)] = splat(0.0, lanes)
                for d in range(width // lanes):
                    value = T.meta_var(hold(widen(x[row, span(d * lanes, lanes)], act, lanes)))
                    squares[span(0, lanes)] += value * value
                mean = T.meta_var(hold(horizontal_sum(squares, 0, lanes) / T.float32(width)))
                scale = T.meta_var(hold(T.float32(1) / T.sqrt(mean + T.float32(eps))))
                for d in range(width // lanes):
                    at = T.meta_var(span(d * lanes, lanes))
                    normed = T.meta_var(
                        widen(x[row, at], act, lanes) * splat(scale, lanes) * norm[at]
                    )
                    out[row, at] = narrow(normed, act, lanes)

        return kernel


TEMPLATES = (RmsNorm(),)
