"""One token a row of logits, without sorting the vocabulary: the device code.

First, blocks over the whole vocabulary find the largest logit of their chunk. Then a block a row
has the greedy token, or that the row is broken. A row that is sampled is read again by its block:
probabilities e, unnormalised so that the largest is 1, are made anew each time; the bits of
non-negative floats order as integers, so each pass narrows the threshold of top-k or of top-p to a
quarter. Often a cut is known below which no filter keeps anything, and what lies above it is so
little that it is copied: then the passes read the copy. Lanes sum a few dozen float32 values each,
and lanes are summed in float64, always in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs

_NO_INDEX = tl.constexpr(0x7FFFFFFF)
_ONE_BITS = tl.constexpr(0x3F800000)  # the largest e, 1.0
_LOG2_E = tl.constexpr(1.4426950408889634)
_STEEPEST = tl.constexpr(1e38)  # 1 / temperature at most, so that 0 times it is 0
_ROWS = tl.constexpr(4)  # rows of a tile, in flight at once
_RUNS = tl.constexpr(2)  # of them copied at once: a cumulative sum takes registers
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # splitmix64's increment
_MIX_A, _MIX_B = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)


@triton.jit
def uniform(seed, position):
    """Return u in [0, 1), float64: splitmix64 of seed * golden + position, its upper 24 bits."""
    z = seed.to(tl.uint64) * _GOLDEN + position.to(tl.int64).to(tl.uint64) + _GOLDEN
    z = (z ^ (z >> 30)) * _MIX_A
    z = (z ^ (z >> 27)) * _MIX_B
    z = z ^ (z >> 31)
    return (z >> 40).to(tl.float64) * (1.0 / 16777216.0)


@triton.jit
def scan_chunk(
    logits, best, index, chunks, V: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Store the largest logit of a chunk, NaN if the chunk holds one, and its lowest index."""
    row = tl.program_id(0) // chunks
    at = tl.program_id(0) % chunks * CHUNK + tl.arange(0, CHUNK)
    wait_for_inputs(PDL)
    x = tl.load(logits + row.to(tl.int64) * V + at, mask=at < V, other=float("-inf"))
    release_dependents(PDL)
    broken = tl.max((x != x).to(tl.int32), axis=0)
    largest = tl.max(x, axis=0)
    first = tl.min(tl.where((x == largest) & (at < V), at, _NO_INDEX), axis=0)
    tl.store(best + tl.program_id(0), tl.where(broken != 0, float("nan"), largest))
    tl.store(index + tl.program_id(0), first)


@triton.jit
def load_tile(row, start, count, best, steepness, TILE: tl.constexpr):
    """Return e f32[_ROWS, TILE] of the elements from `start`; 0 from `count` on."""
    at = start + tl.arange(0, _ROWS)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    x = tl.load(row + at, mask=at < count, other=float("-inf"))
    return tl.exp2((x - best) * steepness)


@triton.jit
def counts_above(row, count, best, steepness, a, b, c, TILE: tl.constexpr):
    """Return how many e reach each of three thresholds."""
    low = tl.zeros((TILE,), tl.int32)
    middle = tl.zeros((TILE,), tl.int32)
    high = tl.zeros((TILE,), tl.int32)
    for start in range(0, count, _ROWS * TILE):
        e = load_tile(row, start, count, best, steepness, TILE)
        low += tl.sum((e >= a).to(tl.int32), axis=0)
        middle += tl.sum((e >= b).to(tl.int32), axis=0)
        high += tl.sum((e >= c).to(tl.int32), axis=0)
    return tl.sum(low, axis=0), tl.sum(middle, axis=0), tl.sum(high, axis=0)


