"""Which segment owns a row: device functions for kernels that take a row a program."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def owner_of(row, seg_start, seg_tokens, context, segments, SEGMENTS: tl.constexpr):
    """Return a row's segment, or -1, its index in the segment, and the segment's context.

    All segments are looked at side by side, so that no load waits for another.

    Args:
        row: The row.
        seg_start: i32[B].
        seg_tokens: i32[B].
        context: i32[B].
        segments: B.
        SEGMENTS: B padded to a power of two.
    """
    s = tl.arange(0, SEGMENTS)
    start = tl.load(seg_start + s, mask=s < segments, other=0)
    tokens = tl.load(seg_tokens + s, mask=s < segments, other=0)
    past = tl.load(context + s, mask=s < segments, other=0)
    mine = (row >= start) & (row < start + tokens)
    return (
        tl.max(tl.where(mine, s, -1), 0),
        tl.max(tl.where(mine, row - start, -1), 0),
        tl.max(tl.where(mine, past, -1), 0),
    )
