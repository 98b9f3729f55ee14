"""Device code of mla_attend's second stage: merge the splits of a row, or clear padding rows."""

# Triton's own types: pyright cannot follow them through `@triton.jit`.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs
from k3c.codegen.templates.triton.mla_attend_kernel import LOWEST, split_share, tile_blocks
from k3c.codegen.templates.triton.segments import owner_of


# longer than the budget: one row from its splits to its result shares all of its masks.
@triton.jit
def merge_splits(
    q, cache, seg_start, seg_tokens, context, page_table, out, parts, rows, segments, table,
    HEADS: tl.constexpr, LATENT: tl.constexpr, SEGMENTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SPLITS: tl.constexpr, MIN_SHARE: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge COLUMNS columns of one row and head, STEP splits at a time; zero where nobody owns it.

    Program (row * HEADS + head) * chunks + chunk; the other arguments are those of `attend_split`.
    """
    CHUNKS: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    wait_for_inputs(PDL)
    release_dependents(PDL)
    pid = tl.program_id(0)
    line = pid // CHUNKS
    row = line // HEADS
    seg, index, past = owner_of(row, seg_start, seg_tokens, context, segments, SEGMENTS)
    tokens = tl.load(seg_tokens + tl.maximum(seg, 0))
    tile = (tl.maximum(index, 0) * HEADS + line % HEADS) // BM
    share = split_share(past, tile, BM, BN, HEADS, SPLITS, MIN_SHARE)
    blocks = tile_blocks(past, tokens, tile, BM, BN, HEADS)
    count = tl.where(seg >= 0, (blocks + share - 1) // share, 0)
    base = line.to(tl.int64) * SPLITS
    stats = parts + rows.to(tl.int64) * (HEADS * SPLITS * LATENT) + base * 2
    step = tl.arange(0, STEP)
    top = tl.full([STEP], LOWEST, tl.float32)
    for k in tl.range(0, count, STEP):
        top = tl.maximum(top, tl.load(stats + (k + step) * 2, mask=k + step < count, other=LOWEST))
    highest = tl.max(top, 0)
    column = pid % CHUNKS * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([STEP], tl.float32)
    acc = tl.zeros([STEP, COLUMNS], tl.float32)
    for k in tl.range(0, count, STEP):
        live = k + step < count
        part = base + k + step
        value = tl.load(
            parts + (part * LATENT)[:, None] + column[None, :],
            mask=live[:, None] & (column < LATENT)[None, :], other=0.0,
        )  # fmt: skip
        # A split that is not there has the lowest maximum, and weight 0 by its sum and value.
        weight = tl.exp2(tl.load(stats + (k + step) * 2, mask=live, other=LOWEST) - highest)
        total += weight * tl.load(stats + (k + step) * 2 + 1, mask=live, other=0.0)
        acc += weight[:, None] * value
    whole = tl.sum(total, 0)
    merged = tl.sum(acc, 0) / tl.where(count > 0, whole, 1.0)
    tl.store(out + line.to(tl.int64) * LATENT + column, merged, mask=column < LATENT)


@triton.jit
def clear_padding(
    q, cache, seg_start, seg_tokens, context, page_table, out, rows, segments, table,
    WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Zero a row of `out`, WIDTH = n * r elements, that no segment owns; a program is a row."""
    wait_for_inputs(PDL)
    release_dependents(PDL)
    row = tl.program_id(0)
    seg, _, _ = owner_of(row, seg_start, seg_tokens, context, segments, SEGMENTS)
    if seg < 0:
        for first in tl.range(0, WIDTH, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            zero = tl.zeros([COLUMNS], tl.float32)
            tl.store(out + row.to(tl.int64) * WIDTH + column, zero, mask=column < WIDTH)