@triton.jit
def masses_above(row, count, best, steepness, a, b, c, TILE: tl.constexpr):
    """Return the mass, float64, of the e that reach each of three thresholds."""
    low = tl.zeros((TILE,), tl.float32)
    middle = tl.zeros((TILE,), tl.float32)
    high = tl.zeros((TILE,), tl.float32)
    for start in range(0, count, _ROWS * TILE):
        e = load_tile(row, start, count, best, steepness, TILE)
        low += tl.sum(tl.where(e >= a, e, 0.0), axis=0)
        middle += tl.sum(tl.where(e >= b, e, 0.0), axis=0)
        high += tl.sum(tl.where(e >= c, e, 0.0), axis=0)
    return (
        tl.sum(low.to(tl.float64), axis=0),
        tl.sum(middle.to(tl.float64), axis=0),
        tl.sum(high.to(tl.float64), axis=0),
    )


@triton.jit
def survey(row, count, best, steepness, cut, TILE: tl.constexpr):
    """Return how many e reach the cut, and the mass, float64, of all e."""
    above = tl.zeros((TILE,), tl.int32)
    mass = tl.zeros((TILE,), tl.float32)
    for start in range(0, count, _ROWS * TILE):
        e = load_tile(row, start, count, best, steepness, TILE)
        above += tl.sum((e >= cut).to(tl.int32), axis=0)
        mass += tl.sum(e, axis=0)
    return tl.sum(above, axis=0), tl.sum(mass.to(tl.float64), axis=0)


@triton.jit
def copy_above(row, count, best, steepness, cut, logits, ids, TILE: tl.constexpr):
    """Copy the logits whose e reach the cut, and their indices, in their order."""
    STEP: tl.constexpr = _RUNS * TILE
    base = 0
    for start in range(0, count, STEP):
        at = start + tl.arange(0, STEP)
        x = tl.load(row + at, mask=at < count, other=float("-inf"))
        taken = (tl.exp2((x - best) * steepness) >= cut) & (at < count)
        place = base + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(logits + place, x, mask=taken)
        tl.store(ids + place, at, mask=taken)
        base += tl.sum(taken.to(tl.int32), axis=0)
    # The block's other threads read the copy. A barrier orders the memory of a block's threads, on
    # gfx950 as well: they share a compute unit, which keeps the order.
    tl.debug_barrier()


