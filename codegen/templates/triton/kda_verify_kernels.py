"""kda_verify and kda_fold: tokens that may not stand, and the states after those that do.

A block of the verify kernel is one head of one segment: it reads the state once, walks the tokens
with the state in registers and writes, instead of the state, what each token does to it. The fold
applies that to the state in one pass, with the decays of all its tokens as one factor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs
from k3c.codegen.templates.triton.kda_parts import add_pairs, expm1, load_history
from k3c.codegen.templates.triton.kda_token import (
    clear_padding,
    derive,
    load_gate,
    load_token,
    load_weights,
    write_output,
)


# Longer than a function here may be: the signature of an op with 24 operands and results.
# longer than the budget: the loop over tokens and the state that it carries stand together.
@triton.jit
def kda_verify(
    q, k, v, z, f_a, b, conv_q, conv_k, conv_v, a_log, dt_bias, o_norm, f_b, conv_state, kda_state,
    rec_k, rec_g, rec_u, rec_conv, seg_start, seg_tokens, slots, context, out, rows, segments,
    H: tl.constexpr, K: tl.constexpr, F: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr,
    LOWER_BOUND: tl.constexpr, SCALE: tl.constexpr, L2_EPS: tl.constexpr, EPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Walk the tokens of one segment for one head."""
    segment, head = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(seg_start + segment)
    tokens = tl.load(seg_tokens + segment)
    seen = tl.where(tokens > 0, tl.load(context + segment), 0)
    slot = tl.load(slots + segment).to(tl.int64)

    ks = tl.arange(0, triton.next_power_of_2(K))
    columns = ks[None, :]
    state_at = kda_state + (slot * H + head) * (K * K) + (ks[:, None] * K + columns)
    known = tl.where(seen > 0, K, 0)
    mask = (ks < known)[:, None] & (columns < K)
    state = tl.load(state_at, mask=mask, other=0.0).to(tl.float32)
    part = tl.arange(0, 4)[:, None]
    of_head = part * (H * K) + head * K + columns
    history = load_history(conv_state + slot * (9 * H * K) + of_head, 3 * H * K, known, K)
    h0, h1, h2 = history
    weights = load_weights(conv_q, conv_k, conv_v, a_log, dt_bias, f_b, head, H, K, F)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    in_tile = (part < 3) & (columns < K)
    for token in range(tokens):
        row = (start + token).to(tl.int64)
        raw, low, beta = load_token(q, k, v, f_a, b, row, True, head, H, K, F)
        scale = load_gate(z, o_norm, row, head, columns, True, H, K)
        query, key, value, loss, gate, qk, norm_q, norm_k = derive(
            q, f_a, raw, low, (h0, h1, h2), weights, LOWER_BOUND, SCALE, L2_EPS
        )
        decayed_k, decayed_q = key + key * loss, query + query * loss
        reads = (state * decayed_k[:, None], state * decayed_q[:, None])
        read_k, read_q = tl.reduce(reads, 0, add_pairs)
        update = (value - read_k * norm_k) * beta
        output = (read_q + qk * norm_k * update) * norm_q
        normal_key = key * norm_k
        state += state * loss[:, None] + normal_key[:, None] * update[None, :]
        write_output(out, output[None, :], scale, row, head, columns, True, H, K, EPS)
        record = (slot * WIDTH + token) * H * K + head * K + ks
        tl.store(rec_k + record, normal_key, mask=ks < K)
        # The first token of a state that holds nothing: the fold must forget what the slot held.
        forgets = (seen == 0) & (token == 0)
        tl.store(rec_g + record, tl.where(forgets, float("-inf"), gate), mask=ks < K)
        tl.store(rec_u + record, update, mask=ks < K)
        raw_at = rec_conv + (slot * WIDTH + token) * (3 * H * K) + of_head
        tl.store(raw_at, raw.to(rec_conv.dtype.element_ty), mask=in_tile)
        h0, h1, h2 = h1, h2, raw
    clear_padding(out, seg_start, seg_tokens, segments, rows, segment, head, H, K, R)


@triton.jit
def _fold_history(
    conv_state, rec_conv, slot, count, fresh, head,
    H: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Let a head's raw rows end with those of the first `count` tokens."""
    part = tl.arange(0, 4)[None, :, None]
    ks = tl.arange(0, triton.next_power_of_2(K))[None, None, :]
    row = tl.arange(0, 4)[:, None, None]
    of_head = part * (H * K) + head * K + ks
    first = conv_state + slot * (9 * H * K) + of_head
    inside = (row < 3) & (part < 3) & (ks < K)
    # Rows count, count + 1, count + 2 of the old rows and the tokens' rows, in a line.
    source = row + count
    old = inside & (source < tl.where(fresh, 0, 3))
    kept = tl.load(first + source * (3 * H * K), mask=old, other=0.0)
    records = rec_conv + (slot * WIDTH + tl.maximum(source - 3, 0)) * (3 * H * K) + of_head
    new = tl.load(records, mask=inside & (source >= 3), other=0.0)
    # Threads that share an element must all have read it.
    tl.debug_barrier()
    tl.store(first + row * (3 * H * K), tl.where(source < 3, kept, new), mask=inside)


@triton.jit
def kda_fold(
    conv_state, kda_state, rec_k, rec_g, rec_u, rec_conv, slots, accepted, pool,
    H: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Fold the accepted tokens of one request into W columns of one head's state."""
    STRIPS: tl.constexpr = triton.next_power_of_2(K) // W
    strip, task = tl.program_id(0) % STRIPS, tl.program_id(0) // STRIPS
    head, request = task % H, task // H
    wait_for_inputs(PDL)
    count = tl.load(accepted + request)
    slot = tl.load(slots + request).to(tl.int64)
    ks = tl.arange(0, triton.next_power_of_2(K))
    columns = strip * W + tl.arange(0, W)
    live = tl.where(count > 0, K, 0)
    first_record = slot * (WIDTH * H * K) + head * K
    opening = tl.load(rec_g + first_record, mask=count > 0, other=0.0)
    fresh = opening == float("-inf")
    state_at = kda_state + (slot * H + head) * (K * K) + (ks[:, None] * K + columns[None, :])
    known = (ks < tl.where(fresh, 0, live))[:, None] & (columns < K)[None, :]
    state = tl.load(state_at, mask=known, other=0.0).to(tl.float32)
    release_dependents(PDL)

    later = tl.zeros([triton.next_power_of_2(K)], tl.float32)
    written = tl.zeros(state.shape, tl.float32)
    for i in tl.static_range(WIDTH):
        token = WIDTH - 1 - i
        record = first_record + token * (H * K)
        limit = tl.where(token < count, K, 0)
        key = tl.load(rec_k + record + ks, mask=ks < limit, other=0.0)
        gate = tl.load(rec_g + record + ks, mask=ks < limit, other=0.0)
        update = tl.load(rec_u + record + columns, mask=columns < limit, other=0.0)
        written += (key * tl.exp(later))[:, None] * update[None, :]
        later += gate
    # A fresh state is 0, whose loss does not matter: -1.
    state += state * expm1(later)[:, None] + written
    stored = (ks < live)[:, None] & (columns < K)[None, :]
    tl.store(state_at, state.to(kda_state.dtype.element_ty), mask=stored)
    if (strip == 0) & (count > 0):
        _fold_history(conv_state, rec_conv, slot, count, fresh, head, H, K, WIDTH)
