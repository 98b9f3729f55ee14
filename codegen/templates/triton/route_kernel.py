"""Choosing experts and sorting routed rows by expert: the device code.

A choice runs in rounds, each of which takes the best score left: a round costs a few instructions
for every score that a lane holds, and its code is small, which counts more than the work in a
kernel that starts cold. A token's experts may be dealt to several warps, each of which then ranks
its own k best; the merge counts for every one how many beat it. Scores compare as integers whose
order is that of the floats; a NaN counts as the lowest score, and equal scores go to the lower
index. So the choice is exact, and any logits choose k different experts.

A row's place is the number of rows before it in the order (expert, row). Few rows are counted pair
by pair; many in chunks, from the number of each expert's rows in the chunks before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs

_LAST = tl.constexpr(0x7FFFFFFF)  # the largest integer: what comes after all rows
_LOWEST = tl.constexpr(-0x80000000)  # below the integer of any score, -inf too
_RENORMALIZE_EPS = tl.constexpr(1e-20)  # spec 5.3


@triton.jit
def score_order(logits, bias):
    """Return scores sigmoid(logits) + bias as integers of the same order, NaN as -inf."""
    score = 1.0 / (1.0 + tl.exp(-logits)) + bias
    score = tl.where(score == score, score, float("-inf"))
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _LAST)


@triton.jit
def take_rounds(order, index, K: tl.constexpr, KP: tl.constexpr, BY_VALUE: tl.constexpr):
    """Take the largest of each line of [L, W], K times.

    Returns:
        Values and lowest indices i32[L, KP], best first; the last value, and how many values there
        were, i32[L]. BY_VALUE takes equal values all at once: then the next round waits for the
        value alone, not for its index.
    """
    place = tl.arange(0, KP)[None, :]
    values = tl.zeros((order.shape[0], KP), tl.int32) + _LOWEST
    indices = tl.zeros((order.shape[0], KP), tl.int32)
    best = tl.max(order, axis=1)
    found = tl.zeros((order.shape[0],), tl.int32)
    # Not `best`: a value of its own, or the compiler does not see that the loop changes it.
    last = tl.zeros((order.shape[0],), tl.int32)
    for j in tl.range(0, K, loop_unroll_factor=1):
        largest = order == best[:, None]
        at = tl.min(tl.where(largest, index, _LAST), axis=1)
        values = tl.where(place == j, best[:, None], values)
        indices = tl.where(place == j, at[:, None], indices)
        found += (best > _LOWEST).to(tl.int32)
        if BY_VALUE:
            order = tl.where(largest, _LOWEST, order)
        else:
            order = tl.where(index == at[:, None], _LOWEST, order)
        last = best
        best = tl.max(order, axis=1)
    return values, indices, last, found


@triton.jit
def best_of_lines(order, index, K: tl.constexpr, KP: tl.constexpr):
    """Return the K largest of each line of [L, W], best first: values and indices i32[L, KP]."""
    values, indices, last, found = take_rounds(order, index, K, KP, True)
    taken = tl.sum(((order >= last[:, None]) & (order > _LOWEST)).to(tl.int32), axis=1)
    # Equal scores are rare: only then are all rounds repeated, one element a round.
    if tl.max((taken != found).to(tl.int32), axis=0) != 0:
        values, indices, _, _ = take_rounds(order, index, K, KP, False)
    return values, indices


@triton.jit
def merge_lines(values, indices, T: tl.constexpr, KP: tl.constexpr):
    """Return the KP best indices i32[T, KP] of the lines [T * parts, KP] of each token."""
    PARTS: tl.constexpr = values.shape[0] // T
    N: tl.constexpr = PARTS * KP
    # One above what is taken, so that one less is still an integer.
    values = tl.maximum(values, _LOWEST + 1)
    mine = tl.reshape(values, (T, 1, N))
    part = tl.arange(0, N)[None, None, :] // KP
    other = tl.arange(0, PARTS)[None, :, None]
    # An equal score beats mine if its part comes first; of my own part I know my place.
    bar = tl.where(other == part, _LAST, mine - (other < part).to(tl.int32))
    beats = tl.reshape(values, (T, PARTS, KP))[:, :, :, None] > bar[:, :, None, :]
    rank = tl.sum(tl.sum(beats.to(tl.int32), axis=2), axis=1) + (tl.arange(0, N) % KP)[None, :]
    here = rank[:, :, None] == tl.arange(0, KP)[None, None, :]
    return tl.sum(tl.where(here, tl.reshape(indices, (T, N))[:, :, None], 0), axis=1)


@triton.jit
def choose(
    logits, bias, row, rows, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    T: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Return the experts i32[T, KP] of rows `row` to row + T, best first; K of the KP are valid."""
    W: tl.constexpr = triton.next_power_of_2(E) // SPLIT
    line = tl.arange(0, T * SPLIT)
    token = row + line // SPLIT
    index = (line % SPLIT)[:, None] * W + tl.arange(0, W)[None, :]
    offset = tl.load(bias + index, mask=index < E, other=0.0)
    wait_for_inputs(PDL)
    valid = (index < E) & (token < rows)[:, None]
    x = tl.load(logits + token.to(tl.int64)[:, None] * E + index, mask=valid, other=0.0)
    release_dependents(PDL)
    order = tl.where(index < E, score_order(x, offset), _LOWEST)
    values, experts = best_of_lines(order, index, K, KP)
    if SPLIT > 1:
        experts = merge_lines(values, experts, T, KP)
    return experts