@triton.jit
def thirds(low, high):
    """Return three integers inside (low, high), which is not empty, ascending."""
    step = tl.maximum((high - low) // 4, 1)
    last = high - 1
    return (
        tl.minimum(low + step, last),
        tl.minimum(low + 2 * step, last),
        tl.minimum(low + 3 * step, last),
    )


@triton.jit
def narrow(low, high, a, b, c, keep_a, keep_b, keep_c):
    """Return the quarter of [low, high) whose lower end alone is known to be kept."""
    new_low = tl.where(keep_c, c, tl.where(keep_b, b, tl.where(keep_a, a, low)))
    new_high = tl.where(keep_c, high, tl.where(keep_b, c, tl.where(keep_a, b, a)))
    return new_low, new_high


@triton.jit
def as_float(bits):
    """Return the float32 of an integer's bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def as_bits(value):
    """Return the bits of a float32 as an integer."""
    return value.to(tl.int32, bitcast=True)


@triton.jit
def kth_largest(row, count, best, steepness, k, low, TILE: tl.constexpr):
    """Return the bits of the largest threshold that keeps at least k, or any that keeps just k.

    The threshold of bits `low` must keep k.
    """
    high = low * 0 + _ONE_BITS + 1
    while high - low > 1:
        a, b, c = thirds(low, high)
        x, y, z = counts_above(
            row, count, best, steepness, as_float(a), as_float(b), as_float(c), TILE
        )  # fmt: skip
        low, high = narrow(low, high, a, b, c, x >= k, y >= k, z >= k)
        # Just k are kept: every threshold between gives the same set.
        exact = (x == k) | (y == k) | (z == k)
        high = tl.where(exact, low + 1, high)
    return low


@triton.jit
def nucleus(row, count, best, steepness, wanted, low, TILE: tl.constexpr):
    """Return the bits of the largest threshold that keeps the mass `wanted`, as `low` does."""
    high = low * 0 + _ONE_BITS + 1
    while high - low > 1:
        a, b, c = thirds(low, high)
        x, y, z = masses_above(
            row, count, best, steepness, as_float(a), as_float(b), as_float(c), TILE
        )  # fmt: skip
        low, high = narrow(low, high, a, b, c, x >= wanted, y >= wanted, z >= wanted)
    return low


@triton.jit
def tile_mass(row, start, count, best, steepness, threshold, TILE: tl.constexpr):
    """Return the kept mass, float64, of the tile from `start`."""
    e = load_tile(row, start, count, best, steepness, TILE)
    return tl.sum(tl.sum(tl.where(e >= threshold, e, 0.0), axis=0).to(tl.float64), axis=0)


@triton.jit
def run_mass(row, start, count, best, steepness, threshold, TILE: tl.constexpr):
    """Return the kept mass, float64, of the TILE elements from `start`."""
    at = start + tl.arange(0, TILE)
    x = tl.load(row + at, mask=at < count, other=float("-inf"))
    e = tl.exp2((x - best) * steepness)
    return tl.sum(tl.where(e >= threshold, e, 0.0).to(tl.float64), axis=0)


@triton.jit
def pick_inside(
    row, start, count, best, steepness, threshold, before, goal, TILE: tl.constexpr
):  # fmt: skip
    """Return the first index of a tile whose cumulative kept mass exceeds `goal`.

    If rounding leaves none, the tile's last kept index.
    """
    whole = start + tl.arange(0, _ROWS)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    e = load_tile(row, start, count, best, steepness, TILE)
    last = tl.max(tl.max(tl.where((e >= threshold) & (e > 0.0), whole, -1), axis=0), axis=0)
    end = start + (_ROWS - 1) * TILE
    mass = run_mass(row, start, count, best, steepness, threshold, TILE)
    while (before + mass <= goal) & (start < end):
        before += mass
        start += TILE
        mass = run_mass(row, start, count, best, steepness, threshold, TILE)
    at = start + tl.arange(0, TILE)
    x = tl.load(row + at, mask=at < count, other=float("-inf"))
    e = tl.exp2((x - best) * steepness)
    kept = (e >= threshold) & (e > 0.0)
    reached = before + tl.cumsum(tl.where(kept, e, 0.0).to(tl.float64), axis=0)
    return tl.minimum(tl.min(tl.where(kept & (reached > goal), at, _NO_INDEX), axis=0), last)


@triton.jit
def pick(row, count, best, steepness, threshold, u, TILE: tl.constexpr):
    """Return the first index whose cumulative kept mass exceeds u times all kept mass."""
    STEP: tl.constexpr = _ROWS * TILE
    total = u * 0.0
    for start in range(0, count, STEP):
        total += tile_mass(row, start, count, best, steepness, threshold, TILE)
    goal = u * total
    before = u * 0.0
    start = 0
    mass = tile_mass(row, start, count, best, steepness, threshold, TILE)
    # The same sums in the same order reach `total`, which is above the goal.
    while (before + mass <= goal) & (start + STEP < count):
        before += mass
        start += STEP
        mass = tile_mass(row, start, count, best, steepness, threshold, TILE)
    return pick_inside(row, start, count, best, steepness, threshold, before, goal, TILE)


@triton.jit
def kth_chunk(largest, best, steepness, k):
    """Return the k-th largest e among those of the chunks' largest logits; 0 with fewer chunks."""
    e = tl.exp2((largest - best) * steepness)
    reached = tl.sum((e[:, None] >= e[None, :]).to(tl.int32), axis=0)
    return tl.max(tl.where(reached >= k, e, 0.0), axis=0)


# Longer than a function here may be: the filters in their order, which share all they know.
# longer than the budget: the filters follow one another on the same values.
@triton.jit
def sample_row(
    row, largest, best, temperature, top_k, top_p, min_p, u, copy, ids, V: tl.constexpr,
    MOST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the token of a row of finite maximum `best` and a temperature above 0.

    Args:
        row: The logits.
        largest: Largest logit of each chunk, -inf behind the chunks.
        best: The largest of them.
        temperature, top_k, top_p, min_p, u: The row's parameters.
        copy: f32[MOST] for the logits above the cut.
        ids: i32[MOST] for their indices.
    """
    steepness = tl.minimum(1.0 / temperature, _STEEPEST) * _LOG2_E
    floor = tl.minimum(tl.maximum(min_p, 0.0), 1.0)
    by_count = (top_k > 0) & (top_k < V)
    by_mass = top_p < 1.0
    # As many chunks reach the k-th largest of theirs as are to be kept. All that lies below
    # (1 - p) / V has less mass than 1 - p, so less than (1 - p) of all: the largest alone has 1.
    cut = floor
    if by_count:
        cut = kth_chunk(largest, best, steepness, top_k)
    elif by_mass:
        cut = tl.maximum(1.0 - tl.maximum(top_p, 0.0), 0.0) * (0.99 / V)
    count = top_k * 0 + V
    mass = u * 0.0
    copied = False
    if (cut > 0.0) | by_mass:
        above, mass = survey(row, V, best, steepness, cut, TILE)
        copied = (cut > 0.0) & (above <= MOST)
        if copied:
            copy_above(row, V, best, steepness, cut, copy, ids, TILE)
            row = copy
            count = above
    kept = top_k * 0
    if by_count:
        kept = kth_largest(row, count, best, steepness, top_k, as_bits(cut), TILE)
    if by_mass:
        if by_count:
            low = as_float(kept)
            mass, _, _ = masses_above(row, count, best, steepness, low, low, low, TILE)
        else:
            kept = as_bits(cut)
        kept = nucleus(row, count, best, steepness, top_p.to(tl.float64) * mass, kept, TILE)
    threshold = tl.maximum(as_float(kept), floor)
    token = pick(row, count, best, steepness, threshold, u, TILE)
    if copied:
        token = tl.load(ids + token)
    return token


@triton.jit
def choose_token(
    logits, temperature, top_k, top_p, min_p, seed, position, tokens, best, index, copy, ids,
    chunks, V: tl.constexpr, CHUNKS: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the token of one row from the largest logits of its chunks."""
    s = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    at = s * chunks + chunk
    largest = tl.load(best + at, mask=chunk < chunks, other=float("-inf"))
    first = tl.load(index + at, mask=chunk < chunks, other=_NO_INDEX)
    broken = tl.max((largest != largest).to(tl.int32), axis=0)
    peak = tl.max(largest, axis=0)
    token = tl.min(tl.where(largest == peak, first, _NO_INDEX), axis=0)
    heat = tl.load(temperature + s)
    if (broken != 0) | (tl.abs(peak) == float("inf")):
        token = token * 0 - 1
    elif heat > 0.0:
        u = uniform(tl.load(seed + s), tl.load(position + s))
        row = logits + s.to(tl.int64) * V
        copy += s.to(tl.int64) * MOST
        ids += s.to(tl.int64) * MOST
        k, p, floor = tl.load(top_k + s), tl.load(top_p + s), tl.load(min_p + s)
        token = sample_row(row, largest, peak, heat, k, p, floor, u, copy, ids, V, MOST, TILE)
    tl.store(tokens + s, token)


@triton.jit
def sample(
    logits, temperature, top_k, top_p, min_p, seed, position, tokens, workspace, rows,
    STAGE: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    MOST: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`sample`, in two launches.

    The workspace holds every chunk's largest logit and its index, then every row's copy and its
    indices.
    """
    chunks = tl.cdiv(V, CHUNK)
    words = workspace.to(tl.pointer_type(tl.int32))
    index = words + rows * chunks
    if STAGE == "scan":
        scan_chunk(logits, workspace, index, chunks, V, CHUNK, PDL)
    else:
        copies = 2 * rows * chunks
        wait_for_inputs(PDL)
        choose_token(
            logits, temperature, top_k, top_p, min_p, seed, position, tokens, workspace, index,
            workspace + copies, words + copies + rows * MOST, chunks, V, CHUNKS, MOST, TILE,
        )  # fmt: skip
