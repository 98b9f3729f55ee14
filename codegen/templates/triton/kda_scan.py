"""Later stages of kda_fb's prefill: the scan over the chunks of a segment, and the gated norm.

A block of the scan holds the columns `first .. first + WIDTH` of one head's state and walks the
chunks of one segment. With what `kda_chunk` left in the workspace, a chunk is

    E = U - W S    O = reads S + P E    S = diag(exp(G_last)) S + carried^T E

S and all sums are f32. Dot operands are f16 where activations are bf16: they hold 11 bits. What is
linear in V is divided by the largest power of two below any |v| of the segment and |S| before it,
so that they never leave f16's range.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs
from k3c.codegen.templates.triton.kda_rows import CHUNK, fast_sigmoid, power_of_two


@triton.jit
def keep_raw(x, history, borrowed, start, tokens, at, history_at,
             WIDTH: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """Replace a slot's rows by the last three raw rows of its request, channels `at`."""
    place = tl.arange(0, 4)[:, None]
    row = tokens - 3 + place
    kept = (place < 3) & (row < 0) & (row >= -borrowed)
    old = tl.load(history + (row + 3) * CHANNELS + history_at[None, :], mask=kept, other=0.0)
    fresh = (place < 3) & (row >= 0)
    new = tl.load(x + (start + row).to(tl.int64) * WIDTH + at[None, :], mask=fresh, other=0.0)
    # Old rows move towards the front of the same slot: all are read before any is written.
    tl.debug_barrier()
    value = tl.where(row < 0, old, new)
    tl.store(history + place * CHANNELS + history_at[None, :], value, mask=place < 3)


@triton.jit
def segment_scale(workspace, first, chunks, start_largest,
                  H: tl.constexpr, BLOCK: tl.constexpr, SCALE_AT: tl.constexpr):  # fmt: skip
    """Return the power of two that a segment's columns are divided by, and its inverse."""
    SPAN: tl.constexpr = 256
    largest = start_largest
    for begin in range(0, chunks, SPAN):
        c = begin + tl.arange(0, SPAN)
        at = (first + c) * (H * BLOCK) + SCALE_AT
        found = tl.load(workspace + at, mask=c < chunks, other=0.0)
        largest = tl.maximum(largest, tl.max(found, 0))
    return power_of_two(largest)


