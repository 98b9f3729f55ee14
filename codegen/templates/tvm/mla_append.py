"""mla_append: write this step's rows to the paged cache, the latent part normalised."""

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
from k3c.targets.catalogue import Constant, Cost, Scalar
from k3c.targets.target import Target

_CACHE = 2
_INTEGERS = (3, 4, 5, 6)
_PAGE_TABLE = 6
# A square and its addition, then two multiplications.
_FLOPS_PER_ELEMENT = 4


class MlaAppend(RowTemplate):
    """`mla_append`; the cache is updated in place. A task is a segment."""

    name, op, reference = "mla_append", "mla_append", "mla_append"

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        for index in _INTEGERS:
            if refusal := refuse_dtype(node, index, ("i32",)):
                return refusal
        row, cache = node.operands[0].type, node.operands[_CACHE].type
        if row.dtype != cache.dtype:
            both = f"{row.dtype.name} and {cache.dtype.name}"
            return Refusal("rows and cache must have one dtype", both)
        if row.sizes[1] != cache.sizes[2]:
            return Refusal(f"cache rows must be {row.sizes[1]} wide", cache.sizes[2])
        return refuse_dtype(node, 0, ("f32", "bf16")) or refuse_dtype(node, 1, ("f32",))

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the compile-time constants."""
        cache, latent = node.operands[_CACHE].type, node.operands[1].type.sizes[0]
        eps = node.attrs["eps"]
        assert isinstance(eps, int | float), f"eps {eps!r} is no number"
        return {
            "latent": latent,
            "width": cache.sizes[2],
            "page": cache.sizes[1],
            "act": cache.dtype.name,
            "lanes": fitting_lanes(latent, target),
            "eps": float(eps),
        }

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: rows, segments, pages, pages of a table row."""
        segments, table = node.operands[_PAGE_TABLE].type.sizes
        return (
            ("rows", node.operands[0].type.sizes[0]),
            ("segments", segments),
            ("pages", node.operands[_CACHE].type.sizes[0]),
            ("table", table),
        )

    def cost(self, node: Node, target: Target) -> Cost:
        """Return the bytes of the rows, not of the cache."""
        rows = node.operands[0].type
        read = sum(v.type.nbytes for i, v in enumerate(node.operands) if i != _CACHE)
        return Cost(read, rows.nbytes, _FLOPS_PER_ELEMENT * rows.elements)

    # longer than the budget: one kernel, mostly the declaration of its buffers.
    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        latent, width, page = (int(constants[k]) for k in ("latent", "width", "page"))
        act, eps, n = str(constants["act"]), float(constants["eps"]), int(constants["lanes"])

        @T.prim_func
        def kernel(
            kv_h: T.handle,
            norm_h: T.handle,
            cache_h: T.handle,
            seg_start_h: T.handle,
            seg_tokens_h: T.handle,
            context_h: T.handle,
            page_table_h: T.handle,
            rows: T.int64,
            segments: T.int64,
            pages: T.int64,
            table: T.int64,
        ):
            T.func_attr({"tirx.noalias": True})
            kv = T.decl_buffer((rows, width), storage(act), data=kv_h)
            norm = T.decl_buffer((latent,), "float32", data=norm_h)
            cache = T.decl_buffer((pages, page, width), storage(act), data=cache_h)
            seg_start = T.decl_buffer((segments,), "int32", data=seg_start_h)
            seg_tokens = T.decl_buffer((segments,), "int32", data=seg_tokens_h)
            context = T.decl_buffer((segments,), "int32", data=context_h)
            page_table = T.decl_buffer((segments, table), "int32", data=page_table_h)
            for s in T.parallel(segments):
                squares = T.alloc_buffer((n,), "float32")
                for t in range(seg_tokens[s]):
                    row = T.bind(T.Cast("int64", seg_start[s]) + T.Cast("int64", t))
                    position = T.bind(context[s] + t)
                    where = T.bind(T.Cast("int64", page_table[s, position // page]))
                    line = T.bind(position % page)
                    squares[span(0, n)] = splat(0.0, n)
                    for d in range(latent // n):
                        value = T.meta_var(hold(widen(kv[row, span(d * n, n)], act, n)))
                        squares[span(0, n)] += value * value
                    mean = T.meta_var(hold(horizontal_sum(squares, 0, n) / T.float32(latent)))
                    scale = T.meta_var(hold(T.float32(1) / T.sqrt(mean + T.float32(eps))))
                    for d in range(latent // n):
                        at = T.meta_var(span(d * n, n))
                        normed = T.meta_var(widen(kv[row, at], act, n) * splat(scale, n) * norm[at])
                        cache[where, line, at] = narrow(normed, act, n)
                    for d in range(width - latent):
                        cache[where, line, latent + d] = kv[row, latent + d]

        return kernel


TEMPLATES = (MlaAppend(),)
