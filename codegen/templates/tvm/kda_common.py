"""What the two KDA kernels share: constants, vector math, convolution, gate and output norm.

The kernels work on one head of one segment a task. Everything here is an inline part of such a
task: it runs over the `n` rows from `row` on and reads or writes the task's local f32 buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

TAPS = 4  # the convolution's width; its state holds TAPS - 1 raw rows


@dataclass(frozen=True)
class KdaShape:
    """Compile-time constants of a KDA kernel.

    Attributes:
        heads: H.
        key: K, key width of a head.
        value: V, value width of a head.
        lanes: f32 elements of a vector; divides K and V.
        act: Activation dtype, "bf16" or "f32".
        lower_bound: Bound of the log decay; None selects the unbounded softplus gate.
        scale: Factor on the normalised query.
        l2_eps: Epsilon of the query and key norms.
        eps: Epsilon of the output norm.
    """

    heads: int
    key: int
    value: int
    lanes: int
    act: str
    lower_bound: float | None
    scale: float
    l2_eps: float
    eps: float

    @property
    def storage(self) -> str:
        """Dtype of an activation buffer: bf16 is kept as its bits."""
        return "uint16" if self.act == "bf16" else "float32"

    @property
    def keys(self) -> int:
        """Channels of all heads' keys."""
        return self.heads * self.key

    @property
    def values(self) -> int:
        """Channels of all heads' values."""
        return self.heads * self.value

    @property
    def channels(self) -> int:
        """Channels of the convolution state: q, k and v."""
        return 2 * self.keys + self.values

    @property
    def strip(self) -> int:
        """Value columns that a decode pass keeps in registers: 4, 2 or 1 vectors."""
        return next(n * self.lanes for n in (4, 2, 1) if self.value % (n * self.lanes) == 0)


def splat(value: Any, lanes: int) -> Any:
    """Return a scalar in every lane; a Python number becomes f32."""
    scalar = T.float32(value) if isinstance(value, int | float) else value
    return T.broadcast(scalar, lanes)


def span(start: Any, lanes: int) -> Any:
    """Return the index of `lanes` consecutive elements from `start`."""
    return T.ramp(start, 1, lanes)


def widen(bits: Any, c: KdaShape) -> Any:
    """Return loaded activations as f32 lanes."""
    if c.act == "f32":
        return bits
    wide = T.Cast(f"uint32x{c.lanes}", bits) << T.broadcast(T.uint32(16), c.lanes)
    return T.reinterpret(f"float32x{c.lanes}", wide)


def narrow(value: Any, c: KdaShape) -> Any:
    """Return f32 lanes as activations to store: nearest, ties to even; NaN stays NaN."""
    if c.act == "f32":
        return value
    n = c.lanes
    x = T.bind(value)
    u = T.bind(T.reinterpret(f"uint32x{n}", x))
    one, half = T.broadcast(T.uint32(1), n), T.broadcast(T.uint32(0x7FFF), n)
    rounded = (u + (half + ((u >> T.broadcast(T.uint32(16), n)) & one))) >> T.broadcast(
        T.uint32(16), n
    )
    quiet = T.broadcast(T.uint32(0x7FC0), n)
    return T.Cast(f"uint16x{n}", T.Select(x == x, rounded, quiet))


def rounded(value: Any, c: KdaShape) -> Any:
    """Return f32 lanes rounded to the activation dtype and widened again."""
    return value if c.act == "f32" else widen(narrow(value, c), c)