@triton.jit
def store_weights(
    logits, weights, experts, row, rows, first, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    COUNT: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Store the weights of chosen experts i32[T, KP]; 0 for experts of other ranks."""
    token = (row + tl.arange(0, T))[:, None]
    place = tl.arange(0, KP)[None, :]
    valid = (token < rows) & (place < K)
    at = logits + token.to(tl.int64) * E + experts
    weight = 1.0 / (1.0 + tl.exp(-tl.load(at, mask=valid, other=float("-inf"))))
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, axis=1) + _RENORMALIZE_EPS)[:, None]
    local = experts - first
    weight = tl.where((local >= 0) & (local < COUNT), weight * SCALE, 0.0)
    tl.store(weights + token.to(tl.int64) * K + place, weight, mask=valid)


@triton.jit
def route_topk(
    logits, bias, weights, experts, rows, first, E: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, COUNT: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    T: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`route_topk`: weights and experts of T rows."""
    row = tl.program_id(0) * T
    best = choose(logits, bias, row, rows, E, K, KP, T, SPLIT, PDL)
    store_weights(
        logits, weights, best, row, rows, first, E, K, KP, COUNT, RENORMALIZE, SCALE, T
    )  # fmt: skip
    token = (row + tl.arange(0, T))[:, None]
    place = tl.arange(0, KP)[None, :]
    valid = (token < rows) & (place < K)
    tl.store(experts + token.to(tl.int64) * K + place, best, mask=valid)


@triton.jit
def route_few(
    logits, bias, weights, offsets, order, workspace, rows, first, E: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, COUNT: tl.constexpr, RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr, T: tl.constexpr, SPLIT: tl.constexpr, BINS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`route_dispatch` of at most T rows by one block."""
    best = choose(logits, bias, 0, rows, E, K, KP, T, SPLIT, PDL)
    store_weights(
        logits, weights, best, 0, rows, first, E, K, KP, COUNT, RENORMALIZE, SCALE, T
    )  # fmt: skip
    token = tl.arange(0, T)[:, None]
    place = tl.arange(0, KP)[None, :]
    local = best - first
    mine = (local >= 0) & (local < COUNT) & (token < rows) & (place < K)
    id = token * K + place
    key = tl.reshape(tl.where(mine, local * (T * K) + id, _LAST), (T * KP,))
    before = tl.sum((key[:, None] < key[None, :]).to(tl.int32), axis=0)
    tl.store(order + before, tl.reshape(id, (T * KP,)), mask=key < _LAST)
    for e in tl.range(0, COUNT + 1, BINS, loop_unroll_factor=1):
        expert = e + tl.arange(0, BINS)
        start = tl.sum((key[:, None] < (expert * (T * K))[None, :]).to(tl.int32), axis=0)
        tl.store(offsets + expert, start, mask=expert <= COUNT)


@triton.jit
def route_choice(
    logits, bias, weights, offsets, order, workspace, rows, first, E: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, COUNT: tl.constexpr, RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr, T: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """First stage of `route_dispatch`: weights, and experts into the workspace."""
    experts = workspace.to(tl.pointer_type(tl.int32))
    route_topk(
        logits, bias, weights, experts, rows, first, E, K, KP, COUNT, RENORMALIZE, SCALE, T,
        SPLIT, PDL,
    )  # fmt: skip
