"""The weighted sum of a token's expert rows, and the norm after it: the device code.

A row whose weight is 0 is not read: its expert may lie on another rank, and nobody wrote it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs


@triton.jit
def weighted_sum(
    parts, weights, row, column, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr
):  # fmt: skip
    """Return f32[columns], the sum of a token's K rows at `column`, in a fixed order."""
    j = tl.arange(0, KP)
    weight = tl.load(weights + row * K + j, mask=j < K, other=0.0)
    at = parts + (row * K + j)[:, None] * L + column[None, :]
    # NaN is unequal to 0: a broken weight is not hidden.
    used = (weight != 0.0)[:, None] & (column < L)[None, :]
    part = tl.load(at, mask=used, other=0.0).to(tl.float32)
    return tl.sum(tl.where(used, part * weight[:, None], 0.0), axis=0)


@triton.jit
def combine(
    parts, weights, out, rows, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`combine`: a block of columns of one token."""
    blocks: tl.constexpr = tl.cdiv(L, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    total = weighted_sum(parts, weights, row, column, K, KP, L)
    release_dependents(PDL)
    tl.store(out + row * L + column, total.to(out.dtype.element_ty), mask=column < L)


@triton.jit
def combine_norm(
    parts, weights, norm, out, rows, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr,
    BLOCK: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`combine_norm`: one token. The sum is rounded before the norm, as the two ops would."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    scale = tl.load(norm + column, mask=column < L, other=0.0)
    wait_for_inputs(PDL)
    total = weighted_sum(parts, weights, row, column, K, KP, L)
    release_dependents(PDL)
    total = total.to(out.dtype.element_ty).to(tl.float32)
    mean = tl.sum(total * total, axis=0) / L
    result = total * tl.rsqrt(mean + EPS) * scale
    tl.store(out + row * L + column, result.to(out.dtype.element_ty), mask=column < L)