def _exp_parts(value: Any, n: int) -> tuple[Any, Any]:
    """Return s = 2^k and p with exp(x) = s + s p, |p| < 0.42; x is held in [-87, 88], NaN passes."""
    x = T.bind(value)
    x = T.bind(T.Select(x < splat(-87.0, n), splat(-87.0, n), x))
    x = T.bind(T.Select(x > splat(88.0, n), splat(88.0, n), x))
    # Adding 1.5 * 2^23 leaves round(x / ln 2) in the low bits of the sum.
    magic = splat(12582912.0, n)
    t = T.bind(x * splat(1.4426950408889634, n) + magic)
    k = T.bind(t - magic)
    r = T.bind(x - k * splat(0.693359375, n) + k * splat(2.12194440e-4, n))
    s = T.bind(
        T.reinterpret(
            f"float32x{n}",
            (T.reinterpret(f"int32x{n}", t) << T.broadcast(T.int32(23), n))
            + T.broadcast(T.int32(0x3F800000), n),
        )
    )
    # Taylor terms of expm1 to r^7: the next is below 2e-8 of r for |r| <= ln 2 / 2.
    p = splat(1 / 5040, n)
    for factor in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0):
        p = T.bind(p * r + splat(factor, n))
    return s, T.bind(p * r)


def exp(value: Any, n: int) -> Any:
    """Return exp of f32 lanes."""
    s, p = _exp_parts(value, n)
    return T.bind(s * p + s)


def expm1(value: Any, n: int) -> Any:
    """Return exp(x) - 1 of f32 lanes, exact to rounding near 0.

    A decay a is kept as a - 1: near 1 the rounding of a itself, repeated each token, would bend a
    slow channel's time constant.
    """
    s, p = _exp_parts(value, n)
    return T.bind(s * p + (s - splat(1.0, n)))


def sigmoid(value: Any, n: int) -> Any:
    """Return the logistic function of f32 lanes."""
    return T.bind(splat(1.0, n) / (splat(1.0, n) + exp(splat(0.0, n) - value, n)))


def softplus(value: Any, n: int) -> Any:
    """Return log(1 + exp(x)) of f32 lanes, to rounding at both ends."""
    x = T.bind(value)
    zero = splat(0.0, n)
    e = exp(T.Select(x > zero, zero - x, x), n)
    # log1p(e) = 2 atanh(e / (2 + e)) with the argument in (0, 1/3].
    a = T.bind(e / (splat(2.0, n) + e))
    a2 = T.bind(a * a)
    p = splat(1 / 17, n)
    for odd in (15, 13, 11, 9, 7, 5, 3, 1):
        p = T.bind(p * a2 + splat(1 / odd, n))
    return T.bind(T.Select(x > zero, x, zero) + splat(2.0, n) * a * p)


