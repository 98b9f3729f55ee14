"""Device code of mla_attend: walk cached rows of one request for a tile of (token, head) rows.

Rows of a segment are its tokens times the heads, token-major: row r is head r % n of token r // n.
All heads share the cache, so a tile of rows reads a cached row once, and the keys' first `LATENT`
columns are the values. A tile whose context is long is cut into splits; how many blocks of keys a
split walks depends on the tile's own position only, so that neither the batch nor the length of
the chunk changes a row's bits.
"""

# Triton's own types: pyright cannot follow them through `@triton.jit`.
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs

# Below every score, and finite: a difference of two is never NaN.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def split_share(context, tile, BM: tl.constexpr, BN: tl.constexpr, HEADS: tl.constexpr,
                SPLITS: tl.constexpr, MIN_SHARE: tl.constexpr):  # fmt: skip
    """Blocks of keys of a split of a tile, from the position past the tile's last full row."""
    end = context + ((tile + 1) * BM - 1) // HEADS + 1
    blocks = (end + BN - 1) // BN
    return tl.maximum((blocks + SPLITS - 1) // SPLITS, MIN_SHARE)


@triton.jit
def tile_blocks(context, tokens, tile, BM: tl.constexpr, BN: tl.constexpr, HEADS: tl.constexpr):
    """Blocks of keys that the last row of a tile sees."""
    end = context + tl.minimum(((tile + 1) * BM - 1) // HEADS + 1, tokens)
    return (end + BN - 1) // BN


@triton.jit
def work_items(context, tokens, BM: tl.constexpr, BN: tl.constexpr, HEADS: tl.constexpr,
               SPLITS: tl.constexpr, MIN_SHARE: tl.constexpr):  # fmt: skip
    """Tiles of a segment, and an upper bound of the splits of any of them."""
    tiles = (tokens * HEADS + BM - 1) // BM
    last = tl.maximum(tiles - 1, 0)
    blocks = tile_blocks(context, tokens, last, BM, BN, HEADS)
    # An early tile's share can be smaller, but then its blocks are fewer too: it has at most
    # SPLITS splits, as every tile.
    share = split_share(context, 0, BM, BN, HEADS, SPLITS, MIN_SHARE)
    splits = tl.minimum((blocks + share - 1) // share, SPLITS)
    return tiles, tl.where(tokens > 0, splits, 0)


@triton.jit
def load_block(cache, page, block, keys, table_row, DOT: tl.constexpr,
               PAGE: tl.constexpr, BN: tl.constexpr, LATENT: tl.constexpr,
               ROPE: tl.constexpr, LATENT_PAD: tl.constexpr, ROPE_PAD: tl.constexpr):  # fmt: skip
    """Load a block of cached rows: latents [BN, LATENT_PAD], shared key dims [BN, ROPE_PAD]."""
    WIDTH: tl.constexpr = LATENT + ROPE
    line = tl.arange(0, BN)
    live = block * BN + line < keys
    if PAGE % BN == 0:
        first = page.to(tl.int64) * PAGE + block * BN % PAGE
        base = cache + first * WIDTH
        offset = line * WIDTH
    else:
        position = block * BN + line
        pages = tl.load(table_row + position // PAGE, mask=live, other=0)
        base = cache
        offset = (pages.to(tl.int64) * PAGE + position % PAGE) * WIDTH
    column = tl.arange(0, LATENT_PAD)
    mask = live[:, None]
    if LATENT_PAD != LATENT:
        mask = mask & (column < LATENT)[None, :]
    latent = tl.load(base + offset[:, None] + column[None, :], mask=mask, other=0.0)
    column = tl.arange(0, ROPE_PAD)
    mask = live[:, None]
    if ROPE_PAD != ROPE:
        mask = mask & (column < ROPE)[None, :]
    rope = tl.load(base + offset[:, None] + (LATENT + column)[None, :], mask=mask, other=0.0)
    return latent.to(DOT), rope.to(DOT)


@triton.jit
def page_of(table_row, block, last, PAGE: tl.constexpr, BN: tl.constexpr):
    """Page of a block of keys, or of the last one where `block` is past it."""
    if PAGE % BN == 0:
        return tl.load(table_row + tl.minimum(block, last - 1) * BN // PAGE)
    return 0


@triton.jit
def load_queries(q, at, valid, DOT: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
                 LATENT_PAD: tl.constexpr, ROPE_PAD: tl.constexpr):  # fmt: skip
    """Load rows of queries at element offsets `at`: [BM, LATENT_PAD] and [BM, ROPE_PAD]."""
    column = tl.arange(0, LATENT_PAD)
    mask = valid[:, None] & (column < LATENT)[None, :]
    latent = tl.load(q + at[:, None] + column[None, :], mask=mask, other=0.0)
    column = tl.arange(0, ROPE_PAD)
    mask = valid[:, None] & (column < ROPE)[None, :]
    rope = tl.load(q + at[:, None] + (LATENT + column)[None, :], mask=mask, other=0.0)
    return latent.to(DOT), rope.to(DOT)


@triton.jit
def walk_keys_first(
    q_latent, q_rope, cache, table_row, first, last, seen, keys, DOT: tl.constexpr,
    LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_PAD: tl.constexpr, ROPE_PAD: tl.constexpr,
    PAGE: tl.constexpr, SCALE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Walk blocks `first` .. `last` - 1 of keys with products whose first dimension is long.

    Few rows would leave a matrix unit's first dimension (64 on Hopper) mostly empty; keys fill it.

    Returns:
        The maximum f32[BM], the sum f32[BM] and the unnormalised output f32[LATENT_PAD, BM].
    """
    q_latent = tl.trans(q_latent)
    q_rope = tl.trans(q_rope)
    page = page_of(table_row, first, last, PAGE, BN)
    top = tl.full([BM], LOWEST, tl.float32)
    # Sums stay apart by key until the end: a reduction over keys crosses warps.
    sums = tl.zeros([BN, BM], tl.float32)
    acc = tl.zeros([LATENT_PAD, BM], tl.float32)
    for block in tl.range(first, last):
        next_page = page_of(table_row, block + 1, last, PAGE, BN)
        latent, rope = load_block(cache, page, block, keys, table_row, DOT,
                                  PAGE, BN, LATENT, ROPE, LATENT_PAD, ROPE_PAD)  # fmt: skip
        page = next_page
        scores = tl.dot(latent, q_latent, input_precision="ieee")
        scores = tl.dot(rope, q_rope, scores, input_precision="ieee")
        visible = (block * BN + tl.arange(0, BN))[:, None] < seen[None, :]
        scores = tl.where(visible, scores * SCALE, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        fade = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[None, :])
        sums = sums * fade[None, :] + weights
        acc = tl.dot(tl.trans(latent), weights.to(DOT), acc * fade[None, :], input_precision="ieee")
        top = new_top
    return top, tl.sum(sums, 0), acc


@triton.jit
def walk_rows_first(
    q_latent, q_rope, cache, table_row, first, last, seen, keys, DOT: tl.constexpr,
    LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_PAD: tl.constexpr, ROPE_PAD: tl.constexpr,
    PAGE: tl.constexpr, SCALE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Walk blocks `first` .. `last` - 1 of keys.

    Returns:
        The maximum f32[BM], the sum f32[BM] and the unnormalised output f32[BM, LATENT_PAD].
    """
    page = page_of(table_row, first, last, PAGE, BN)
    top = tl.full([BM], LOWEST, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, LATENT_PAD], tl.float32)
    # Runs once. Of computed values Triton keeps the first operand of a Hopper product in registers,
    # where 64 rows of queries take 144 a thread; what a loop carries it keeps in shared memory.
    for _ in tl.range(0, tl.minimum(keys, 1)):
        for block in tl.range(first, last):
            next_page = page_of(table_row, block + 1, last, PAGE, BN)
            latent, rope = load_block(cache, page, block, keys, table_row, DOT,
                                      PAGE, BN, LATENT, ROPE, LATENT_PAD, ROPE_PAD)  # fmt: skip
            page = next_page
            scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
            scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
            visible = (block * BN + tl.arange(0, BN))[None, :] < seen[:, None]
            scores = tl.where(visible, scores * SCALE, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            fade = tl.exp2(top - new_top)
            weights = tl.exp2(scores - new_top[:, None])
            total = total * fade + tl.sum(weights, 1)
            acc = tl.dot(weights.to(DOT), latent, acc * fade[:, None], input_precision="ieee")
            top = new_top
        q_latent = tl.zeros([BM, LATENT_PAD], DOT)
        q_rope = tl.zeros([BM, ROPE_PAD], DOT)
    return top, total, acc


@triton.jit
def store_tile(
    place, value, valid, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, KEYS_FIRST: tl.constexpr
):
    """Store the rows of a tile at `place`, pointers [BM] to their first elements."""
    column = tl.arange(0, LATENT_PAD)
    if KEYS_FIRST:
        mask = valid[None, :] & (column < LATENT)[:, None]
        tl.store(place[None, :] + column[:, None], value, mask=mask)
    else:
        mask = valid[:, None] & (column < LATENT)[None, :]
        tl.store(place[:, None] + column[None, :], value, mask=mask)


# longer than the budget: the walk over the work of a launch, one value after another.
@triton.jit
def attend(
    q, cache, seg_start, seg_tokens, context, page_table, out, parts, rows, segments, table,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr, PAGE: tl.constexpr, SCALE: tl.constexpr, SEGMENTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, MIN_SHARE: tl.constexpr,
    KEYS_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Work on every num_programs-th item of all segments: a tile of rows and a split of its keys.

    Padding rows are left to the next stage.

    Args:
        q: f32[T, n, r + dr].
        cache: A[P, PAGE, r + dr] or float8 e4m3, as the products are then bfloat16.
        seg_start: i32[B].
        seg_tokens: i32[B].
        context: i32[B].
        page_table: i32[B, M].
        out: f32[T, n, r]; written where SPLITS is 1.
        parts: f32[T, n, SPLITS, r], then maxima and sums f32[T, n, SPLITS, 2]; where SPLITS is
            more than 1.
        rows: T.
        segments: B.
        table: M.
        HEADS: n.
        LATENT: r.
        ROPE: dr.
        LATENT_PAD: r padded to a power of two.
        ROPE_PAD: dr padded to a power of two.
        PAGE: Positions of a page.
        SCALE: Factor of the scores, times log2 e.
        SEGMENTS: B padded to a power of two.
        BM: Rows of a tile.
        BN: Keys of a block.
        SPLITS: Most splits of a tile.
        MIN_SHARE: Fewest blocks of a split.
        KEYS_FIRST: Which of the two walks.
        PDL: Programmatic dependent launch.
    """
    DOT: tl.constexpr = tl.float32 if cache.dtype.element_ty == tl.float32 else tl.bfloat16
    wait_for_inputs(PDL)
    release_dependents(PDL)
    if SEGMENTS == 1:
        tiles, splits = work_items(tl.load(context), tl.load(seg_tokens),
                                   BM, BN, HEADS, SPLITS, MIN_SHARE)  # fmt: skip
        total = tiles * splits
    else:
        s = tl.arange(0, SEGMENTS)
        tiles, splits = work_items(
            tl.load(context + s, mask=s < segments, other=0),
            tl.load(seg_tokens + s, mask=s < segments, other=0),
            BM, BN, HEADS, SPLITS, MIN_SHARE,
        )  # fmt: skip
        ends = tl.cumsum(tiles * splits, 0)
        total = tl.max(ends, 0)
    for item in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        seg = tl.program_id(0) * 0
        local = item
        if SEGMENTS > 1:
            seg = tl.sum((ends <= item).to(tl.int32), 0)
            local = item - tl.max(tl.where(ends <= item, ends, 0), 0)
        tokens = tl.load(seg_tokens + seg)
        past = tl.load(context + seg)
        start = tl.load(seg_start + seg)
        # Long tiles first; tiles of one split side by side, as they read the same keys.
        count = (tokens * HEADS + BM - 1) // BM
        split = local // count
        tile = count - 1 - local % count
        share = split_share(past, tile, BM, BN, HEADS, SPLITS, MIN_SHARE)
        first = split * share
        last = tl.minimum(first + share, tile_blocks(past, tokens, tile, BM, BN, HEADS))
        if first < last:
            table_row = page_table + seg.to(tl.int64) * table
            r = tile * BM + tl.arange(0, BM)
            valid = r < tokens * HEADS
            at = (start * HEADS + r).to(tl.int64)
            q_latent, q_rope = load_queries(q, at * (LATENT + ROPE), valid, DOT,
                                            LATENT, ROPE, LATENT_PAD, ROPE_PAD)  # fmt: skip
            seen = past + r // HEADS + 1
            if KEYS_FIRST:
                top, weight, acc = walk_keys_first(
                    q_latent, q_rope, cache, table_row, first, last, seen, past + tokens, DOT,
                    LATENT, ROPE, LATENT_PAD, ROPE_PAD, PAGE, SCALE, BM, BN,
                )  # fmt: skip
            else:
                top, weight, acc = walk_rows_first(
                    q_latent, q_rope, cache, table_row, first, last, seen, past + tokens, DOT,
                    LATENT, ROPE, LATENT_PAD, ROPE_PAD, PAGE, SCALE, BM, BN,
                )  # fmt: skip
            if SPLITS == 1:
                factor = 1.0 / weight
                acc *= factor[None, :] if KEYS_FIRST else factor[:, None]
                place = out + at * LATENT
            else:
                part = at * SPLITS + split
                stats = parts + rows.to(tl.int64) * (HEADS * SPLITS * LATENT) + part * 2
                tl.store(stats, top, mask=valid)
                tl.store(stats + 1, weight, mask=valid)
                place = parts + part * LATENT
            store_tile(place, acc, valid, LATENT, LATENT_PAD, KEYS_FIRST)
