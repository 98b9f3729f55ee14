"""Device functions of the KDA kernels for one token of one head.

The convolved rows q, k, v and the forget row are a tile [4, K], so that every thread has its share.
Masks are limits, because a block works on nothing, or reads nothing, as a whole.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.kda_parts import (
    add_triples,
    by_part,
    convolve,
    expm1,
    load_taps,
    log_decay,
    rounded,
    sigmoid,
    split_parts,
)


@triton.jit
def load_weights(
    conv_q, conv_k, conv_v, a_log, dt_bias, f_b, head,
    H: tl.constexpr, K: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Return taps (tiles [4, K]), forget weight [F, K], bias f32[K] and rate of a head."""
    ks, fs = tl.arange(0, triton.next_power_of_2(K)), tl.arange(0, triton.next_power_of_2(F))
    part, at = tl.arange(0, 4)[:, None], head * K + ks
    in_tile = (part < 3) & (ks < K)[None, :]
    taps = load_taps(by_part(part, conv_q, conv_k, conv_v) + at[None, :] * 4, in_tile)
    # Transposed: its sum must not lend the state a layout, which would cost a shuffle of all of it.
    in_forget = (fs < F)[:, None] & (ks < K)[None, :]
    forget = tl.load(f_b + at[None, :] * F + fs[:, None], mask=in_forget, other=0.0)
    bias = tl.load(dt_bias + at, mask=ks < K, other=0.0)
    return taps, forget, bias, tl.exp(tl.load(a_log + head))


@triton.jit
def load_token(q, k, v, f_a, b, row, live, head, H: tl.constexpr, K: tl.constexpr, F: tl.constexpr):
    """Return raw rows (tile [4, K]), forget input f32[F] and beta of a token; 0 if not `live`."""
    ks, fs = tl.arange(0, triton.next_power_of_2(K)), tl.arange(0, triton.next_power_of_2(F))
    part = tl.arange(0, 4)[:, None]
    low = tl.load(f_a + row * F + fs, mask=fs < tl.where(live, F, 0), other=0.0).to(tl.float32)
    raw_at = by_part(part, q, k, v) + (row * (H * K) + head * K + ks)[None, :]
    mask = (part < tl.where(live, 3, 0)) & (ks < K)[None, :]
    raw = tl.load(raw_at, mask=mask, other=0.0).to(tl.float32)
    beta = sigmoid(tl.load(b + row * H + head, mask=live, other=0.0).to(tl.float32))
    return raw, low, beta


@triton.jit
def derive(
    q, f_a, raw, low, history, weights,
    LOWER_BOUND: tl.constexpr, SCALE: tl.constexpr, L2_EPS: tl.constexpr,
):  # fmt: skip
    """Return what a token does to its head's state.

    Args:
        q: Pointer of the activation dtype, that the convolved rows are rounded to.
        f_a: Pointer of the dtype that the forget product is rounded to.
        raw: Tile f32[4, K].
        low: f32[F].
        history: Three tiles f32[4, K].
        weights: From `load_weights`.
        LOWER_BOUND: Of the gate, or "none".
        SCALE: Factor of the normalised query.
        L2_EPS: Epsilon of the norms.

    Returns:
        query, key, value f32[K], convolved but not normalised: the norms are factors of what these
        give, applied after its sums; loss = decay - 1 and log decay f32[K]; query . key of the
        unnormalised; the factors that normalise query and key.
    """
    taps, forget, bias, rate = weights
    f = rounded(tl.sum(forget.to(tl.float32) * low[:, None], 0), f_a)
    gate = log_decay(f + bias, rate, LOWER_BOUND)
    part = tl.arange(0, 4)[:, None]
    convolved = rounded(convolve(raw, history, taps), q)
    query, key, value, loss = split_parts(tl.where(part < 3, convolved, expm1(gate)[None, :]))
    qq, kk, qk = tl.reduce((query * query, key * key, query * key), 0, add_triples)
    norm_q, norm_k = SCALE * tl.rsqrt(qq + L2_EPS), tl.rsqrt(kk + L2_EPS)
    return query, key, value, loss, gate, qk, norm_q, norm_k


@triton.jit
def load_gate(z, o_norm, row, head, columns, live, H: tl.constexpr, K: tl.constexpr):
    """Return what scales the normal output in columns [N, W] of a head: weight and gate input."""
    weight = tl.load(o_norm + columns, mask=columns < K, other=0.0)
    at = z + row * (H * K) + head * K + columns
    return weight, tl.load(at, mask=columns < tl.where(live, K, 0), other=0.0).to(tl.float32)


@triton.jit
def write_output(
    out, output, scale, row, head, columns, live,
    H: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Store the gated norm of `output` f32[N, W], rounded before; `scale` is from `load_gate`."""
    output = rounded(output, out)
    weight, gate = scale
    normal = output * tl.rsqrt(tl.sum(tl.sum(output * output, 1), 0) / K + EPS)
    at = out + row * (H * K) + head * K + columns
    result = (normal * weight * sigmoid(gate)).to(out.dtype.element_ty)
    tl.store(at, result, mask=columns < tl.where(live, K, 0))


@triton.jit
def clear_padding(
    out, seg_start, seg_tokens, segments, rows, segment, head,
    H: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Zero a head of those rows segment + i * segments, i < R, that no segment owns."""
    SCAN: tl.constexpr = 128
    row = segment + tl.arange(0, R) * segments
    owners = tl.zeros([R], tl.int32)
    for first in range(0, segments, SCAN):
        ids = first + tl.arange(0, SCAN)
        starts = tl.load(seg_start + ids, mask=ids < segments, other=-1)[None, :]
        tokens = tl.load(seg_tokens + ids, mask=ids < segments, other=0)[None, :]
        owned = (starts <= row[:, None]) & (row[:, None] < starts + tokens)
        owners += tl.sum(owned.to(tl.int32), 1)
    ks = tl.arange(0, triton.next_power_of_2(K))[None, :]
    at = out + row[:, None].to(tl.int64) * (H * K) + (head * K + ks)
    mask = ((owners == 0) & (row < rows))[:, None] & (ks < K)
    tl.store(at, tl.zeros(mask.shape, out.dtype.element_ty), mask=mask)
