"""kda_fb of decode buckets: all of a KDA layer between its projections, in one launch.

A block is one head of one segment. The state's K x V values are read once into registers, where
S'^T k, S'^T q and the update find them, and written once. They do not depend on the kernels before
this one (a step wrote them, or a fold before the step's first layer), so they are asked for before
the wait. With e = beta (v - S'^T k) the output is S'^T q + (k . q) e.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs
from k3c.codegen.templates.triton.kda_parts import add_pairs, load_history, store_history
from k3c.codegen.templates.triton.kda_token import (
    clear_padding,
    derive,
    load_gate,
    load_token,
    load_weights,
    write_output,
)
from k3c.codegen.templates.triton.prefetch import LINE_BYTES, into_l2


# Longer than a function here may be: the signature of an op with 20 operands and results.
@triton.jit
def prepare(
    q, k, v, z, f_a, b, conv_q, conv_k, conv_v, a_log, dt_bias, o_norm, f_b, slot_at, row, live,
    seen, head, columns, H: tl.constexpr, K: tl.constexpr, F: tl.constexpr,
    LOWER_BOUND: tl.constexpr, SCALE: tl.constexpr, L2_EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Return what a token does to its head's state: see `derive`; beta, history, raw and scale."""
    history = load_history(slot_at, 3 * H * K, tl.where(seen > 0, K, 0), K)
    weights = load_weights(conv_q, conv_k, conv_v, a_log, dt_bias, f_b, head, H, K, F)
    wait_for_inputs(PDL)
    raw, low, beta = load_token(q, k, v, f_a, b, row, live, head, H, K, F)
    scale = load_gate(z, o_norm, row, head, columns, live, H, K)
    release_dependents(PDL)
    query, key, value, loss, _, qk, norm_q, norm_k = derive(
        q, f_a, raw, low, history, weights, LOWER_BOUND, SCALE, L2_EPS
    )
    return query, key, value, loss, qk, norm_q, norm_k, beta, history, raw, scale


