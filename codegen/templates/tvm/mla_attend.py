"""mla_attend: causal attention in the latent space over the paged cache.

A task is one row and a group of its heads, so that a cache row that is loaded serves the group. It
walks the cache in blocks of positions: scores, then one step of the online softmax, then values;
the output is rescaled once a block. Decode has few rows: there the context is split over tasks as
well, and a second loop merges the parts. How a row is split depends on its position and its heads
only, so that a request's result does not depend on the bucket it is decoded in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.script import tirx as T

from k3c.codegen.template import refuse_dtype
from k3c.codegen.templates.tvm.mla_attend_parts import (
    MAX_SPLITS,
    STATS,
    AttendShape,
    attend,
    clear,
    find,
    group_size,
    merge,
)
from k3c.codegen.templates.tvm.rowwise import RowTemplate
from k3c.codegen.templates.tvm.vector import span, splat, storage
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Constant, Cost, Scalar
from k3c.targets.target import Target

_CACHE, _PAGE_TABLE = 1, 5
_INTEGERS = (2, 3, 4, 5)
_F32_BYTES = 4
_MIN_SPLIT_BLOCKS = 4  # shorter parts cost more to merge than they save


class MlaAttend(RowTemplate):
    """`mla_attend` for any bucket: a task walks the whole context of its row."""

    name = "mla_attend"
    op = "mla_attend"
    reference = "mla_attend"

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        for index in _INTEGERS:
            if refusal := refuse_dtype(node, index, ("i32",)):
                return refusal
        width, cached = node.operands[0].type.sizes[2], node.operands[_CACHE].type.sizes[2]
        if width != cached:
            return Refusal(f"cache rows must be {width} wide", cached)
        return refuse_dtype(node, 0, ("f32",)) or refuse_dtype(node, _CACHE, ("f32", "bf16"))

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the fields of `AttendShape`."""
        scale, latent = node.attrs["scale"], node.results[0].type.sizes[2]
        assert isinstance(scale, int | float), f"scale {scale!r} is no number"
        _, heads, width = node.operands[0].type.sizes
        lanes = (n for n in (target.lanes, 8) if width % n == 0 and latent % n == 0)
        return {
            "heads": heads,
            "latent": latent,
            "width": width,
            "page": node.operands[_CACHE].type.sizes[1],
            "act": node.operands[_CACHE].type.dtype.name,
            "scale": float(scale),
            "lanes": next(lanes, 1),
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
        """Return the cost when every request's context is as long as its table allows.

        A request's cache is read once; each row and head has a dot product and a sum a position.
        """
        segments, table = node.operands[_PAGE_TABLE].type.sizes
        rows, heads, width = node.operands[0].type.sizes
        cache, latent = node.operands[_CACHE].type, node.results[0].type.sizes[2]
        positions = table * cache.sizes[1]
        row_bytes = cache.nbytes // (cache.sizes[0] * cache.sizes[1])
        read = sum(v.type.nbytes for i, v in enumerate(node.operands) if i != _CACHE)
        read += segments * positions * row_bytes
        flops = 2 * rows * heads * positions * (width + latent)
        return Cost(read, node.results[0].type.nbytes, flops)

    # longer than the budget: one kernel, mostly the declaration of its buffers.
    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        c = AttendShape(**constants)  # type: ignore[arg-type]
        groups = c.heads // c.group

        @T.prim_func
        def kernel(
            q_h: T.handle,
            cache_h: T.handle,
            seg_start_h: T.handle,
            seg_tokens_h: T.handle,
            context_h: T.handle,
            page_table_h: T.handle,
            out_h: T.handle,
            rows: T.int64,
            segments: T.int64,
            pages: T.int64,
            table: T.int64,
        ):
            T.func_attr({"tirx.noalias": True})
            q = T.decl_buffer((rows, c.heads, c.width), "float32", data=q_h)
            cache = T.decl_buffer((pages, c.page, c.width), storage(c.act), data=cache_h)
            seg_start = T.decl_buffer((segments,), "int32", data=seg_start_h)
            seg_tokens = T.decl_buffer((segments,), "int32", data=seg_tokens_h)
            context = T.decl_buffer((segments,), "int32", data=context_h)
            page_table = T.decl_buffer((segments, table), "int32", data=page_table_h)
            out = T.decl_buffer((rows, c.heads, c.latent), "float32", data=out_h)
            parts = T.decl_buffer((rows, c.heads, 1, c.latent), "float32", data=out_h)
            for task in T.parallel(rows * groups):
                found = T.alloc_buffer((2,), "int64")
                top = T.alloc_buffer((c.group,), "float32")
                total = T.alloc_buffer((c.group,), "float32")
                # From both ends in turn: late rows see more, and a thread takes neighbours.
                turn = T.bind(task // groups)
                row = T.bind(T.if_then_else(turn % 2 == 0, turn // 2, rows - 1 - turn // 2))
                head = T.bind(task % groups * c.group)
                find(found, seg_start, seg_tokens, context, segments, row)
                if found[0] < T.int64(0):
                    clear(c, out, row, head, c.group)
                else:
                    blocks = T.bind(found[1] // c.block + 1)
                    attend(
                        c, parts, top, total, q, cache, page_table, found[0], row, head,
                        0, T.int64(0), blocks, found[1] + 1,
                    )  # fmt: skip
                    for h in range(c.group):
                        for d in range(c.latent // c.lanes):
                            at = T.meta_var(span(d * c.lanes, c.lanes))
                            out[row, head + h, at] = out[row, head + h, at] * splat(
                                T.float32(1) / total[h], c.lanes
                            )

        return kernel


class MlaAttendDecode(MlaAttend):
    """`mla_attend` for buckets with one row a segment: the context is split over tasks."""

    name = "mla_attend_decode"

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        rows, segments = node.operands[0].type.sizes[0], node.operands[_PAGE_TABLE].type.sizes[0]
        if rows != segments:
            return Refusal(f"rows must be the {segments} segments", rows)
        if _splits(node) == 1:
            heads = node.operands[0].type.sizes[1]
            return Refusal(f"heads must be fewer than fill {MAX_SPLITS} tasks", heads)
        return super().accepts(node, target)

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the fields of `AttendShape`, and the parts of a long context."""
        return {**super().constants(node, target), "splits": _splits(node)}

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of the parts of all rows and heads."""
        rows, heads, latent = node.results[0].type.sizes
        return rows * heads * _splits(node) * (latent + STATS) * _F32_BYTES

    # longer than the budget: one kernel, mostly the declaration of its buffers.
    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        splits = int(constants["splits"])
        shape = {k: v for k, v in constants.items() if k != "splits"}
        c = AttendShape(**shape)  # type: ignore[arg-type]
        groups = c.heads // c.group

        @T.prim_func
        def kernel(
            q_h: T.handle,
            cache_h: T.handle,
            seg_start_h: T.handle,
            seg_tokens_h: T.handle,
            context_h: T.handle,
            page_table_h: T.handle,
            out_h: T.handle,
            parts_h: T.handle,
            rows: T.int64,
            segments: T.int64,
            pages: T.int64,
            table: T.int64,
        ):
            T.func_attr({"tirx.noalias": True})
            q = T.decl_buffer((rows, c.heads, c.width), "float32", data=q_h)
            cache = T.decl_buffer((pages, c.page, c.width), storage(c.act), data=cache_h)
            seg_start = T.decl_buffer((segments,), "int32", data=seg_start_h)
            seg_tokens = T.decl_buffer((segments,), "int32", data=seg_tokens_h)
            context = T.decl_buffer((segments,), "int32", data=context_h)
            page_table = T.decl_buffer((segments, table), "int32", data=page_table_h)
            out = T.decl_buffer((rows, c.heads, c.latent), "float32", data=out_h)
            parts = T.decl_buffer((rows, c.heads, splits, c.part), "float32", data=parts_h)
            for task in T.parallel(rows * groups * splits):
                found = T.alloc_buffer((2,), "int64")
                top = T.alloc_buffer((c.group,), "float32")
                total = T.alloc_buffer((c.group,), "float32")
                split = T.bind(task % splits)
                row = T.bind(task // splits // groups)
                head = T.bind(task // splits % groups * c.group)
                find(found, seg_start, seg_tokens, context, segments, row)
                if found[0] >= T.int64(0):
                    blocks = T.bind(found[1] // c.block + 1)
                    share = T.bind(_share(blocks, splits))
                    first = T.bind(split * share)
                    if first < blocks:
                        attend(
                            c, parts, top, total, q, cache, page_table, found[0], row, head,
                            split, first, T.min(blocks, first + share), found[1] + 1,
                        )  # fmt: skip
                        for h in range(c.group):
                            parts[row, head + h, split, c.latent] = top[h]
                            parts[row, head + h, split, c.latent + 1] = total[h]
            for task in T.parallel(rows * c.heads):
                found = T.alloc_buffer((2,), "int64")
                row = T.bind(task // c.heads)
                head = T.bind(task % c.heads)
                find(found, seg_start, seg_tokens, context, segments, row)
                if found[0] < T.int64(0):
                    clear(c, out, row, head, 1)
                else:
                    blocks = T.bind(found[1] // c.block + 1)
                    share = T.bind(_share(blocks, splits))
                    merge(c, out, parts, row, head, (blocks + share - 1) // share)

        return kernel


def _splits(node: Node) -> int:
    """Return into how many parts a long context is split: enough to share one row."""
    heads = node.operands[0].type.sizes[1]
    return -(-MAX_SPLITS // (heads // group_size(heads)))


def _share(blocks: Any, splits: int) -> Any:
    """Return the blocks of a part."""
    return T.max(T.int64(_MIN_SPLIT_BLOCKS), (blocks + splits - 1) // splits)


TEMPLATES = (MlaAttendDecode(), MlaAttend())