@T.inline
def convolve(c, dst, width, raw, taps, history, offset, h, slot, row, n):
    """dst[i] = SiLU of the causal convolution at row + i; history ends as the last 3 raw rows."""
    for d in range(width // c.lanes):
        at = T.bind(h * width + d * c.lanes)
        window = T.alloc_buffer((3 * c.lanes,), "float32", scope="local")
        for j in T.unroll(3):
            window[span(j * c.lanes, c.lanes)] = widen(
                history[slot, j, span(offset + at, c.lanes)], c
            )
        for i in range(n):
            x = T.bind(widen(raw[row + i, span(at, c.lanes)], c))
            acc = T.bind(
                window[span(0, c.lanes)] * taps[0, span(at, c.lanes)]
                + window[span(c.lanes, c.lanes)] * taps[1, span(at, c.lanes)]
                + window[span(2 * c.lanes, c.lanes)] * taps[2, span(at, c.lanes)]
                + x * taps[3, span(at, c.lanes)]
            )
            for j in T.unroll(2):
                window[span(j * c.lanes, c.lanes)] = window[span((j + 1) * c.lanes, c.lanes)]
            window[span(2 * c.lanes, c.lanes)] = x
            dst[i, span(d * c.lanes, c.lanes)] = rounded(acc * sigmoid(acc, c.lanes), c)
        for j in T.unroll(3):
            history[slot, j, span(offset + at, c.lanes)] = narrow(
                window[span(j * c.lanes, c.lanes)], c
            )


@T.inline
def dot(c, total, a, b, i, width):
    """total[0] = sum of a[i] * b[i], lane by lane and then across the lanes."""
    lane = T.alloc_buffer((c.lanes,), "float32", scope="local")
    lane[span(0, c.lanes)] = splat(0.0, c.lanes)
    for d in range(width // c.lanes):
        lane[span(0, c.lanes)] += (
            a[i, span(d * c.lanes, c.lanes)] * b[i, span(d * c.lanes, c.lanes)]
        )
    total[0] = T.float32(0)
    for j in T.unroll(c.lanes):
        total[0] += lane[j]


@T.inline
def l2_normalise(c, x, i, scale):
    """x[i] = scale * x[i] / sqrt(sum of squares + l2_eps)."""
    total = T.alloc_buffer((1,), "float32", scope="local")
    dot(c, total, x, x, i, c.key)
    factor = T.bind(T.float32(scale) / T.sqrt(total[0] + T.float32(c.l2_eps)))
    for d in range(c.key // c.lanes):
        x[i, span(d * c.lanes, c.lanes)] = x[i, span(d * c.lanes, c.lanes)] * splat(factor, c.lanes)


def log_decay(c: KdaShape, f: Any, rate: Any, bias: Any) -> Any:
    """Return g, the natural log of the decay, of one vector of channels."""
    x = T.bind(f + bias)
    if c.lower_bound is None:
        return T.bind(splat(0.0, c.lanes) - rate * softplus(x, c.lanes))
    return T.bind(splat(c.lower_bound, c.lanes) * sigmoid(rate * x, c.lanes))


@T.inline
def write_output(c, out, o, i, z, weight, h, row):
    """out[row] = RMS norm of o[i] (rounded first) * weight * sigmoid(z), for head h."""
    for d in range(c.value // c.lanes):
        o[i, span(d * c.lanes, c.lanes)] = rounded(o[i, span(d * c.lanes, c.lanes)], c)
    total = T.alloc_buffer((1,), "float32", scope="local")
    dot(c, total, o, o, i, c.value)
    factor = T.bind(T.float32(1) / T.sqrt(total[0] * T.float32(1 / c.value) + T.float32(c.eps)))
    for d in range(c.value // c.lanes):
        at = T.bind(h * c.value + d * c.lanes)
        gate = sigmoid(widen(z[row, span(at, c.lanes)], c), c.lanes)
        normal = T.bind(o[i, span(d * c.lanes, c.lanes)] * splat(factor, c.lanes))
        out[row, span(at, c.lanes)] = narrow(normal * weight[span(d * c.lanes, c.lanes)] * gate, c)


@T.inline
def clear_padding(c, out, seg_start, seg_tokens, segments, rows, h, s):
    """Zero head h of every segments-th row, from row s, that no segment owns."""
    owned = T.alloc_buffer((1,), "int32", scope="local")
    for j in range((rows - s + segments - 1) // segments):
        r = T.bind(s + j * segments)
        owned[0] = 0
        for other in range(segments):
            first = T.bind(T.Cast("int64", seg_start[other]))
            if r >= first and r < first + T.Cast("int64", seg_tokens[other]):
                owned[0] = 1
        if owned[0] == 0:
            for d in range(c.value // c.lanes):
                out[r, span(h * c.value + d * c.lanes, c.lanes)] = T.broadcast(
                    T.Cast(c.storage, 0), c.lanes
                )


@T.inline
def forget(c, history, state, h, slot):
    """Zero head h of a slot: a request's first step must not read what the slot held before."""
    for j in range(3):
        for d in range(c.key // c.lanes):
            zero = T.broadcast(T.Cast(c.storage, 0), c.lanes)
            history[slot, j, span(h * c.key + d * c.lanes, c.lanes)] = zero
            history[slot, j, span(c.keys + h * c.key + d * c.lanes, c.lanes)] = zero
        for d in range(c.value // c.lanes):
            history[slot, j, span(2 * c.keys + h * c.value + d * c.lanes, c.lanes)] = T.broadcast(
                T.Cast(c.storage, 0), c.lanes
            )
    for d in range(c.key):
        for e in range(c.value // c.lanes):
            state[slot, h, d, span(e * c.lanes, c.lanes)] = splat(0.0, c.lanes)
