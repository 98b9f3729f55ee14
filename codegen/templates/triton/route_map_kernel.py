"""Experts that a map places: the device code.

A row of the map, of one expert: how many replicas it has, then for each the slot of this rank that
it is, or -1 where another rank has it. Token t takes replica t modulo their number, so that all
ranks agree without a word. What follows a choice then works on slots, numbered from 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs
from k3c.codegen.templates.triton.dispatch_kernel import sort_stage
from k3c.codegen.templates.triton.route_kernel import choose

_LAST = tl.constexpr(0x7FFFFFFF)  # what comes after all rows
_RENORMALIZE_EPS = tl.constexpr(1e-20)  # spec 5.3


@triton.jit
def slots_of(expert_map, experts, token, valid, WIDTH: tl.constexpr):
    """Return the slots of this rank that the rows of `experts` go to; -1: another rank's."""
    row = expert_map + experts * WIDTH
    replicas = tl.load(row, mask=valid, other=1)
    return tl.load(row + 1 + token % replicas, mask=valid, other=-1)


@triton.jit
def map_by_table(
    weights, experts, expert_map, local_weights, local_experts, rows, first, K: tl.constexpr,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`map_experts` with a map: BLOCK routed rows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at < rows * K
    wait_for_inputs(PDL)
    weight = tl.load(weights + at, mask=valid, other=0.0)
    expert = tl.load(experts + at, mask=valid, other=0)
    release_dependents(PDL)
    slot = slots_of(expert_map, expert, at // K, valid, WIDTH)
    tl.store(local_weights + at, tl.where(slot >= 0, weight, 0.0), mask=valid)
    tl.store(local_experts + at, slot, mask=valid)


@triton.jit
def map_by_number(
    weights, experts, local_weights, local_experts, rows, first, K: tl.constexpr,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`map_experts` of the COUNT experts from `first` on: BLOCK routed rows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at < rows * K
    wait_for_inputs(PDL)
    weight = tl.load(weights + at, mask=valid, other=0.0)
    expert = tl.load(experts + at, mask=valid, other=0)
    release_dependents(PDL)
    slot = expert - first
    mine = (slot >= 0) & (slot < COUNT)
    tl.store(local_weights + at, tl.where(mine, weight, 0.0), mask=valid)
    tl.store(local_experts + at, tl.where(mine, slot, -1), mask=valid)


@triton.jit
def place_choice(
    logits, expert_map, weights, experts, row, rows, E: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, WIDTH: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Store the weights of chosen experts i32[T, KP]; return their slots, -1 for no slot."""
    token = (row + tl.arange(0, T))[:, None]
    place = tl.arange(0, KP)[None, :]
    valid = (token < rows) & (place < K)
    at = logits + token.to(tl.int64) * E + experts
    weight = 1.0 / (1.0 + tl.exp(-tl.load(at, mask=valid, other=float("-inf"))))
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, axis=1) + _RENORMALIZE_EPS)[:, None]
    slot = slots_of(expert_map, experts, token, valid, WIDTH)
    weight = tl.where(slot >= 0, weight * SCALE, 0.0)
    tl.store(weights + token.to(tl.int64) * K + place, weight, mask=valid)
    return slot


@triton.jit
def place_few(
    logits, bias, expert_map, weights, offsets, order, workspace, rows, E: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, T: tl.constexpr, SPLIT: tl.constexpr,
    BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`route_dispatch` with a map of at most T rows by one block."""
    best = choose(logits, bias, 0, rows, E, K, KP, T, SPLIT, PDL)
    slot = place_choice(
        logits, expert_map, weights, best, 0, rows, E, K, KP, WIDTH, RENORMALIZE, SCALE, T
    )  # fmt: skip
    id = tl.arange(0, T)[:, None] * K + tl.arange(0, KP)[None, :]
    key = tl.reshape(tl.where(slot >= 0, slot * (T * K) + id, _LAST), (T * KP,))
    before = tl.sum((key[:, None] < key[None, :]).to(tl.int32), axis=0)
    tl.store(order + before, tl.reshape(id, (T * KP,)), mask=key < _LAST)
    for e in tl.range(0, COUNT + 1, BINS, loop_unroll_factor=1):
        expert = e + tl.arange(0, BINS)
        start = tl.sum((key[:, None] < (expert * (T * K))[None, :]).to(tl.int32), axis=0)
        tl.store(offsets + expert, start, mask=expert <= COUNT)


@triton.jit
def place_chosen(
    logits, bias, expert_map, weights, offsets, order, workspace, rows, E: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, T: tl.constexpr, SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """First stage: weights of T rows, and slots into the workspace."""
    row = tl.program_id(0) * T
    best = choose(logits, bias, row, rows, E, K, KP, T, SPLIT, PDL)
    slot = place_choice(
        logits, expert_map, weights, best, row, rows, E, K, KP, WIDTH, RENORMALIZE, SCALE, T
    )  # fmt: skip
    token = (row + tl.arange(0, T))[:, None]
    place = tl.arange(0, KP)[None, :]
    slots = workspace.to(tl.pointer_type(tl.int32))
    valid = (token < rows) & (place < K)
    tl.store(slots + token.to(tl.int64) * K + place, slot, mask=valid)


@triton.jit
def place_stage(
    logits, bias, expert_map, weights, offsets, order, workspace, rows, STAGE: tl.constexpr,
    COUNT: tl.constexpr, A: tl.constexpr, B: tl.constexpr, CHUNK: tl.constexpr, K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A later launch; the workspace holds the slots, then the counts."""
    slots = workspace.to(tl.pointer_type(tl.int32))
    counts = slots + rows * K
    sort_stage(slots, counts, offsets, order, rows * K, 0, STAGE, COUNT, A, B, CHUNK, PDL)