# Longer than a function here may be: the signature of an op with 20 operands and results.
# longer than the budget: loads stand in the order in which they must be issued.
@triton.jit
def kda_decode_whole(
    q, k, v, z, f_a, b, conv_q, conv_k, conv_v, a_log, dt_bias, o_norm, f_b, conv_state, kda_state,
    seg_start, seg_tokens, slots, context, out, rows,
    H: tl.constexpr, K: tl.constexpr, F: tl.constexpr,
    LOWER_BOUND: tl.constexpr, SCALE: tl.constexpr, L2_EPS: tl.constexpr, EPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Advance one head of one segment by its token; the state waits in registers."""
    segment, head = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(seg_start + segment)
    live = tl.load(seg_tokens + segment) > 0
    seen = tl.where(live, tl.load(context + segment), 0)
    slot = tl.load(slots + segment).to(tl.int64)
    row = tl.where(live, start, 0).to(tl.int64)

    ks = tl.arange(0, triton.next_power_of_2(K))
    columns = ks[None, :]
    state_at = kda_state + (slot * H + head) * (K * K) + (ks[:, None] * K + columns)
    known = (ks < tl.where(seen > 0, K, 0))[:, None] & (columns < K)
    state = tl.load(state_at, mask=known, other=0.0).to(tl.float32)

    part = tl.arange(0, 4)[:, None]
    slot_at = conv_state + slot * (9 * H * K) + (part * (H * K) + head * K + columns)
    query, key, value, loss, qk, norm_q, norm_k, beta, history, raw, scale = prepare(
        q, k, v, z, f_a, b, conv_q, conv_k, conv_v, a_log, dt_bias, o_norm, f_b, slot_at, row,
        live, seen, head, columns, H, K, F, LOWER_BOUND, SCALE, L2_EPS, PDL,
    )  # fmt: skip
    # The norms of query and key are factors of what they give, applied after its sums.
    decayed_k, decayed_q = key + key * loss, query + query * loss
    reads = (state * decayed_k[:, None], state * decayed_q[:, None])
    read_k, read_q = tl.reduce(reads, 0, add_pairs)
    update = (value - read_k * norm_k) * (beta * norm_k)
    state += state * loss[:, None] + key[:, None] * update[None, :]
    live_rows = ks < tl.where(live, K, 0)
    mask = live_rows[:, None] & (columns < K)
    tl.store(state_at, state.to(kda_state.dtype.element_ty), mask=mask)
    output = (read_q + qk * update) * norm_q
    write_output(out, output[None, :], scale, row, head, columns, live, H, K, EPS)
    store_history(slot_at, 3 * H * K, history, raw, tl.where(live, K, 0), K)
    # The block of segment s looks after row s too: mostly the same row.
    if (start != segment) | (not live):
        clear_padding(out, seg_start, seg_tokens, rows, rows, segment, head, H, K, 1)


# Longer than a function here may be: the signature of an op with 20 operands and results.
# longer than the budget: loads stand in the order in which they must be issued.
@triton.jit
def kda_decode_strips(
    q, k, v, z, f_a, b, conv_q, conv_k, conv_v, a_log, dt_bias, o_norm, f_b, conv_state, kda_state,
    seg_start, seg_tokens, slots, context, out, rows,
    H: tl.constexpr, K: tl.constexpr, F: tl.constexpr,
    LOWER_BOUND: tl.constexpr, SCALE: tl.constexpr, L2_EPS: tl.constexpr, EPS: tl.constexpr,
    W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Advance one head of one segment by its token; the state passes in strips of W columns."""
    segment, head = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(seg_start + segment)
    live = tl.load(seg_tokens + segment) > 0
    seen = tl.where(live, tl.load(context + segment), 0)
    slot = tl.load(slots + segment).to(tl.int64)
    row = tl.where(live, start, 0).to(tl.int64)

    STRIPS: tl.constexpr = triton.next_power_of_2(K) // W
    strips, within = tl.arange(0, STRIPS)[:, None], tl.arange(0, W)[None, :]
    columns = strips * W + within
    ks = tl.arange(0, triton.next_power_of_2(K))
    of_head = kda_state + (slot * H + head) * (K * K)
    BYTES: tl.constexpr = K * K * kda_state.dtype.element_ty.primitive_bitwidth // 8
    lines = tl.arange(0, triton.next_power_of_2(tl.cdiv(BYTES, LINE_BYTES))) * LINE_BYTES
    lines = tl.where(lines < tl.where(seen > 0, BYTES, 0), lines, 0)
    into_l2(of_head.to(tl.pointer_type(tl.uint8)) + lines, PDL)
    part = tl.arange(0, 4)[:, None]
    slot_at = conv_state + slot * (9 * H * K) + (part * (H * K) + head * K + ks[None, :])
    query, key, value, loss, qk, norm_q, norm_k, beta, history, raw, scale = prepare(
        q, k, v, z, f_a, b, conv_q, conv_k, conv_v, a_log, dt_bias, o_norm, f_b, slot_at, row,
        live, seen, head, columns, H, K, F, LOWER_BOUND, SCALE, L2_EPS, PDL,
    )  # fmt: skip
    decayed_k, decayed_q = key + key * loss, query + query * loss
    values = tl.reshape(value, [STRIPS, W])
    output = tl.zeros([STRIPS, W], tl.float32)
    state_at = of_head + (ks[:, None] * K + within)
    known_rows, live_rows = ks < tl.where(seen > 0, K, 0), ks < tl.where(live, K, 0)
    for strip in range(STRIPS):
        at = state_at + strip * W
        inside = within < K - strip * W
        state = tl.load(at, mask=known_rows[:, None] & inside, other=0.0).to(tl.float32)
        reads = (state * decayed_k[:, None], state * decayed_q[:, None])
        read_k, read_q = tl.reduce(reads, 0, add_pairs)
        wanted = tl.sum(tl.where(strips == strip, values, 0.0), 0)
        update = (wanted - read_k * norm_k) * (beta * norm_k)
        state += state * loss[:, None] + key[:, None] * update[None, :]
        mask = live_rows[:, None] & inside
        tl.store(at, state.to(kda_state.dtype.element_ty), mask=mask)
        output = tl.where(strips == strip, ((read_q + qk * update) * norm_q)[None, :], output)
    write_output(out, output, scale, row, head, columns, live, H, K, EPS)
    store_history(slot_at, 3 * H * K, history, raw, tl.where(live, K, 0), K)
    if (start != segment) | (not live):
        clear_padding(out, seg_start, seg_tokens, rows, rows, segment, head, H, K, 1)
