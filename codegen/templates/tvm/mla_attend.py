"""mla_attend: causal attention in the latent space over the paged cache.

A task is one row and a group of its heads, so that a cache row that is loaded serves the group. It
walks the cache in blocks of positions: scores, then one step of the online softmax, then values;
the output is rescaled once a block. Decode has few rows: there the context is split over tasks as
well, and a second loop merges the parts. How a row is split depends on its position and its heads
only, so that a request's result does not depend on the bucket it is decoded in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from k3c.codegen.template import refuse_dtype
from k3c.codegen.templates.tvm.rowwise import RowTemplate
from k3c.codegen.templates.tvm.vector import (
    exp,
    hold,
    horizontal_sum,
    span,
    splat,
    storage,
    widen,
)
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Constant, Cost, Scalar
from k3c.targets.target import Target

_CACHE, _PAGE_TABLE = 1, 5
_INTEGERS = (2, 3, 4, 5)
_F32_BYTES = 4
_MAX_BLOCK = 16  # positions; a group's scores stay below TVM's 1024 bytes of stack
# Heads of a task, best first: fours fill the register tile, and more share a loaded cache row.
_GROUPS = (8, 4, 6, 3, 2, 7, 5, 1)
_TILE_HEADS = (4, 3, 2, 1)
_TASKS = 16  # of one long row: what a server's cores can share
_MIN_SPLIT_BLOCKS = 4  # shorter parts cost more to merge than they save
_STATS = 16  # floats after a part: its maximum and its sum, in a cache line
# Below every score, and finite: a difference of two is never NaN.
_LOWEST = -3.0e38


@dataclass(frozen=True)
class AttendShape:
    """Compile-time constants of the kernels.

    Attributes:
        heads: n.
        latent: r.
        width: r + dr.
        page: Positions of a page.
        act: Dtype of the cache.
        scale: Factor of the scores.
        lanes: f32 elements of a vector; divides `latent` and `width`.
    """

    heads: int
    latent: int
    width: int
    page: int
    act: str
    scale: float
    lanes: int

    @property
    def group(self) -> int:
        """Heads of a task."""
        return _group(self.heads)

    @property
    def block(self) -> int:
        """Positions of a softmax step; divides the page."""
        return next(n for n in range(_MAX_BLOCK, 0, -1) if self.page % n == 0)

    @property
    def block_lanes(self) -> int:
        """Vector of scores; divides the block."""
        return self.lanes if self.block % self.lanes == 0 else 1

    @property
    def tile_heads(self) -> int:
        """Heads of a register tile; divides the group."""
        return next(n for n in _TILE_HEADS if self.group % n == 0)

    def across(self, count: int) -> int:
        """Return the other side of a register tile: a divisor of `count`, 8 to 12 in all."""
        return next(n for n in (4, 2, 1) if n * self.tile_heads <= 12 and count % n == 0)

    @property
    def part(self) -> int:
        """Floats of one part of a head's output, with its maximum and sum."""
        return self.latent + _STATS


@T.inline
def _find(found, seg_start, seg_tokens, context, segments, row):
    """Set found to the segment that owns a row (or -1), and the row's position."""
    found[0] = T.int64(-1)
    for s in range(segments):
        i = T.bind(row - T.Cast("int64", seg_start[s]))
        if i >= T.int64(0) and i < T.Cast("int64", seg_tokens[s]):
            found[0] = s
            found[1] = T.Cast("int64", context[s]) + i


