"""Sorting routed rows by expert: the device code of the launches after the choice of experts.

A row's place is the number of rows before it in the order (expert, row). Few rows are counted pair
by pair, in one launch. Many are counted in chunks, in four: the rows of every expert in each chunk;
their sums over the chunks before; where each expert starts; the places. All sums are of integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs

_LAST = tl.constexpr(0x7FFFFFFF)  # what comes after all rows


@triton.jit
def place_pairs(
    experts, offsets, order, rows, first, COUNT: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Place some rows, or find the starts of some experts, by comparing with all rows."""
    row_blocks = tl.cdiv(rows, QUERIES)
    block = tl.program_id(0)
    row = block * QUERIES + tl.arange(0, QUERIES)
    expert = row - row_blocks * QUERIES
    local = tl.load(experts + row, mask=row < rows, other=first - 1) - first
    mine = (local >= 0) & (local < COUNT)
    query = tl.where(block < row_blocks, local * rows + row, expert * rows)
    before = tl.zeros((QUERIES,), tl.int32)
    for start in range(0, rows, BLOCK):
        other = start + tl.arange(0, BLOCK)
        place = tl.load(experts + other, mask=other < rows, other=first - 1) - first
        key = tl.where((place >= 0) & (place < COUNT), place * rows + other, _LAST)
        # The axis summed over comes first, so that a thread sums by itself.
        before += tl.sum((key[:, None] < query[None, :]).to(tl.int32), axis=0)
    tl.store(order + before, row, mask=mine & (row < rows))
    tl.store(offsets + expert, before, mask=(expert >= 0) & (expert <= COUNT))


@triton.jit
def count_chunk(
    experts, counts, rows, first, COUNT: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Store how many rows of a chunk each expert has, as counts[chunk, expert]."""
    chunk = tl.program_id(0)
    row = chunk * CHUNK + tl.arange(0, CHUNK)
    local = tl.load(experts + row, mask=row < rows, other=first - 1) - first
    # The bin behind the experts takes what is not of this rank.
    count = tl.histogram(tl.where((local >= 0) & (local < COUNT), local, COUNT), BINS)
    expert = tl.arange(0, BINS)
    tl.store(counts + chunk.to(tl.int64) * COUNT + expert, count, mask=expert < COUNT)


@triton.jit
def sum_chunks(
    counts, rows, COUNT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    """Make counts the sums over the chunks before; store each expert's rows behind the chunks."""
    chunks = tl.cdiv(rows, CHUNK)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    carry = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        at = counts + chunk.to(tl.int64)[:, None] * COUNT + expert[None, :]
        here = (chunk < chunks)[:, None] & (expert < COUNT)[None, :]
        count = tl.load(at, mask=here, other=0)
        tl.store(at, tl.cumsum(count, axis=0) - count + carry[None, :], mask=here)
        carry += tl.sum(count, axis=0)
    tl.store(counts + chunks.to(tl.int64) * COUNT + expert, carry, mask=expert < COUNT)


@triton.jit
def start_experts(
    counts, offsets, rows, COUNT: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Store where each expert's rows start, and behind them where the last one's end."""
    chunks = tl.cdiv(rows, CHUNK)
    expert = tl.arange(0, BINS)
    at = counts + chunks.to(tl.int64) * COUNT + expert
    count = tl.load(at, mask=expert < COUNT, other=0)
    tl.store(offsets + expert, tl.cumsum(count, axis=0) - count, mask=expert <= COUNT)


@triton.jit
def place_chunk(
    experts, counts, offsets, order, rows, first, COUNT: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Place the rows of a chunk."""
    chunk = tl.program_id(0)
    inside = tl.arange(0, CHUNK)
    row = chunk * CHUNK + inside
    local = tl.load(experts + row, mask=row < rows, other=first - 1) - first
    mine = (local >= 0) & (local < COUNT)
    start = tl.load(offsets + local, mask=mine, other=0)
    start += tl.load(counts + chunk.to(tl.int64) * COUNT + local, mask=mine, other=0)
    same = (local[:, None] == local[None, :]) & (inside[:, None] < inside[None, :])
    tl.store(order + start + tl.sum(same.to(tl.int32), axis=0), row, mask=mine)


@triton.jit
def sort_stage(
    experts, counts, offsets, order, rows, first, STAGE: tl.constexpr, COUNT: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One launch of the sort; A and B are what it needs: see the functions above."""
    wait_for_inputs(PDL)
    release_dependents(PDL)
    if STAGE == "pairs":
        place_pairs(experts, offsets, order, rows, first, COUNT, A, B)
    elif STAGE == "count":
        count_chunk(experts, counts, rows, first, COUNT, A, CHUNK)
    elif STAGE == "sum":
        sum_chunks(counts, rows, COUNT, CHUNK, A, B)
    elif STAGE == "start":
        start_experts(counts, offsets, rows, COUNT, A, CHUNK)
    else:
        place_chunk(experts, counts, offsets, order, rows, first, COUNT, CHUNK)


@triton.jit
def dispatch_stage(
    experts, offsets, order, workspace, rows, first, STAGE: tl.constexpr, COUNT: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, CHUNK: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A launch of `dispatch`; the workspace holds the counts."""
    counts = workspace.to(tl.pointer_type(tl.int32))
    sort_stage(experts, counts, offsets, order, rows * K, first, STAGE, COUNT, A, B, CHUNK, PDL)


@triton.jit
def route_dispatch_stage(
    logits, bias, weights, offsets, order, workspace, rows, first, STAGE: tl.constexpr,
    COUNT: tl.constexpr, A: tl.constexpr, B: tl.constexpr, CHUNK: tl.constexpr, K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A later launch of `route_dispatch`; the workspace holds the experts, then the counts."""
    experts = workspace.to(tl.pointer_type(tl.int32))
    counts = experts + rows * K
    sort_stage(experts, counts, offsets, order, rows * K, first, STAGE, COUNT, A, B, CHUNK, PDL)
