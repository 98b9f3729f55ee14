"""Device functions of the KDA kernels: activations, the decay gate, the convolution of one token.

Values are f32 whatever the operands' dtypes; a result is rounded where the unfused ops round.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x, pointer):
    """Return f32 `x` rounded to the dtype behind `pointer`, as f32."""
    return x.to(pointer.dtype.element_ty).to(tl.float32)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def expm1(x):
    """Return exp(x) - 1 for x <= 0, to a few ulp also near 0; -1 for -inf.

    A decay near 1, rounded each token, would bend the time constant of a slow channel: what a
    token takes away, decay - 1, is exact there.
    """
    near = tl.where(x > -0.375, x, 0.0)
    series = 1.0 + near * (1 / 9)
    series = 1.0 + near * (1 / 8) * series
    series = 1.0 + near * (1 / 7) * series
    series = 1.0 + near * (1 / 6) * series
    series = 1.0 + near * (1 / 5) * series
    series = 1.0 + near * (1 / 4) * series
    series = 1.0 + near * (1 / 3) * series
    series = 1.0 + near * (1 / 2) * series
    return tl.where(x > -0.375, near * series, tl.exp(x) - 1.0)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), exact to rounding at both ends."""
    e = tl.exp(-tl.abs(x))
    # log(1 + e) = 2 atanh(e / (2 + e)); the argument is at most 1/3, the next term 3e-9 of it.
    a = e / (2.0 + e)
    square = a * a
    series = 1 / 15 + square * (1 / 17)
    series = 1 / 13 + square * series
    series = 1 / 11 + square * series
    series = 1 / 9 + square * series
    series = 1 / 7 + square * series
    series = 1 / 5 + square * series
    series = 1 / 3 + square * series
    series = 1.0 + square * series
    return tl.maximum(x, 0.0) + 2.0 * a * series


@triton.jit
def log_decay(x, rate, LOWER_BOUND: tl.constexpr):
    """Return the natural log of the decay for x = f + dt_bias and rate = exp(a_log)."""
    if LOWER_BOUND == "none":
        return -rate * softplus(x)
    else:
        return LOWER_BOUND * sigmoid(rate * x)


@triton.jit
def by_part(part, first, second, third):
    """Return pointers of a tile: `first` where part is 0, `second` where it is 1, else `third`."""
    return tl.where(part == 0, first, tl.where(part == 1, second, third))


@triton.jit
def _part_mask(limit, K: tl.constexpr):
    """Return the mask [4, K] of rows q, k and v; empty where `limit` is 0."""
    inside = tl.arange(0, triton.next_power_of_2(K)) < K
    return (tl.arange(0, 4) < tl.where(limit > 0, 3, 0))[:, None] & inside[None, :]


@triton.jit
def load_taps(weight, mask):
    """Return the four taps f32 of the channels whose rows of f32[P, 4] start at `weight`."""
    w0 = tl.load(weight, mask=mask, other=0.0)
    w1 = tl.load(weight + 1, mask=mask, other=0.0)
    w2 = tl.load(weight + 2, mask=mask, other=0.0)
    w3 = tl.load(weight + 3, mask=mask, other=0.0)
    return w0, w1, w2, w3


@triton.jit
def load_history(first, CHANNELS: tl.constexpr, limit, K: tl.constexpr):
    """Return the three raw rows f32 before a token, oldest first: tiles [4, K].

    Args:
        first: Pointers [4, K] to the oldest row.
        CHANNELS: From a row to the next.
        limit: K, or 0: nothing is read.
        K: Width of a head.
    """
    mask = _part_mask(limit, K)
    h0 = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    h1 = tl.load(first + CHANNELS, mask=mask, other=0.0).to(tl.float32)
    h2 = tl.load(first + 2 * CHANNELS, mask=mask, other=0.0).to(tl.float32)
    return h0, h1, h2


@triton.jit
def convolve(x, history, taps):
    """Return SiLU of the convolution of a raw row `x` after its history; not rounded."""
    h0, h1, h2 = history
    w0, w1, w2, w3 = taps
    total = h0 * w0 + h1 * w1 + h2 * w2 + x * w3
    return total * sigmoid(total)


@triton.jit
def store_history(first, CHANNELS: tl.constexpr, history, x, limit, K: tl.constexpr):
    """Shift a slot's raw rows by one: the last two of the history, then `x`."""
    kind = first.dtype.element_ty
    mask = _part_mask(limit, K)
    _, h1, h2 = history
    tl.store(first, h1.to(kind), mask=mask)
    tl.store(first + CHANNELS, h2.to(kind), mask=mask)
    tl.store(first + 2 * CHANNELS, x.to(kind), mask=mask)


@triton.jit
def split_parts(tile):
    """Return the four rows of a tile [4, N]."""
    N: tl.constexpr = tile.shape[1]
    even, odd = tl.split(tl.permute(tl.reshape(tile, [2, 2, N]), (2, 0, 1)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def add_pairs(a0, a1, b0, b1):
    """Add two pairs."""
    return a0 + b0, a1 + b1


@triton.jit
def add_triples(a0, a1, a2, b0, b1, b2):
    """Add two triples."""
    return a0 + b0, a1 + b1, a2 + b2
