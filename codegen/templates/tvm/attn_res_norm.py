"""attn_res_norm: join, mixture over the committed blocks, norm and commit of one site.

A task is a token row. It reads the visible bank rows twice: for the scores, and, from cache, for
the mixture. The mixture is rounded into `y` and read back for the norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.script import tirx as T

from k3c.codegen.template import refuse_dtype
from k3c.codegen.templates.tvm.rowwise import RowTemplate, fitting_lanes
from k3c.codegen.templates.tvm.vector import (
    exp,
    hold,
    horizontal_sum,
    narrow,
    rounded,
    span,
    splat,
    storage,
    widen,
)
from k3c.ir.graph import LayerAttr, Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Constant, Cost, Scalar
from k3c.targets.target import Target

_BANK = 2
_NORMS = (3, 4, 5)
_LAYER_SCALARS = ("rows", "restart", "commit_row")
# Sums in flight: an addition takes four cycles, and two can start in each.
_CHAINS = 4
# A dot product and a square for the score, a multiplication and an addition for the mixture.
_FLOPS_PER_SOURCE_ELEMENT = 6


class AttnResNorm(RowTemplate):
    """`attn_res_norm`; prefix and bank are updated in place."""

    name, op, reference = "attn_res_norm", "attn_res_norm", "attn_res_norm"

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        for index in _NORMS:
            if refusal := refuse_dtype(node, index, ("f32",)):
                return refusal
        acts = {node.operands[i].type.dtype.name for i in range(_BANK + 1)}
        if len(acts) > 1:
            return Refusal("prefix, delta and bank must have one dtype", ", ".join(sorted(acts)))
        return refuse_dtype(node, 0, ("f32", "bf16"))

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the compile-time constants."""
        blocks, _, width = node.operands[_BANK].type.sizes
        return {
            "blocks": blocks,
            "width": width,
            "act": node.operands[0].type.dtype.name,
            "lanes": fitting_lanes(width, target),
            "res_eps": _number(node, "res_eps"),
            "eps": _number(node, "eps"),
        }

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: token rows, then bank rows, restart and commit row."""
        given = [(name, node.attrs[name]) for name in _LAYER_SCALARS]
        tokens: Scalar = ("tokens", node.operands[0].type.sizes[0])
        layer: list[Scalar] = []
        for name, value in given:
            assert isinstance(value, int | LayerAttr), f"{name} of attn_res_norm is {value!r}"
            layer.append((name, value))
        return (tokens, *layer)

    def cost(self, node: Node, target: Target) -> Cost:
        """Return the cost when every bank row is visible and one is committed."""
        prefix, bank = node.operands[0].type, node.operands[_BANK].type
        norms = sum(node.operands[i].type.nbytes for i in _NORMS)
        flops = _FLOPS_PER_SOURCE_ELEMENT * (bank.elements + prefix.elements)
        return Cost(2 * prefix.nbytes + bank.nbytes + norms, 3 * prefix.nbytes, flops)

    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        return _kernel(constants)


def _number(node: Node, name: str) -> float:
    value = node.attrs[name]
    assert isinstance(value, int | float), f"{name} {value!r} is no number"
    return float(value)


# longer than the budget: one kernel, whose steps share the buffers of a row.
def _kernel(constants: Mapping[str, Constant]) -> Any:
    blocks, width, n = (int(constants[name]) for name in ("blocks", "width", "lanes"))
    act, res_eps, eps = str(constants["act"]), constants["res_eps"], constants["eps"]
    chains = next(c for c in (_CHAINS, 2, 1) if width % (c * n) == 0)
    sums = chains * n

    @T.inline
    def clear(dots, squares):
        for u in T.unroll(chains):
            dots[span(u * n, n)] = splat(0.0, n)
            squares[span(u * n, n)] = splat(0.0, n)

    @T.inline
    def add_to_score(dots, squares, u, value, weight):
        dots[span(u * n, n)] += value * weight
        squares[span(u * n, n)] += value * value

    @T.inline
    def finish_score(scores, j, dots, squares):
        for u in T.unroll(chains - 1):
            dots[span(0, n)] += dots[span((u + 1) * n, n)]
            squares[span(0, n)] += squares[span((u + 1) * n, n)]
        mean = T.meta_var(hold(horizontal_sum(squares, 0, n) / T.float32(width)))
        scores[j] = horizontal_sum(dots, 0, n) / T.sqrt(mean + T.float32(res_eps))

    @T.inline
    def softmax(scores, count):
        top = T.alloc_buffer((1,), "float32")
        total = T.alloc_buffer((1,), "float32")
        top[0] = scores[0]
        for j in range(count):
            top[0] = T.max(top[0], scores[j])
        total[0] = T.float32(0)
        for j in range(count):
            scores[j] = exp(scores[j] - top[0], 1)
            total[0] += scores[j]
        for j in range(count):
            scores[j] = scores[j] / total[0]

    # longer than the budget: its steps run one after the other on the row in cache.
    @T.prim_func
    def kernel(
        prefix_h: T.handle,
        delta_h: T.handle,
        bank_h: T.handle,
        res_norm_h: T.handle,
        res_proj_h: T.handle,
        norm_h: T.handle,
        y_h: T.handle,
        tokens: T.int64,
        visible: T.int64,
        restart: T.int64,
        commit_row: T.int64,
    ):
        T.func_attr({"tirx.noalias": True})
        prefix = T.decl_buffer((tokens, width), storage(act), data=prefix_h)
        delta = T.decl_buffer((tokens, width), storage(act), data=delta_h)
        bank = T.decl_buffer((T.int64(blocks), tokens, width), storage(act), data=bank_h)
        res_norm = T.decl_buffer((width,), "float32", data=res_norm_h)
        res_proj = T.decl_buffer((width,), "float32", data=res_proj_h)
        norm = T.decl_buffer((width,), "float32", data=norm_h)
        y = T.decl_buffer((tokens, width), storage(act), data=y_h)
        for row in T.parallel(tokens):
            dots = T.alloc_buffer((sums,), "float32")
            squares = T.alloc_buffer((sums,), "float32")
            scores = T.alloc_buffer((blocks + 1,), "float32")
            mix = T.alloc_buffer((sums,), "float32")
            if restart == 0:
                for d in range(width // n):
                    at = T.meta_var(span(d * n, n))
                    joined = T.meta_var(
                        widen(prefix[row, at], act, n) + widen(delta[row, at], act, n)
                    )
                    prefix[row, at] = narrow(joined, act, n)
            else:
                for d in range(width // n):
                    prefix[row, span(d * n, n)] = delta[row, span(d * n, n)]
            for j in range(visible):
                clear(dots, squares)
                for d in range(width // sums):
                    for u in T.unroll(chains):
                        at = T.meta_var(span(d * sums + u * n, n))
                        weight = T.meta_var(hold(res_norm[at] * res_proj[at]))
                        value = T.meta_var(hold(widen(bank[j, row, at], act, n)))
                        add_to_score(dots, squares, u, value, weight)
                finish_score(scores, j, dots, squares)
            clear(dots, squares)
            for d in range(width // sums):
                for u in T.unroll(chains):
                    at = T.meta_var(span(d * sums + u * n, n))
                    weight = T.meta_var(hold(res_norm[at] * res_proj[at]))
                    value = T.meta_var(hold(widen(prefix[row, at], act, n)))
                    add_to_score(dots, squares, u, value, weight)
            finish_score(scores, visible, dots, squares)
            softmax(scores, visible + 1)
            clear(dots, squares)
            for d in range(width // sums):
                for u in T.unroll(chains):
                    mix[span(u * n, n)] = splat(0.0, n)
                for j in range(visible):
                    for u in T.unroll(chains):
                        value = T.meta_var(widen(bank[j, row, span(d * sums + u * n, n)], act, n))
                        mix[span(u * n, n)] += value * splat(scores[j], n)
                for u in T.unroll(chains):
                    at = T.meta_var(span(d * sums + u * n, n))
                    value = T.meta_var(widen(prefix[row, at], act, n))
                    mix[span(u * n, n)] += value * splat(scores[visible], n)
                    mixed = T.meta_var(hold(rounded(mix[span(u * n, n)], act, n)))
                    squares[span(u * n, n)] += mixed * mixed
                    y[row, at] = narrow(mixed, act, n)
            for u in T.unroll(chains - 1):
                squares[span(0, n)] += squares[span((u + 1) * n, n)]
            mean = T.meta_var(hold(horizontal_sum(squares, 0, n) / T.float32(width)))
            scale = T.meta_var(hold(T.float32(1) / T.sqrt(mean + T.float32(eps))))
            for d in range(width // n):
                at = T.meta_var(span(d * n, n))
                normed = T.meta_var(widen(y[row, at], act, n) * splat(scale, n) * norm[at])
                y[row, at] = narrow(normed, act, n)
            if commit_row >= 0:
                for d in range(width // n):
                    bank[commit_row, row, span(d * n, n)] = prefix[row, span(d * n, n)]

    return kernel


TEMPLATES = (AttnResNorm(),)
