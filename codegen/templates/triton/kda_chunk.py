"""First stage of kda_fb's prefill: all that a chunk of one head needs of its own tokens.

With G the running sum of log decays inside the chunk and D_ij = exp(G_i - G_j), a block computes

    L_ij = beta_i K_i . K_j D_ij (j < i)      X = (I + L)^-1 diag(beta)
    W = X (K exp(G))    U = X V    P_ij = Q_i . K_j D_ij (j <= i)
    reads = Q exp(G)    carried = K exp(G_last - G)

and leaves them in the workspace for the scan. No exponential leaves float32's range, and none that
is rounded to a 16-bit dot operand leaves [0, 1]: exponents are sums of g inside groups of rows, and
a product of two groups' rows goes through the boundary between them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs
from k3c.codegen.templates.triton.kda_parts import log_decay
from k3c.codegen.templates.triton.kda_rows import (
    CHUNK,
    LOG2_E,
    convolve_head,
    fast_sigmoid,
    load_rows,
    narrowed,
    power_of_two,
    store_rows,
)

GROUP = tl.constexpr(32)
GROUPS = tl.constexpr(2)
# 2 to anything below is zero in float32; sums of such decays stay exact enough to subtract.
NOTHING_LEFT = tl.constexpr(-150.0)
# Tensor cores cut an f32 operand to 10 bits of mantissa: log2 of the part lost on average.
LOSS = tl.constexpr(0.0005)


@triton.jit
def find_chunk(seg_start, seg_tokens, segments, chunk, SEGMENTS: tl.constexpr):
    """Return the segment of a chunk, the segment's first row and tokens, the chunk's place in it.

    Chunks are counted over the segments in order; the segment is -1 past the last chunk.
    """
    index = tl.arange(0, SEGMENTS)
    starts = tl.load(seg_start + index, mask=index < segments, other=0)
    tokens = tl.load(seg_tokens + index, mask=index < segments, other=0)
    chunks = (tokens + (CHUNK - 1)) // CHUNK
    ends = tl.cumsum(chunks, 0)
    here = (ends - chunks <= chunk) & (chunk < ends)
    segment = tl.sum(tl.where(here, index + 1, 0), 0) - 1
    start = tl.sum(tl.where(here, starts, 0), 0)
    count = tl.sum(tl.where(here, tokens, 0), 0)
    place = chunk - tl.sum(tl.where(here, ends - chunks, 0), 0)
    return segment, start, count, place


@triton.jit
def clear_rows(out, seg_start, seg_tokens, segments, rows, chunk, head,
               H: tl.constexpr, V: tl.constexpr, SEGMENTS: tl.constexpr):  # fmt: skip
    """Zero head `head` of those of CHUNK rows that no segment owns."""
    index = tl.arange(0, SEGMENTS)
    starts = tl.load(seg_start + index, mask=index < segments, other=0)
    tokens = tl.load(seg_tokens + index, mask=index < segments, other=0)
    row = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = (starts[None, :] <= row[:, None]) & (row[:, None] < (starts + tokens)[None, :])
    owners = tl.sum(inside.to(tl.int32), 1)
    columns = head * V + tl.arange(0, V)
    at = row.to(tl.int64)[:, None] * (H * V) + columns[None, :]
    zero = tl.zeros([CHUNK, V], out.dtype.element_ty)
    tl.store(out + at, zero, mask=((row < rows) & (owners == 0))[:, None])


@triton.jit
def tf32_order(x):
    """Swap columns as the two operands of a tf32 product may: it spares a move between threads."""
    R: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, [R, N // 8, 4, 2]), (0, 1, 3, 2)), [R, N])


@triton.jit
def group_sums(g, SIZE: tl.constexpr):
    """Return sums f32[CHUNK, K] inside groups of SIZE rows: up to each row, and after it."""
    K: tl.constexpr = g.shape[1]
    grouped = tl.reshape(g, [CHUNK // SIZE, SIZE, K])
    upto = tl.cumsum(grouped, 1)
    after = tl.cumsum(grouped, 1, reverse=True) - grouped
    return tl.reshape(upto, [CHUNK, K]), tl.reshape(after, [CHUNK, K])


@triton.jit
def sum_rows(factors, g, DOT: tl.constexpr):
    """Return factors @ g, with g in two parts where a dot operand holds 11 bits."""
    if tl.float32 == DOT:
        return tl.dot(factors, g, input_precision="ieee")
    else:
        high = g.to(DOT)
        low = (g - high.to(tl.float32)).to(DOT)
        return tl.dot(factors, high, tl.dot(factors, low))


@triton.jit
def products(x, y, DOT: tl.constexpr):
    """Return x y^T with operands in the dtype DOT, f32 sums."""
    return tl.dot(x.to(DOT), tl.trans(y.to(DOT)), input_precision="ieee")


@triton.jit
def add_halves(total, x, key, g, SIZE: tl.constexpr, DOT: tl.constexpr):
    """Return total with x_i . K_j D_ij set for j in the first and i in the second half of rows."""
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    upto, after = group_sums(g, SIZE)
    part = products(x * tl.exp2(upto), key * tl.exp2(after), DOT)
    return tl.where(
        (i // SIZE == j // SIZE + 1) & (i // (2 * SIZE) == j // (2 * SIZE)), part, total
    )


@triton.jit
def small_groups(x, key, g, DOT: tl.constexpr):
    """Return x_i . K_j D_ij for j < i of one group of 32, from halves of 16, 8, 4, 2 and 1 rows."""
    total = tl.zeros([CHUNK, CHUNK], tl.float32)
    total = add_halves(total, x, key, g, 1, DOT)
    total = add_halves(total, x, key, g, 2, DOT)
    total = add_halves(total, x, key, g, 4, DOT)
    total = add_halves(total, x, key, g, 8, DOT)
    return add_halves(total, x, key, g, 16, DOT)


@triton.jit
def inverse(lower, DOT: tl.constexpr):
    """Return (I + lower)^-1 f32[CHUNK, CHUNK] of a strictly lower triangular matrix.

    Diagonal blocks are inverted by pairs of halves, smallest first: every factor is itself such an
    inverse, whose entries stay below 1 here, where powers of `lower` would not.
    """
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    negative = (-lower).to(DOT)
    result = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -lower, 0.0))
    for level in tl.static_range(1, 6):
        SIZE = 1 << level
        known = result.to(DOT)
        step = tl.dot(negative, known, input_precision="ieee").to(DOT)
        # `known` is block diagonal: its product's corners are those of the larger blocks' inverses.
        corners = tl.dot(known, step, input_precision="ieee")
        inside = (i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE != j // SIZE)
        result = tl.where(inside, corners, result)
    return result


@triton.jit
def spread(x, factor, DOT: tl.constexpr):
    """Return x f32[GROUPS, GROUP, N] times factor f32[GROUPS, N] as DOT[CHUNK, N]."""
    N: tl.constexpr = x.shape[2]
    return tl.reshape(x * factor[:, None, :], [CHUNK, N]).to(DOT)


# Longer than a function here may be: the dataflow of a chunk, whose parts share its registers.
# longer than the budget: the algebra of a chunk (spec 3.5) reads best in one place; its values
# stay in registers.
@triton.jit
def kda_chunk(
    q, k, v, z, f_a, b, conv_q, conv_k, conv_v, a_log, dt_bias, o_norm, f_b, conv_state, kda_state,
    seg_start, seg_tokens, slots, context, out, workspace, rows, segments,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, SEGMENTS: tl.constexpr,
    PART: tl.constexpr, BLOCK: tl.constexpr, SCALE_AT: tl.constexpr,
    LOWER_BOUND: tl.constexpr, DIRECT: tl.constexpr, DIAGONAL: tl.constexpr,
    SCALE: tl.constexpr, L2_EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one chunk of one head."""
    DOT: tl.constexpr = tl.float32 if q.dtype.element_ty == tl.float32 else tl.float16
    chunk = tl.program_id(0) // H
    head = tl.program_id(0) % H
    i = tl.arange(0, CHUNK)
    fs = tl.arange(0, F)
    WIDE: tl.constexpr = f_b.dtype.element_ty == tl.float32
    CUDA: tl.constexpr = DIAGONAL == "tf32"
    CUT: tl.constexpr = LOSS if CUDA else 0.0

    wait_for_inputs(PDL)
    release_dependents(PDL)
    segment, start, tokens, place = find_chunk(seg_start, seg_tokens, segments, chunk, SEGMENTS)
    if chunk * CHUNK < rows:
        clear_rows(out, seg_start, seg_tokens, segments, rows, chunk, head, H, V, SEGMENTS)
    if segment < 0:
        return
    live = tl.minimum(tokens - place * CHUNK, CHUNK)
    row = (start + place * CHUNK).to(tl.int64)
    slot = tl.load(slots + segment).to(tl.int64)
    past = tl.load(context + segment)
    borrowed = tl.where((past > 0) & (place == 0), 3, 0)
    CHANNELS: tl.constexpr = H * (2 * K + V)
    history = conv_state + slot * (3 * CHANNELS)
    rate = tl.exp(tl.load(a_log + head))
    beta = fast_sigmoid(tl.load(b + (row + i) * H + head, mask=i < live, other=0.0).to(tl.float32))
    low = tl.load(
        f_a + row * F + (i[:, None] * F + fs[None, :]), mask=(i < live)[:, None], other=0.0
    )
    if WIDE:
        low = low.to(tl.float32)
    block = workspace + (chunk.to(tl.int64) * H + head) * BLOCK
    at = block.to(tl.pointer_type(DOT))
    AT_READS: tl.constexpr = CHUNK * K
    AT_CARRIED: tl.constexpr = 2 * CHUNK * K
    AT_VALUES: tl.constexpr = 3 * CHUNK * K
    AT_MIXED: tl.constexpr = 3 * CHUNK * K + CHUNK * V

    # Keys and queries wait where U and `reads` will be: in registers they would not fit.
    window = (history, borrowed, row, place, live)
    squares, _ = convolve_head(k, conv_k, window, head * K, (H + head) * K, at + AT_VALUES,
                               K, PART, H * K, CHANNELS, CUDA)  # fmt: skip
    key_norm = tl.where(i < live, tl.rsqrt(squares + L2_EPS), 0.0)
    squares, _ = convolve_head(q, conv_q, window, head * K, head * K, at + AT_READS,
                               K, PART, H * K, CHANNELS, CUDA)  # fmt: skip
    query_norm = tl.rsqrt(squares + L2_EPS) * SCALE
    tl.debug_barrier()

    lower = tl.zeros([CHUNK, CHUNK], tl.float32)
    mixed = tl.zeros([CHUNK, CHUNK], tl.float32)
    rounded = at.to(tl.pointer_type(q.dtype.element_ty))
    same = i[:, None] // GROUP == i[None, :] // GROUP
    upper = i[:, None] < i[None, :]
    # A 16-bit part of a decay keeps more of a small one in units of 1 / UNIT.
    UNIT: tl.constexpr = 1.0 if tl.float32 == DOT else 64.0
    if DIRECT:
        factors = tl.where(same, tl.where(upper, -0.5 / UNIT, 0.5 / UNIT), 0.0).to(DOT)
    else:
        factors = tl.where(same & (i[:, None] >= i[None, :]), 1.0 / UNIT, 0.0).to(DOT)
    first_group = tl.arange(0, GROUPS)[:, None] == 0
    for part in tl.range(0, K // PART, num_stages=1):
        key = load_rows(rounded + AT_VALUES + part * PART, CHUNK, PART, K).to(tl.float32)
        query = load_rows(rounded + AT_READS + part * PART, CHUNK, PART, K).to(tl.float32)
        ks = head * K + part * PART + tl.arange(0, PART)
        forget = tl.load(f_b + ks[:, None] * F + fs[None, :])
        f = tl.dot(low, tl.trans(forget.to(low.dtype)), input_precision="ieee")
        f = narrowed(f, f_a, CUDA).to(tl.float32) + tl.load(dt_bias + ks)[None, :]
        if LOWER_BOUND == "none":
            g = tl.maximum((UNIT * LOG2_E) * log_decay(f, rate, LOWER_BOUND), NOTHING_LEFT * UNIT)
            g = tl.where((i < live)[:, None], g, 0.0)
        else:
            root = tl.rsqrt(1.0 + tl.exp2(f * (rate * -LOG2_E)))
            g = root * root * tl.where(i < live, LOWER_BOUND * LOG2_E * UNIT, 0.0)[:, None]

        total = tl.sum(tl.reshape(g, [GROUPS, GROUP, PART]), 1) * (1.0 / UNIT)
        both = tl.sum(total, 0)
        decays = block + SCALE_AT - K + part * PART + tl.arange(0, PART)
        tl.store(decays, tl.exp2(both))
        if DIRECT:
            # Half of a group's decay on either side keeps 2^sum and its inverse in range.
            sums = tl.reshape(sum_rows(factors, g, DOT), [GROUPS, GROUP, PART])
            rise = tl.exp2(sums + CUT)
            fall = tl.exp2(-(sums - CUT))
            raised = total * 0.5 - CUT
        else:
            rise = tl.exp2(tl.reshape(sum_rows(factors, g, DOT), [GROUPS, GROUP, PART]))
            later = tl.where(same & upper, 1.0 / UNIT, 0.0).to(DOT)
            fall = tl.exp2(tl.reshape(sum_rows(later, g, DOT), [GROUPS, GROUP, PART]))
            raised = tl.zeros_like(total)
        level = tl.exp2(raised)
        beyond = tl.exp2(raised + both[None, :] - total)
        from_start = tl.where(first_group, level, beyond)
        to_end = tl.where(first_group, beyond, level)

        key = tl.reshape(key * key_norm[:, None], [GROUPS, GROUP, PART])
        key_fall = key * fall
        store_rows(at + AT_CARRIED + part * PART, spread(key_fall, to_end, DOT), K)
        across = tl.trans(spread(key_fall, level, DOT))
        inside = tl.trans(tf32_order(tl.reshape(key_fall, [CHUNK, PART])))
        key_rise = key * rise
        store_rows(at + part * PART, spread(key_rise, from_start, DOT), K)
        apart = tl.dot(spread(key_rise, level, DOT), across, input_precision="ieee")
        if DIRECT:
            close = tf32_order(tl.reshape(key_rise, [CHUNK, PART]))
            close = tl.dot(close, inside, input_precision=DIAGONAL)
        else:
            flat = tl.reshape(key, [CHUNK, PART])
            close = small_groups(flat, flat, g * (1.0 / UNIT), DOT)
        lower += tl.where(same, close, apart)

        query *= query_norm[:, None]
        query_rise = tl.reshape(query, [GROUPS, GROUP, PART]) * rise
        store_rows(at + AT_READS + part * PART, spread(query_rise, from_start, DOT), K)
        apart = tl.dot(spread(query_rise, level, DOT), across, input_precision="ieee")
        if DIRECT:
            close = tf32_order(tl.reshape(query_rise, [CHUNK, PART]))
            close = tl.dot(close, inside, input_precision=DIAGONAL)
        else:
            flat = tl.reshape(key, [CHUNK, PART])
            close = small_groups(query, flat, g * (1.0 / UNIT), DOT)
            close = tl.where(i[:, None] == i[None, :], tl.sum(query * flat, 1)[:, None], close)
        mixed += tl.where(same, close, apart)

    mixed = tl.where(i[:, None] >= i[None, :], mixed, 0.0)
    store_rows(at + AT_MIXED, mixed, CHUNK)
    lower = tl.where(i[:, None] > i[None, :], lower * beta[:, None], 0.0)
    solved = (inverse(lower, DOT) * beta[None, :]).to(DOT)

    _, largest = convolve_head(v, conv_v, window, head * V, 2 * H * K + head * V, at + AT_VALUES,
                               V, PART, H * V, CHANNELS, CUDA)  # fmt: skip
    scale, unscale = power_of_two(tl.max(largest, 0))
    tl.store(block + SCALE_AT, scale)
    tl.debug_barrier()
    for part in tl.range(0, K // PART, num_stages=1):
        keys = load_rows(at + part * PART, CHUNK, PART, K)
        store_rows(at + part * PART, tl.dot(solved, keys, input_precision="ieee"), K)
    for part in tl.range(0, V // PART, num_stages=1):
        values = load_rows(rounded + AT_VALUES + part * PART, CHUNK, PART, V).to(tl.float32)
        values = tl.dot(solved, (values * unscale).to(DOT), input_precision="ieee")
        store_rows(at + AT_VALUES + part * PART, values, V)
