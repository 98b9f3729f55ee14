"""From a load to a placement: a greedy start, exchanges that level ranks, exchanges that refine.

A start follows the rules of EPLB. `level` only lowers the busiest rank. `refine` may raise it
again, by what no batch can show, and never over what EPLB reaches. Where EPLB has no twins, two
replicas of an expert on a rank, one start is EPLB's own, so the result is at least as balanced.
Equal input gives equal output.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from k3c.errors import PlacementError
from k3c.placement.features import features
from k3c.placement.loads import ExpertLoad, Floats
from k3c.placement.pack import first_state, published_worst
from k3c.placement.placement import Placement, check_counts
from k3c.placement.state import Indices, State, normalised, to_placement
from k3c.placement.swap import Goal, level, press, refine

LEVEL_SWEEPS = 12
# A batch of 4096 tokens over 16 ranks differs by 2 % from its mean: a tenth of that is free where
# steps or pairs say what to do with it.
REFINE_SWEEPS, SLACK = 8, 0.0005
SEEN_SWEEPS, SEEN_SLACK = 64, 0.002
_CHUNK_LAYERS = 16  # what one thread works on: bounds memory, keeps the arrays in the cache


def place(
    load: ExpertLoad, num_ranks: int, slots_per_rank: int, islands: Sequence[int] = ()
) -> Placement:
    """Find a placement for a load.

    Args:
        load: Rows, and where known pairs and steps.
        num_ranks: Ranks that share the experts.
        slots_per_rank: Physical experts of a rank; see `placement.slots_for`.
        islands: Island (host, NVLink domain) of each rank; empty: one.

    Raises:
        PlacementError: The slots do not hold the experts, or `islands` does not name every rank.
    """
    check_counts(load.num_experts, num_ranks, slots_per_rank)
    of_rank = island_numbers(islands, num_ranks)
    starts = range(0, len(load.layers), _CHUNK_LAYERS)
    parts = [_part(load, slice(start, start + _CHUNK_LAYERS)) for start in starts]
    with ThreadPoolExecutor(max_workers=2) as pool:
        states = list(pool.map(lambda part: _solve(part, of_rank, slots_per_rank), parts))
    slots = np.concatenate([state.slots for state in states])
    whole = State(normalised(load.rows, num_ranks), states[0].count, slots)
    return to_placement(whole, load.layers)


def island_numbers(islands: Sequence[int], num_ranks: int) -> Indices:
    """Return intp[R]: islands numbered from 0.

    Raises:
        PlacementError: Another number of ranks.
    """
    if islands and len(islands) != num_ranks:
        what = f"islands of {len(islands)} ranks, expected {num_ranks}"
        raise PlacementError(what, "placement", "name the island of every rank")
    if not islands:
        return np.zeros(num_ranks, np.intp)
    return np.unique(np.asarray(islands), return_inverse=True)[1].astype(np.intp)


def _part(load: ExpertLoad, at: slice) -> ExpertLoad:
    return replace(
        load,
        layers=load.layers[at],
        rows=load.rows[at],
        pairs=None if load.pairs is None else load.pairs[at],
        steps=None if load.steps is None else load.steps[at],
    )


def _solve(load: ExpertLoad, islands: Indices, slots: int) -> State:
    ranks = len(islands)
    rows = normalised(load.rows, ranks)
    theirs = published_worst(rows, ranks, slots)
    state = _level_best(rows, theirs, islands, slots)
    seen = load.steps is not None or load.pairs is not None
    # A rank over the mean has a giant: it may get no more, whatever the busiest rank has.
    free = np.minimum(theirs, 1 + (SEEN_SLACK if seen else SLACK))
    bound = np.maximum(state.rank_loads(), free[:, None])
    if ranks > 1:
        goal = Goal(features(load, state.count, ranks), bound, islands)
        refine(state, goal, SEEN_SWEEPS if seen else REFINE_SWEEPS)
    return state


def _level_best(rows: Floats, theirs: Floats, islands: Indices, slots: int) -> State:
    """Level one start after another, in the layers where no start so far is as good as EPLB's."""
    one = np.zeros_like(islands)
    state = first_state(rows, islands, slots)
    level(state, islands, LEVEL_SWEEPS)
    # Without islands the start is EPLB's own, unless that has twins; then the last two help.
    for near, thrifty in ((one, False), (islands, True), (one, True)):
        behind = np.flatnonzero(state.worst() > theirs * (1 + 1e-12))
        if not len(behind):
            break
        other = first_state(rows[behind], near, slots, thrifty=thrifty)
        level(other, near, 2 * LEVEL_SWEEPS)
        better = other.worst() < state.worst()[behind]
        state.slots[behind[better]] = other.slots[better]
        state.count[behind[better]] = other.count[better]
    for layer in np.flatnonzero(state.worst() > 1 + SLACK):
        press(state, int(layer))
    return state