@T.inline
def _score(c, scores, q, cache, row, head, where, line, tile):
    """scores[head, j] = scale * q[row, head] . cache[where, line + j] for a block of j."""
    for jt in range(c.block // tile):
        for ht in range(c.group // c.tile_heads):
            acc = T.alloc_buffer((tile * c.tile_heads * c.lanes,), "float32")
            for i in T.unroll(tile * c.tile_heads):
                acc[span(i * c.lanes, c.lanes)] = splat(0.0, c.lanes)
            for d in range(c.width // c.lanes):
                for j in T.unroll(tile):
                    key = T.meta_var(
                        hold(
                            widen(
                                cache[where, line + jt * tile + j, span(d * c.lanes, c.lanes)],
                                c.act,
                                c.lanes,
                            )
                        )
                    )
                    for h in T.unroll(c.tile_heads):
                        acc[span((j * c.tile_heads + h) * c.lanes, c.lanes)] += (
                            q[row, head + ht * c.tile_heads + h, span(d * c.lanes, c.lanes)] * key
                        )
            for h in T.unroll(c.tile_heads):
                for j in T.unroll(tile):
                    scores[(ht * c.tile_heads + h) * c.block + jt * tile + j] = T.float32(
                        c.scale
                    ) * horizontal_sum(acc, (j * c.tile_heads + h) * c.lanes, c.lanes)


@T.inline
def _softmax(c, scores, top, total, fade, count, m):
    """One online step a head: scores become weights, `fade` rescales what came before.

    Positions from `count` on get weight 0, whatever the cache holds there.
    """
    for h in range(c.group):
        high = T.alloc_buffer((1,), "float32")
        high[0] = top[h]
        for j in range(count):
            high[0] = T.Select(scores[h * c.block + j] > high[0], scores[h * c.block + j], high[0])
        fade[h] = exp(top[h] - high[0], 1)
        top[h] = high[0]
        for v in range(c.block // m):
            at = T.meta_var(span(h * c.block + v * m, m))
            scores[at] = exp(scores[at] - splat(high[0], m), m)
        total[h] = total[h] * fade[h]
        for j in range(count):
            total[h] += scores[h * c.block + j]


@T.inline
def _values(c, parts, scores, fade, cache, row, head, split, where, line, count, tile):
    """parts[head] = fade[head] * parts[head] + weights . cache rows, for `count` positions."""
    for dt in range(c.latent // (tile * c.lanes)):
        for ht in range(c.group // c.tile_heads):
            acc = T.alloc_buffer((tile * c.tile_heads * c.lanes,), "float32")
            for h in T.unroll(c.tile_heads):
                for d in T.unroll(tile):
                    acc[span((h * tile + d) * c.lanes, c.lanes)] = parts[
                        row,
                        head + ht * c.tile_heads + h,
                        split,
                        span((dt * tile + d) * c.lanes, c.lanes),
                    ] * splat(fade[ht * c.tile_heads + h], c.lanes)
            for j in range(count):
                for d in T.unroll(tile):
                    value = T.meta_var(
                        hold(
                            widen(
                                cache[where, line + j, span((dt * tile + d) * c.lanes, c.lanes)],
                                c.act,
                                c.lanes,
                            )
                        )
                    )
                    for h in T.unroll(c.tile_heads):
                        acc[span((h * tile + d) * c.lanes, c.lanes)] += (
                            splat(scores[(ht * c.tile_heads + h) * c.block + j], c.lanes) * value
                        )
            for h in T.unroll(c.tile_heads):
                for d in T.unroll(tile):
                    parts[
                        row,
                        head + ht * c.tile_heads + h,
                        split,
                        span((dt * tile + d) * c.lanes, c.lanes),
                    ] = acc[span((h * tile + d) * c.lanes, c.lanes)]


@T.inline
def _attend(c, parts, top, total, q, cache, page_table, s, row, head, split, first, last, seen):
    """A group's unnormalised output over blocks first .. last - 1 of `seen` positions."""
    scores = T.alloc_buffer((c.group * c.block,), "float32")
    fade = T.alloc_buffer((c.group,), "float32")
    for h in range(c.group):
        top[h] = T.float32(_LOWEST)
        total[h] = T.float32(0)
        for d in range(c.latent // c.lanes):
            parts[row, head + h, split, span(d * c.lanes, c.lanes)] = splat(0.0, c.lanes)
    for b in range(last - first):
        at = T.bind((first + b) * c.block)
        where = T.bind(T.Cast("int64", page_table[s, at // c.page]))
        line = T.bind(at % c.page)
        count = T.bind(T.min(T.int64(c.block), seen - at))
        _score(c, scores, q, cache, row, head, where, line, c.across(c.block))
        _softmax(c, scores, top, total, fade, count, c.block_lanes)
        _values(
            c, parts, scores, fade, cache, row, head, split, where, line, count,
            c.across(c.latent // c.lanes),
        )  # fmt: skip


@T.inline
def _clear(c, out, row, head, heads):
    """Zero heads of a padding row."""
    for h in range(heads):
        for d in range(c.latent // c.lanes):
            out[row, head + h, span(d * c.lanes, c.lanes)] = splat(0.0, c.lanes)


@T.inline
def _merge(c, out, parts, row, head, count):
    """Merge `count` parts of one head in order, normalised, into out."""
    top = T.alloc_buffer((1,), "float32")
    total = T.alloc_buffer((1,), "float32")
    share = T.alloc_buffer((_TASKS,), "float32")
    top[0] = T.float32(_LOWEST)
    total[0] = T.float32(0)
    for k in range(count):
        top[0] = T.max(top[0], parts[row, head, k, c.latent])
    for k in range(count):
        share[k] = exp(parts[row, head, k, c.latent] - top[0], 1)
        total[0] += share[k] * parts[row, head, k, c.latent + 1]
    for k in range(count):
        share[k] = share[k] / total[0]
    for d in range(c.latent // c.lanes):
        acc = T.alloc_buffer((c.lanes,), "float32")
        acc[span(0, c.lanes)] = splat(0.0, c.lanes)
        for k in range(count):
            acc[span(0, c.lanes)] += (
                splat(share[k], c.lanes) * parts[row, head, k, span(d * c.lanes, c.lanes)]
            )
        out[row, head, span(d * c.lanes, c.lanes)] = acc[span(0, c.lanes)]


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
                _find(found, seg_start, seg_tokens, context, segments, row)
                if found[0] < T.int64(0):
                    _clear(c, out, row, head, c.group)
                else:
                    blocks = T.bind(found[1] // c.block + 1)
                    _attend(
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
            return Refusal(f"heads must be fewer than fill {_TASKS} tasks", heads)
        return super().accepts(node, target)

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the fields of `AttendShape`, and the parts of a long context."""
        return {**super().constants(node, target), "splits": _splits(node)}

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of the parts of all rows and heads."""
        rows, heads, latent = node.results[0].type.sizes
        return rows * heads * _splits(node) * (latent + _STATS) * _F32_BYTES

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
                _find(found, seg_start, seg_tokens, context, segments, row)
                if found[0] >= T.int64(0):
                    blocks = T.bind(found[1] // c.block + 1)
                    share = T.bind(_share(blocks, splits))
                    first = T.bind(split * share)
                    if first < blocks:
                        _attend(
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
                _find(found, seg_start, seg_tokens, context, segments, row)
                if found[0] < T.int64(0):
                    _clear(c, out, row, head, 1)
                else:
                    blocks = T.bind(found[1] // c.block + 1)
                    share = T.bind(_share(blocks, splits))
                    _merge(c, out, parts, row, head, (blocks + share - 1) // share)

        return kernel


def _group(heads: int) -> int:
    """Return the heads of a task."""
    return next(n for n in _GROUPS if heads % n == 0)


def _splits(node: Node) -> int:
    """Return into how many parts a long context is split: enough to share one row."""
    heads = node.operands[0].type.sizes[1]
    return -(-_TASKS // (heads // _group(heads)))


def _share(blocks: Any, splits: int) -> Any:
    """Return the blocks of a part."""
    return T.max(T.int64(_MIN_SPLIT_BLOCKS), (blocks + splits - 1) // splits)


TEMPLATES = (MlaAttendDecode(), MlaAttend())