@triton.jit
def gated_norm(o, gate, weight, pointer, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """Return rms_norm(o, weight) * sigmoid(gate) of rows f32[R, WIDTH], o rounded before."""
    o = o.to(pointer.dtype.element_ty).to(tl.float32)
    scale = tl.rsqrt(tl.sum(o * o, 1) * (1.0 / WIDTH) + EPS)
    return o * scale[:, None] * weight[None, :] * fast_sigmoid(gate)


# Longer than a function here may be: one loop whose carried values are all of the state.
# longer than the budget: the loop over chunks and what it carries stand together.
@triton.jit
def kda_scan(
    q, k, v, z, f_a, b, conv_q, conv_k, conv_v, a_log, dt_bias, o_norm, f_b, conv_state, kda_state,
    seg_start, seg_tokens, slots, context, out, workspace, rows, segments,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr,
    SEGMENTS: tl.constexpr, BLOCK: tl.constexpr, SCALE_AT: tl.constexpr, EPS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Walk one segment for WIDTH columns of one head."""
    DOT: tl.constexpr = tl.float32 if q.dtype.element_ty == tl.float32 else tl.float16
    SPLITS: tl.constexpr = V // WIDTH
    FUSED: tl.constexpr = SPLITS == 1
    split = tl.program_id(0) % SPLITS
    head = (tl.program_id(0) // SPLITS) % H
    segment = tl.program_id(0) // (SPLITS * H)

    wait_for_inputs(PDL)
    release_dependents(PDL)
    index = tl.arange(0, SEGMENTS)
    all_tokens = tl.load(seg_tokens + index, mask=index < segment, other=0)
    first = tl.sum((all_tokens + (CHUNK - 1)) // CHUNK, 0)
    tokens = tl.load(seg_tokens + segment)
    if tokens <= 0:
        return
    chunks = (tokens + (CHUNK - 1)) // CHUNK
    start = tl.load(seg_start + segment)
    slot = tl.load(slots + segment).to(tl.int64)
    known = tl.load(context + segment) > 0

    i = tl.arange(0, CHUNK)
    ks = tl.arange(0, K)
    vs = split * WIDTH + tl.arange(0, WIDTH)
    state_at = kda_state + (slot * H + head) * (K * V) + (ks[:, None] * V + vs[None, :])
    state = tl.load(state_at, mask=ks[:, None] < tl.where(known, K, 0), other=0.0).to(tl.float32)
    # The head's block of the first chunk.
    first = first.to(tl.int64)
    base = workspace + head * BLOCK
    start_largest = tl.max(tl.max(tl.abs(state), 1), 0)
    scale, unscale = segment_scale(base, first, chunks, start_largest, H, BLOCK, SCALE_AT)
    state *= unscale
    weight = tl.load(o_norm + vs)

    DECAY_AT: tl.constexpr = SCALE_AT - K
    by_key = i[:, None] * K + ks[None, :]
    by_value = i[:, None] * V + vs[None, :]
    by_chunk = i[:, None] * CHUNK + i[None, :]
    row = start.to(tl.int64)
    for c in tl.range(0, chunks, num_stages=STAGES):
        block = base + (first + c) * (H * BLOCK)
        at = block.to(tl.pointer_type(DOT))
        w = tl.load(at + by_key)
        reads = tl.load(at + CHUNK * K + by_key)
        carried = tl.load(at + 2 * CHUNK * K + by_key)
        u = tl.load(at + 3 * CHUNK * K + by_value)
        p = tl.load(at + 3 * CHUNK * K + CHUNK * V + by_chunk)
        decay = tl.load(block + DECAY_AT + ks)
        u_scale = tl.load(block + SCALE_AT) * unscale
        live = (i < tokens - c * CHUNK)[:, None]
        row_at = (row + c * CHUNK) * (H * V) + head * V
        out_at = row_at + (i[:, None] * (H * V) + vs[None, :])

        narrow = state.to(DOT)
        error = u.to(tl.float32) * u_scale - tl.dot(w, narrow, input_precision="ieee")
        error = error.to(DOT)
        o = tl.dot(reads, narrow, input_precision="ieee")
        o = tl.dot(p, error, o, input_precision="ieee") * scale
        state = tl.dot(tl.trans(carried), error, state * decay[:, None], input_precision="ieee")
        if FUSED:
            gate = tl.load(z + out_at, mask=live, other=0.0).to(tl.float32)
            o = gated_norm(o, gate, weight, out, V, EPS)
        tl.store(out + out_at, o.to(out.dtype.element_ty), mask=live)
    tl.store(state_at, (state * scale).to(kda_state.dtype.element_ty))

    CHANNELS: tl.constexpr = H * (2 * K + V)
    history = conv_state + slot * (3 * CHANNELS)
    if split == 0:
        borrowed = tl.where(known, 3, 0)
        at = head * K + ks
        keep_raw(q, history, borrowed, start, tokens, at, at, H * K, CHANNELS)
        keep_raw(k, history, borrowed, start, tokens, at, H * K + at, H * K, CHANNELS)
        values = head * V + tl.arange(0, V)
        keep_raw(v, history, borrowed, start, tokens, values, 2 * H * K + values, H * V, CHANNELS)


@triton.jit
def kda_norm(
    q, k, v, z, f_a, b, conv_q, conv_k, conv_v, a_log, dt_bias, o_norm, f_b, conv_state, kda_state,
    seg_start, seg_tokens, slots, context, out, workspace, rows, segments,
    H: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalise and gate TILE heads of rows in place."""
    wait_for_inputs(PDL)
    release_dependents(PDL)
    heads = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, V)
    inside = (heads < rows.to(tl.int64) * H)[:, None]
    at = heads[:, None] * V + columns[None, :]
    o = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
    result = gated_norm(o, gate, tl.load(o_norm + columns), out, V, EPS)
    # Rows that no segment owns are zero, whatever their gate holds.
    result = tl.where(o == 0.0, 0.0, result)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
