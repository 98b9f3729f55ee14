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
def store_rows(at, x, STRIDE: tl.constexpr):
    """Store a matrix, its rows STRIDE elements apart."""
    R: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    places = tl.arange(0, R)[:, None] * STRIDE + tl.arange(0, N)[None, :]
    tl.store(at + places, x.to(at.dtype.element_ty))


@triton.jit
def load_rows(at, R: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr):
    """Load a matrix that `store_rows` stored."""
    return tl.load(at + (tl.arange(0, R)[:, None] * STRIDE + tl.arange(0, N)[None, :]))


@triton.jit
def raw_pairs(x, window, at, history_at, AHEAD: tl.constexpr, WIDTH: tl.constexpr,
              CHANNELS: tl.constexpr):  # fmt: skip
    """Return rows AHEAD, AHEAD + 4, ... of a chunk, pairs[CHUNK // 4, N // 2]; see `convolve_head`.

    AHEAD is -3 .. 3; rows before the segment come from the history, or are zero.
    """
    history, borrowed, row, place, live = window
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
def four_taps(x, taps, pointer, CUDA: tl.constexpr):
    """Return SiLU of a sum over four taps, rounded."""
    x0, x1, x2, x3 = x
    w0, w1, w2, w3 = taps
    total = x0 * w0[None, :] + x1 * w1[None, :] + x2 * w2[None, :] + x3 * w3[None, :]
    return narrowed(total * fast_sigmoid(total), pointer, CUDA)


@triton.jit
def seven_rows(x, taps, pointer, CUDA: tl.constexpr):
    """Convolve the raw rows -3 .. 3 of every four into rows 0 .. 3: A[CHUNK // 4, N, 2, 2]."""
    a, b, c, d, e, f, g = x
    y0 = four_taps((a, b, c, d), taps, pointer, CUDA)
    y1 = four_taps((b, c, d, e), taps, pointer, CUDA)
    y2 = four_taps((c, d, e, f), taps, pointer, CUDA)
    y3 = four_taps((d, e, f, g), taps, pointer, CUDA)
    return tl.join(tl.join(y0, y2), tl.join(y1, y3))


@triton.jit
def convolve_rows(x, weight, window, first, history_first, N: tl.constexpr, WIDTH: tl.constexpr,
                  CHANNELS: tl.constexpr, CUDA: tl.constexpr):  # fmt: skip
    """Return the rows of `convolve_head` for N channels from `first` on: A[CHUNK, N].

    A thread convolves four rows from the seven raw ones that they need, even and odd channels
    apart.
    """
    at = first // 2 + tl.arange(0, N // 2)
    past = history_first // 2 + tl.arange(0, N // 2)
    # [pair, even or odd channel, tap's high bit, tap's low bit]
    taps = tl.load(
        weight + first * 4 + tl.arange(0, N // 2)[:, None] * 8 + tl.arange(0, 8)[None, :]
    )
    taps = tl.permute(tl.reshape(taps, [N // 2, 2, 2, 2]), (0, 2, 3, 1))
    even, odd = tl.split(taps)
    a = raw_pairs(x, window, at, past, -3, WIDTH, CHANNELS)
    b = raw_pairs(x, window, at, past, -2, WIDTH, CHANNELS)
    c = raw_pairs(x, window, at, past, -1, WIDTH, CHANNELS)
    d = raw_pairs(x, window, at, past, 0, WIDTH, CHANNELS)
    e = raw_pairs(x, window, at, past, 1, WIDTH, CHANNELS)
    f = raw_pairs(x, window, at, past, 2, WIDTH, CHANNELS)
    g = raw_pairs(x, window, at, past, 3, WIDTH, CHANNELS)
    low, high = tl.split(even)
    w0, w2 = tl.split(low)
    w1, w3 = tl.split(high)
    left = seven_rows(
        (first_of(a), first_of(b), first_of(c), first_of(d), first_of(e), first_of(f), first_of(g)),
        (w0, w1, w2, w3), x, CUDA,
    )  # fmt: skip
    low, high = tl.split(odd)
    w0, w2 = tl.split(low)
    w1, w3 = tl.split(high)
    right = seven_rows(
        (second_of(a), second_of(b), second_of(c), second_of(d), second_of(e), second_of(f),
         second_of(g)), (w0, w1, w2, w3), x, CUDA,
    )  # fmt: skip
    rows = tl.join(left, right)
    return tl.reshape(tl.permute(rows, (0, 2, 3, 1, 4)), [CHUNK, N])


@triton.jit
def convolve_head(x, weight, window, first, history_first, scratch, D: tl.constexpr,
                  PART: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
                  CUDA: tl.constexpr):  # fmt: skip
    """Store SiLU of the convolution of a chunk's rows, rounded, as scratch A[CHUNK, D].

    Rows past the chunk's tokens hold something finite.

    Args:
        x: Raw rows A[T, WIDTH].
        weight: f32[WIDTH, 4].
        window: The slot's history A[3, CHANNELS]; how many rows to take from it, 3 or 0; the
            chunk's first row, int64; its place in the segment; its tokens.
        first: First channel in x.
        history_first: The same channel in the history.
        scratch: Where the rows go.
        D: Channels.
        PART: Channels at a time.
        WIDTH: Channels of x.
        CHANNELS: Channels of the history.
        CUDA: Whether the target takes PTX.

    Returns:
        The sum of squares and the largest magnitude of each row, f32[CHUNK].
    """
    squares = tl.zeros([CHUNK], tl.float32)
    largest = tl.zeros([CHUNK], tl.float32)
    at = scratch.to(tl.pointer_type(x.dtype.element_ty))
    for part in tl.range(0, D // PART, num_stages=1):
        rows = convolve_rows(x, weight, window, first + part * PART, history_first + part * PART,
                             PART, WIDTH, CHANNELS, CUDA)  # fmt: skip
        wide = rows.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        largest = tl.maximum(largest, tl.max(tl.abs(wide), 1))
        store_rows(at + part * PART, rows, D)
    return squares, largest
