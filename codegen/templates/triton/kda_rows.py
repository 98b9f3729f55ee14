"""Device functions of KDA prefill: the short convolution of a chunk's rows, and its arithmetic.

Rows are read as pairs of neighbouring channels, four rows a thread at a time, so that a raw value
becomes f32 once for two of the four taps that it meets.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.pairs import first_of, pair_pointer, second_of

LOG2_E = tl.constexpr(1.4426950408889634)
CHUNK = tl.constexpr(64)
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def fast_sigmoid(x):
    """Return 1 / (1 + exp(-x)) to 5e-7 of itself, from two approximate instructions."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
    return root * root


@triton.jit
def narrowed(x, pointer, CUDA: tl.constexpr):
    """Return f32 `x` rounded to the dtype behind `pointer`, two values an instruction on CUDA."""
    if COMPILED and CUDA and pointer.dtype.element_ty == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return x.to(pointer.dtype.element_ty)


@triton.jit
def power_of_two(largest):
    """Return the power of two at or below `largest`, kept in [2^-100, 2^100], and its inverse."""
    bits = tl.maximum(largest, 7.888609052210118e-31).to(tl.int32, bitcast=True)
    bits = tl.minimum(bits & 0x7F800000, 227 << 23)
    scale = bits.to(tl.float32, bitcast=True)
    return scale, ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def raw_pairs(x, history, borrowed, row, place, live, at, history_at, AHEAD: tl.constexpr,
              WIDTH: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """Return rows AHEAD, AHEAD + 4, ... of a chunk, pairs[CHUNK // 4, N // 2]; see `convolve_rows`.

    AHEAD is -3 .. 3; rows before the segment come from the history, or are zero.
    """
    r = tl.arange(0, CHUNK // 4) * 4 + AHEAD
    inside = (r < live) & (place * CHUNK + r >= 0)
    first = pair_pointer(x) + row * (WIDTH // 2)
    found = tl.load(
        first + (r[:, None] * (WIDTH // 2) + at[None, :]), mask=inside[:, None], other=0
    )
    if AHEAD < 0:
        outside = (r < 0) & (r >= -borrowed)
        places = (r + 3)[:, None] * (CHANNELS // 2) + history_at[None, :]
        found |= tl.load(pair_pointer(history) + places, mask=outside[:, None], other=0)
    return found


@triton.jit
def four_taps(x0, x1, x2, x3, w0, w1, w2, w3, pointer, CUDA: tl.constexpr):
    """Return SiLU of a sum over four taps, rounded."""
    total = x0 * w0[None, :] + x1 * w1[None, :] + x2 * w2[None, :] + x3 * w3[None, :]
    return narrowed(total * fast_sigmoid(total), pointer, CUDA)


@triton.jit
def seven_rows(a, b, c, d, e, f, g, w0, w1, w2, w3, pointer, CUDA: tl.constexpr):
    """Convolve the raw rows -3 .. 3 of every four into rows 0 .. 3: A[CHUNK // 4, N, 2, 2]."""
    y0 = four_taps(a, b, c, d, w0, w1, w2, w3, pointer, CUDA)
    y1 = four_taps(b, c, d, e, w0, w1, w2, w3, pointer, CUDA)
    y2 = four_taps(c, d, e, f, w0, w1, w2, w3, pointer, CUDA)
    y3 = four_taps(d, e, f, g, w0, w1, w2, w3, pointer, CUDA)
    return tl.join(tl.join(y0, y2), tl.join(y1, y3))


@triton.jit
def convolve_rows(x, weight, history, borrowed, row, place, live, first, history_first,
                  N: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
                  CUDA: tl.constexpr):  # fmt: skip
    """Return SiLU of the convolution of a chunk's rows, rounded, A[CHUNK, N].

    A thread convolves four rows from the seven raw ones that they need, even and odd channels
    apart. Rows past the chunk's tokens may hold anything finite.

    Args:
        x: Raw rows A[T, WIDTH].
        weight: f32[WIDTH, 4].
        history: The slot's A[3, CHANNELS].
        borrowed: Rows to take from the history: 3 or 0.
        row: First row, int64.
        place: Number of the chunk in its segment.
        live: Tokens of the chunk.
        first: First channel in x.
        history_first: The same channel in the history.
        N: Channels.
        WIDTH: Channels of x.
        CHANNELS: Channels of the history.
        CUDA: Whether the target takes PTX.
    """
    at = first // 2 + tl.arange(0, N // 2)
    past = history_first // 2 + tl.arange(0, N // 2)
    # [pair, even or odd channel, tap's low bit, tap's high bit]
    taps = tl.load(
        weight + first * 4 + tl.arange(0, N // 2)[:, None] * 8 + tl.arange(0, 8)[None, :]
    )
    taps = tl.permute(tl.reshape(taps, [N // 2, 2, 2, 2]), (0, 2, 3, 1))
    even, odd = tl.split(taps)
    a = raw_pairs(x, history, borrowed, row, place, live, at, past, -3, WIDTH, CHANNELS)
    b = raw_pairs(x, history, borrowed, row, place, live, at, past, -2, WIDTH, CHANNELS)
    c = raw_pairs(x, history, borrowed, row, place, live, at, past, -1, WIDTH, CHANNELS)
    d = raw_pairs(x, history, borrowed, row, place, live, at, past, 0, WIDTH, CHANNELS)
    e = raw_pairs(x, history, borrowed, row, place, live, at, past, 1, WIDTH, CHANNELS)
    f = raw_pairs(x, history, borrowed, row, place, live, at, past, 2, WIDTH, CHANNELS)
    g = raw_pairs(x, history, borrowed, row, place, live, at, past, 3, WIDTH, CHANNELS)
    low, high = tl.split(even)
    w0, w2 = tl.split(low)
    w1, w3 = tl.split(high)
    left = seven_rows(
        first_of(a), first_of(b), first_of(c), first_of(d), first_of(e), first_of(f), first_of(g),
        w0, w1, w2, w3, x, CUDA,
    )  # fmt: skip
    low, high = tl.split(odd)
    w0, w2 = tl.split(low)
    w1, w3 = tl.split(high)
    right = seven_rows(
        second_of(a), second_of(b), second_of(c), second_of(d), second_of(e), second_of(f),
        second_of(g), w0, w1, w2, w3, x, CUDA,
    )  # fmt: skip
    rows = tl.join(left, right)
    return tl.reshape(tl.permute(rows, (0, 2, 3, 1, 4)), [CHUNK, N])
