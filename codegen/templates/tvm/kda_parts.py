"""The parts of a KDA kernel around its recurrence: convolution, norms, gate, output, padding.

A task works on one head. Each part takes the constants `c` first and works on `n` rows of the step
from row `row` on; their f32 values stand in rows `base`, `base + 1`, .. of scratch buffers.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from k3c.codegen.templates.tvm.kda_common import KdaShape
from k3c.codegen.templates.tvm.vector import (
    exp,
    hold,
    horizontal_sum,
    narrow,
    rounded,
    sigmoid,
    span,
    splat,
    widen,
)


def softplus(value: Any, lanes: int) -> Any:
    """Return log(1 + exp(x)) of f32 lanes, exact to rounding at both ends."""
    x = hold(value)
    zero = splat(0.0, lanes)
    e = exp(T.Select(x > zero, zero - x, x), lanes)
    # log(1 + e) = 2 atanh(e / (2 + e)); the argument is at most 1/3, the next term 3e-9 of it.
    a = hold(e / (splat(2.0, lanes) + e))
    square = hold(a * a)
    series = splat(1 / 17, lanes)
    for odd in (15, 13, 11, 9, 7, 5, 3, 1):
        series = hold(series * square + splat(1 / odd, lanes))
    return hold(T.Select(x > zero, x, zero) + splat(2.0, lanes) * a * series)


def log_decay(c: KdaShape, f: Any, rate: Any, bias: Any) -> Any:
    """Return g, the natural log of the decay, of one vector of channels."""
    x = hold(f + bias)
    if isinstance(c.lower_bound, str):
        return hold(splat(0.0, c.lanes) - rate * softplus(x, c.lanes))
    return hold(splat(c.lower_bound, c.lanes) * sigmoid(rate * x, c.lanes))


@T.inline
def convolve(c, into, base, width, raw, taps, history, offset, h, slot, row, n) -> None:
    """Set rows of `into` to SiLU of the causal convolution; history ends as the last 3 raw rows."""
    # Row by row first: along a column, rows of the step lie pages apart.
    for i in range(n):
        for d in range(width // c.lanes):
            into[base + i, span(d * c.lanes, c.lanes)] = widen(
                raw[row + i, span(h * width + d * c.lanes, c.lanes)], c.act, c.lanes
            )
    for d in range(width // c.lanes):
        at = T.bind(h * width + d * c.lanes)
        window = T.alloc_buffer((3 * c.lanes,), "float32")
        for j in T.unroll(3):
            window[span(j * c.lanes, c.lanes)] = widen(
                history[slot, j, span(offset + at, c.lanes)], c.act, c.lanes
            )
        for i in range(n):
            x = T.meta_var(hold(into[base + i, span(d * c.lanes, c.lanes)]))
            total = T.meta_var(
                hold(
                    window[span(0, c.lanes)] * taps[0, span(at, c.lanes)]
                    + window[span(c.lanes, c.lanes)] * taps[1, span(at, c.lanes)]
                    + window[span(2 * c.lanes, c.lanes)] * taps[2, span(at, c.lanes)]
                    + x * taps[3, span(at, c.lanes)]
                )
            )
            for j in T.unroll(2):
                window[span(j * c.lanes, c.lanes)] = window[span((j + 1) * c.lanes, c.lanes)]
            window[span(2 * c.lanes, c.lanes)] = x
            into[base + i, span(d * c.lanes, c.lanes)] = rounded(
                total * sigmoid(total, c.lanes), c.act, c.lanes
            )
        for j in T.unroll(3):
            history[slot, j, span(offset + at, c.lanes)] = narrow(
                window[span(j * c.lanes, c.lanes)], c.act, c.lanes
            )


@T.inline
def dot(c, total, a, b, i, width) -> None:
    """total[0] = sum of a[i] * b[i]: lane by lane, then across the lanes."""
    lane = T.alloc_buffer((c.lanes,), "float32")
    lane[span(0, c.lanes)] = splat(0.0, c.lanes)
    for d in range(width // c.lanes):
        lane[span(0, c.lanes)] += (
            a[i, span(d * c.lanes, c.lanes)] * b[i, span(d * c.lanes, c.lanes)]
        )
    total[0] = horizontal_sum(lane, 0, c.lanes)


@T.inline
def l2_normalise(c, x, i, scale) -> None:
    """x[i] = scale * x[i] / sqrt(sum of squares + l2_eps)."""
    squares = T.alloc_buffer((1,), "float32")
    dot(c, squares, x, x, i, c.key)
    squares[0] = T.float32(scale) / T.sqrt(squares[0] + T.float32(c.l2_eps))
    for d in range(c.key // c.lanes):
        x[i, span(d * c.lanes, c.lanes)] *= splat(squares[0], c.lanes)


@T.inline
def write_output(c, out, o, i, z, weight, h, row) -> None:
    """out[row] of head h = RMS norm of o[i], rounded first, * weight * sigmoid(z)."""
    squares = T.alloc_buffer((1,), "float32")
    for d in range(c.value // c.lanes):
        o[i, span(d * c.lanes, c.lanes)] = rounded(o[i, span(d * c.lanes, c.lanes)], c.act, c.lanes)
    dot(c, squares, o, o, i, c.value)
    squares[0] = T.float32(1) / T.sqrt(squares[0] * T.float32(1 / c.value) + T.float32(c.eps))
    for d in range(c.value // c.lanes):
        at = T.bind(h * c.value + d * c.lanes)
        gate = T.meta_var(sigmoid(widen(z[row, span(at, c.lanes)], c.act, c.lanes), c.lanes))
        normal = T.meta_var(hold(o[i, span(d * c.lanes, c.lanes)] * splat(squares[0], c.lanes)))
        out[row, span(at, c.lanes)] = narrow(
            normal * weight[span(d * c.lanes, c.lanes)] * gate, c.act, c.lanes
        )


@T.inline
def clear_padding(c, out, seg_start, seg_tokens, segments, rows, h, first, step) -> None:
    """Zero head h of those rows first, first + step, .. that no segment owns."""
    owned = T.alloc_buffer((1,), "int32")
    for j in range((rows - first + step - 1) // step):
        row = T.bind(first + j * step)
        owned[0] = 0
        for s in range(segments):
            start = T.bind(T.Cast("int64", seg_start[s]))
            if row >= start and row < start + T.Cast("int64", seg_tokens[s]):
                owned[0] = 1
        if owned[0] == 0:
            for d in range(c.value // c.lanes):
                out[row, span(h * c.value + d * c.lanes, c.lanes)] = T.broadcast(
                    T.Cast(c.storage, 0), c.lanes
                )


@T.inline
def forget(c, history, state, h, slot) -> None:
    """Zero head h of a slot: a request's first step must not read what the slot held before."""
    for j in range(3):
        for d in range(c.key // c.lanes):
            for section in T.unroll(2):
                at = T.bind(section * c.keys + h * c.key + d * c.lanes)
                history[slot, j, span(at, c.lanes)] = T.broadcast(T.Cast(c.storage, 0), c.lanes)
        for d in range(c.value // c.lanes):
            at = T.bind(2 * c.keys + h * c.value + d * c.lanes)
            history[slot, j, span(at, c.lanes)] = T.broadcast(T.Cast(c.storage, 0), c.lanes)
    for d in range(c.key):
        for e in range(c.value // c.lanes):
            state[slot, h, d, span(e * c.lanes, c.lanes)] = splat(0.0, c.lanes)
