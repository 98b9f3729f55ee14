"""Elementwise ops that a refused fusion leaves alone: add, sigmoid_mul, situ, residual_join."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.script import tirx as T

from k3c.codegen.template import refuse_dtype
from k3c.codegen.templates.tvm.rowwise import RowTemplate, fitting_lanes
from k3c.codegen.templates.tvm.vector import (
    hold,
    narrow,
    rounded,
    sigmoid,
    situ,
    span,
    storage,
    widen,
)
from k3c.ir.graph import LayerAttr, Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Constant, Scalar
from k3c.targets.target import Target


class _Binary(RowTemplate):
    """Two operands of one shape A[T, N], one result; `combine` computes on f32 lanes."""

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        if len(node.operands) != 2:
            return Refusal(f"{node.op} takes 2 operands", len(node.operands))
        return refuse_dtype(node, 0, ("f32", "bf16")) or refuse_dtype(
            node, 1, (node.operands[0].type.dtype.name,)
        )

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the compile-time constants."""
        width = node.results[0].type.elements // node.results[0].type.sizes[0]
        return {
            "width": width,
            "act": node.results[0].type.dtype.name,
            "lanes": fitting_lanes(width, target),
        }

    def combine(self, a: Any, b: Any, constants: Mapping[str, Constant]) -> Any:
        """Return the result of f32 lanes, not yet rounded."""
        raise AssertionError(f"{type(self).__name__} defines no arithmetic")

    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        width, lanes, act = int(constants["width"]), int(constants["lanes"]), str(constants["act"])

        @T.prim_func
        def kernel(a_h: T.handle, b_h: T.handle, out_h: T.handle, rows: T.int64):
            T.func_attr({"tirx.noalias": True})
            a = T.decl_buffer((rows, width), storage(act), data=a_h)
            b = T.decl_buffer((rows, width), storage(act), data=b_h)
            out = T.decl_buffer((rows, width), storage(act), data=out_h)
            for row in T.parallel(rows):
                for d in range(width // lanes):
                    here = T.meta_var(span(d * lanes, lanes))
                    left = T.meta_var(hold(widen(a[row, here], act, lanes)))
                    right = T.meta_var(hold(widen(b[row, here], act, lanes)))
                    value = T.meta_var(self.combine(left, right, constants))
                    out[row, here] = narrow(value, act, lanes)

        return kernel


class Add(_Binary):
    """`add`: the sum, rounded once."""

    name, op, reference = "add", "add", "add"

    def combine(self, a: Any, b: Any, constants: Mapping[str, Constant]) -> Any:
        """Return the sum."""
        return a + b


class SigmoidMul(_Binary):
    """`sigmoid_mul`: a * sigmoid(z); the sigmoid is rounded before the product."""

    name, op, reference = "sigmoid_mul", "sigmoid_mul", "sigmoid_mul"

    def combine(self, a: Any, b: Any, constants: Mapping[str, Constant]) -> Any:
        """Return the gated value."""
        lanes, act = int(constants["lanes"]), str(constants["act"])
        return a * rounded(sigmoid(b, lanes), act, lanes)


class Situ(_Binary):
    """`situ`: the gated activation of two tensors."""

    name, op, reference = "situ", "situ", "situ"

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the compile-time constants."""
        beta, cap = node.attrs["beta"], node.attrs["linear_beta"]
        assert isinstance(beta, int | float), f"beta {beta!r} is no number"
        assert isinstance(cap, int | float | str), f"linear_beta {cap!r} is no number"
        linear = cap if isinstance(cap, str) else float(cap)
        return {**super().constants(node, target), "beta": float(beta), "linear_beta": linear}

    def combine(self, a: Any, b: Any, constants: Mapping[str, Constant]) -> Any:
        """Return SiTU of gate and up."""
        cap = constants["linear_beta"]
        linear = cap if isinstance(cap, str) else float(cap)
        return situ(a, b, float(constants["beta"]), linear, int(constants["lanes"]))


class ResidualJoin(_Binary):
    """`residual_join`: prefix + delta, or delta alone at a restart; the prefix is not read then."""

    name, op, reference = "residual_join", "residual_join", "residual_join"

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: rows, restart."""
        restart = node.attrs["restart"]
        assert isinstance(restart, int | LayerAttr), f"restart {restart!r} is no integer"
        return (*super().scalars(node), ("restart", restart))

    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        width, lanes, act = int(constants["width"]), int(constants["lanes"]), str(constants["act"])

        @T.prim_func
        def kernel(
            prefix_h: T.handle, delta_h: T.handle, out_h: T.handle, rows: T.int64, restart: T.int64
        ):
            T.func_attr({"tirx.noalias": True})
            prefix = T.decl_buffer((rows, width), storage(act), data=prefix_h)
            delta = T.decl_buffer((rows, width), storage(act), data=delta_h)
            out = T.decl_buffer((rows, width), storage(act), data=out_h)
            for row in T.parallel(rows):
                for d in range(width // lanes):
                    here = T.meta_var(span(d * lanes, lanes))
                    if restart != 0:
                        out[row, here] = delta[row, here]
                    else:
                        total = T.meta_var(
                            widen(prefix[row, here], act, lanes)
                            + widen(delta[row, here], act, lanes)
                        )
                        out[row, here] = narrow(total, act, lanes)

        return kernel


TEMPLATES = (Add(), SigmoidMul(), Situ(), ResidualJoin())
