"""The parts of the MLA attention kernels: search of a row, scores, softmax, values, merge.

Each part takes the constants `c` first and works on the group of heads from `head` on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from k3c.codegen.templates.tvm.vector import exp, hold, horizontal_sum, span, splat, widen

_MAX_BLOCK = 16  # positions; a group's scores stay below TVM's 1024 bytes of stack
# Heads of a task, best first: fours fill the register tile, and more share a loaded cache row.
_GROUPS = (8, 4, 6, 3, 2, 7, 5, 1)
_TILE_HEADS = (4, 3, 2, 1)
STATS = 16  # floats after a part: its maximum and its sum, in a cache line
MAX_SPLITS = 16  # of a long row: what a server's cores can share
# Below every score, and finite: a difference of two is never NaN.
_LOWEST = -3.0e38


def group_size(heads: int) -> int:
    """Return the heads of a task."""
    return next(n for n in _GROUPS if heads % n == 0)


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
        return group_size(self.heads)

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
        return self.latent + STATS


def _horizontal_max(buffer: Any, lanes: int) -> Any:
    """Return the largest of `lanes` (a power of two) elements, as a tree."""
    terms = [buffer[i] for i in range(lanes)]
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [T.max(a, b) for a, b in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


@T.inline
def find(found, seg_start, seg_tokens, context, segments, row) -> None:
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

    Positions from `count` on count as the lowest score, whatever the cache holds there: their
    weights, below 2e-38, vanish in a sum that is at least 1, and no value is read for them.
    """
    for h in range(c.group):
        for j in range(c.block - count):
            scores[h * c.block + count + j] = T.float32(_LOWEST)
        lane = T.alloc_buffer((m,), "float32")
        lane[span(0, m)] = splat(top[h], m)
        for v in T.unroll(c.block // m):
            lane[span(0, m)] = T.max(lane[span(0, m)], scores[span(h * c.block + v * m, m)])
        high = T.meta_var(hold(_horizontal_max(lane, m)))
        fade[h] = exp(top[h] - high, 1)
        top[h] = high
        lane[span(0, m)] = splat(0.0, m)
        for v in T.unroll(c.block // m):
            at = T.meta_var(span(h * c.block + v * m, m))
            scores[at] = exp(scores[at] - splat(high, m), m)
            lane[span(0, m)] += scores[at]
        total[h] = total[h] * fade[h] + horizontal_sum(lane, 0, m)


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
def attend(c, parts, top, total, q, cache, pages, s, row, head, split, first, last, seen) -> None:
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
        where = T.bind(T.Cast("int64", pages[s, at // c.page]))
        line = T.bind(at % c.page)
        count = T.bind(T.min(T.int64(c.block), seen - at))
        _score(c, scores, q, cache, row, head, where, line, c.across(c.block))
        _softmax(c, scores, top, total, fade, count, c.block_lanes)
        _values(
            c, parts, scores, fade, cache, row, head, split, where, line, count,
            c.across(c.latent // c.lanes),
        )  # fmt: skip


@T.inline
def clear(c, out, row, head, heads) -> None:
    """Zero heads of a padding row."""
    for h in range(heads):
        for d in range(c.latent // c.lanes):
            out[row, head + h, span(d * c.lanes, c.lanes)] = splat(0.0, c.lanes)


@T.inline
def merge(c, out, parts, row, head, count) -> None:
    """Merge `count` parts of one head in order, normalised, into out."""
    top = T.alloc_buffer((1,), "float32")
    total = T.alloc_buffer((1,), "float32")
    share = T.alloc_buffer((MAX_SPLITS,), "float32")
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
