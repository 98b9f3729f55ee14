"""route_topk: sigmoid scores, biased choice of k experts, weights of the chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.script import tirx as T

from k3c.codegen.template import first_expert, local_experts, padded, refuse_dtype
from k3c.codegen.templates.tvm.rowwise import RowTemplate, fitting_lanes
from k3c.codegen.templates.tvm.vector import hold, sigmoid, span, splat
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Constant, Scalar
from k3c.targets.target import Target

_F32_BYTES = 4
_GROUP = 32  # experts whose best score is kept, so that a choice need not scan them all
_RENORMALIZE_EPS = 1e-20  # spec 5.3
_LOWEST = -3.0e38  # what a NaN counts as: last in the order, and above `_TAKEN`
_TAKEN = float("-inf")


class RouteTopk(RowTemplate):
    """`route_topk`: logits f32[T, E], bias f32[E] -> weights f32[T, k], experts i32[T, k]."""

    name, op, reference = "route_topk", "route_topk", "route_topk"

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        experts, k = node.operands[0].type.sizes[1], node.results[0].type.sizes[1]
        if not 1 <= k <= experts:
            return Refusal(f"route_topk chooses 1 to {experts} experts", k)
        return refuse_dtype(node, 0, ("f32",)) or refuse_dtype(node, 1, ("f32",))

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the compile-time constants."""
        experts = node.operands[0].type.sizes[1]
        scale = node.attrs["scale"]
        assert isinstance(scale, int | float), f"scale {scale!r} is no number"
        return {
            "experts": experts,
            "k": node.results[0].type.sizes[1],
            "local": local_experts(node, experts),
            "renormalize": int(bool(node.attrs["renormalize"])),
            "scale": float(scale),
            "lanes": fitting_lanes(experts, target),
        }

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: tokens, the first expert of this rank."""
        return *super().scalars(node), first_expert(node)

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of the biased scores of all rows."""
        rows, experts = node.operands[0].type.sizes
        return rows * padded(experts, _GROUP) * _F32_BYTES

    # longer than the budget: a kernel and the steps that it repeats.
    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        experts, k, lanes = (int(constants[name]) for name in ("experts", "k", "lanes"))
        count = int(constants["local"])
        renormalize, scale = bool(constants["renormalize"]), float(constants["scale"])

        groups = padded(experts, _GROUP) // _GROUP
        width = groups * _GROUP

        @T.inline
        def best_of_group(choice, best, row, g):
            best[g] = T.float32(_TAKEN)
            for e in range(_GROUP):
                best[g] = T.max(best[g], choice[row, g * _GROUP + e])

        @T.inline
        def take_best(choice, best, at, row):
            # Strictly above: of equals the lower index stays, in both scans.
            at[0] = 0
            for g in range(groups):
                if best[g] > best[at[0]]:
                    at[0] = g
            at[1] = at[0] * _GROUP
            for e in range(_GROUP):
                if choice[row, at[0] * _GROUP + e] > choice[row, at[1]]:
                    at[1] = at[0] * _GROUP + e
            choice[row, at[1]] = T.float32(_TAKEN)
            best_of_group(choice, best, row, at[0])

        @T.prim_func
        def kernel(
            logits_h: T.handle,
            bias_h: T.handle,
            weights_h: T.handle,
            chosen_h: T.handle,
            choice_h: T.handle,
            rows: T.int64,
            first: T.int64,
        ):
            T.func_attr({"tirx.noalias": True})
            logits = T.decl_buffer((rows, experts), "float32", data=logits_h)
            bias = T.decl_buffer((experts,), "float32", data=bias_h)
            weights = T.decl_buffer((rows, k), "float32", data=weights_h)
            chosen = T.decl_buffer((rows, k), "int32", data=chosen_h)
            choice = T.decl_buffer((rows, width), "float32", data=choice_h)
            for row in T.parallel(rows):
                best = T.alloc_buffer((groups,), "float32")
                at = T.alloc_buffer((2,), "int32")
                total = T.alloc_buffer((1,), "float32")
                for e in range(experts // lanes):
                    here = T.meta_var(span(e * lanes, lanes))
                    biased = T.meta_var(hold(sigmoid(logits[row, here], lanes) + bias[here]))
                    lowest = T.meta_var(splat(_LOWEST, lanes))
                    choice[row, here] = T.Select(biased > lowest, biased, lowest)
                for e in range(width - experts):
                    choice[row, experts + e] = T.float32(_TAKEN)
                for g in range(groups):
                    best_of_group(choice, best, row, g)
                total[0] = T.float32(0)
                for j in range(k):
                    take_best(choice, best, at, row)
                    chosen[row, j] = at[1]
                    weights[row, j] = sigmoid(logits[row, at[1]], 1)
                    total[0] += weights[row, j]
                for j in range(k):
                    if renormalize:
                        weights[row, j] = weights[row, j] / (total[0] + T.float32(_RENORMALIZE_EPS))
                    weights[row, j] = weights[row, j] * T.float32(scale)
                    local = T.meta_var(hold(T.Cast("int64", chosen[row, j]) - first))
                    if local < T.int64(0) or local >= T.int64(count):
                        weights[row, j] = T.float32(0)

        return kernel


TEMPLATES = (RouteTopk(),)
