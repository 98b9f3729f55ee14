"""Elementwise ops that a refused fusion leaves alone, and the decode step's next input.

A block is a run of elements, whatever the rows are: nothing here depends on a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    # By exp of a negative number, so that nothing overflows; near 0 by the first terms of the
    # series, where 1 - e^-2x would lose its digits. NaN passes.
    size = tl.abs(x)
    decay = tl.exp(-2.0 * size)
    far = (1.0 - decay) / (1.0 + decay)
    square = x * x
    near = size * (1.0 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    return tl.where(x < 0.0, -1.0, 1.0) * tl.where(size < 0.15, near, far)


@triton.jit
def situ_of(gate, up, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """Return beta tanh(gate / beta) sigmoid(gate) times the capped up, all f32."""
    if LINEAR_BETA != "none":
        up = LINEAR_BETA * _tanh(up / LINEAR_BETA)
    return BETA * _tanh(gate / BETA) * _sigmoid(gate) * up


@triton.jit
def binary(
    a, b, out, rows, WIDTH: tl.constexpr, OP: tl.constexpr, BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`add`, `sigmoid_mul` or `situ` of a run of elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows.to(tl.int64) * WIDTH
    wait_for_inputs(PDL)
    left = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    release_dependents(PDL)
    if OP == "add":
        value = left + right
    elif OP == "sigmoid_mul":
        value = left * _sigmoid(right).to(out.dtype.element_ty).to(tl.float32)
    else:
        value = situ_of(left, right, BETA, LINEAR_BETA)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def residual_join(
    prefix, delta, out, rows, restart, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`residual_join` of a run of elements; at a restart the prefix is not read."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    elements = rows.to(tl.int64) * WIDTH
    inside = at < elements
    wait_for_inputs(PDL)
    old = tl.load(prefix + at, mask=at < tl.where(restart == 0, elements, 0), other=0.0)
    new = tl.load(delta + at, mask=inside, other=0.0)
    release_dependents(PDL)
    total = (old.to(tl.float32) + new.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + at, tl.where(restart == 0, total, new), mask=inside)


@triton.jit
def advance(
    tokens, ids, context, seg_tokens, position, segments, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """`advance`: the input of the next decode step. The token -1 of a broken row becomes id 0."""
    segment = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    live = tl.load(seg_tokens + segment, mask=segment < segments, other=0) > 0
    token = tl.load(tokens + segment, mask=live, other=0)
    seen = tl.load(context + segment, mask=live, other=0)
    place = tl.load(position + segment, mask=live, other=0)
    release_dependents(PDL)
    tl.store(ids + segment, tl.maximum(token, 0), mask=live)
    tl.store(context + segment, seen + 1, mask=live)
    tl.store(position + segment, place + 1, mask=live)
