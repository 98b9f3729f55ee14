"""Device functions on pairs: neighbouring columns in one integer, 32 bits for bf16, 64 for f32.

Rows that are read once and used twice stay in registers as they were loaded; a bf16 value that
waits as f32 would take twice the room.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pair_pointer(pointer):
    """Return a pointer to bf16 or f32 as a pointer to pairs."""
    if pointer.dtype.element_ty == tl.bfloat16:
        return pointer.to(tl.pointer_type(tl.int32))
    else:
        return pointer.to(tl.pointer_type(tl.int64))


@triton.jit
def first_of(pairs):
    """Return the first value of each pair as f32."""
    if pairs.dtype == tl.int32:
        return (pairs << 16).to(tl.float32, bitcast=True)
    else:
        return pairs.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def second_of(pairs):
    """Return the second value of each pair as f32."""
    if pairs.dtype == tl.int32:
        # -65536 keeps the upper half.
        return (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        return (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def to_pairs(first, second, like):
    """Return f32 values, rounded where pairs of `like` are of bf16, as pairs."""
    if like.dtype == tl.int32:
        low = first.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
        high = second.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
        return (high << 16) | low
    else:
        low = first.to(tl.uint32, bitcast=True).to(tl.int64)
        return (second.to(tl.uint32, bitcast=True).to(tl.int64) << 32) | low
