"""Better placements by exchanges of two experts, in all layers and pairs of ranks at once.

A sweep pairs the ranks off, looks at every exchange of each pair, and makes the best one. No sweep
makes the busiest rank busier than a bound, so whatever else is improved, the balance stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from k3c.placement.loads import Floats
from k3c.placement.state import Bools, Indices, State

_EPS = 1e-9


@dataclass(frozen=True)
class Pairs:
    """Pairs of ranks of every layer, and what they hold.

    Attributes:
        one: intp[L, P] ranks.
        two: intp[L, P] ranks.
        legal: bool[L, P, S, S]: slot i of `one` and j of `two` may change places.
    """

    one: Indices
    two: Indices
    legal: Bools


def pair_off(state: State, held: Bools, order: Indices) -> Pairs:
    """Pair the first rank of an order with the last, the second with the last but one, ...

    Args:
        state: The placement.
        held: `state.held()`.
        order: intp[L, R].
    """
    half = order.shape[1] // 2
    one, two = order[:, :half], order[:, ::-1][:, :half]
    at = np.arange(len(order))[:, None]
    mine, theirs = state.slots[at, one], state.slots[at, two]
    deep = at[:, :, None]
    arrives = ~held[deep, one[:, :, None], theirs]
    leaves = ~held[deep, two[:, :, None], mine]
    return Pairs(one, two, leaves[..., :, None] & arrives[..., None, :])


def level(state: State, islands: Indices, sweeps: int, seed: int = 0) -> None:
    """Lower the busiest ranks: bring the loads of pairs of ranks as close as one exchange can.

    Args:
        state: Changed in place; the busiest rank of no layer gets busier.
        islands: intp[R]: replicas of an expert in different islands stay in different ones.
        sweeps: How many.
        seed: Of the random pairings between the sorted ones.
    """
    if state.slots.shape[1] == 1:
        return
    rng = np.random.default_rng(seed)
    held = state.held()
    for sweep in range(sweeps):
        loads = state.rank_loads()
        ranks = loads.shape[1]
        order = np.argsort(-loads, axis=1, kind="stable")
        if sweep % 2:
            order = np.broadcast_to(rng.permutation(ranks), order.shape)
        pairs = pair_off(state, held, order)
        at = np.arange(len(loads))[:, None]
        gap = loads[at, pairs.one] - loads[at, pairs.two]
        item = state.gather(state.each)
        moved = item[at, pairs.one][..., :, None] - item[at, pairs.two][..., None, :]
        # After the exchange the gap is |gap - 2 moved|.
        legal = pairs.legal & (_crowding(state, pairs, islands) <= 0)
        cost = np.where(legal, np.abs(gap[..., None, None] - 2 * moved), np.inf)
        _exchange(state, held, pairs, cost, np.abs(gap) - _EPS)


def press(state: State, layer: int) -> None:
    """Lower the busiest rank of one layer by exchanges with any rank, until none helps.

    For a layer with an expert that is too heavy for any rank: its rank should hold the lightest
    others, which may lie anywhere. Only experts without replicas move.

    Args:
        state: Changed in place.
        layer: Position of the layer.
    """
    each, slots = state.each[layer], state.slots[layer]
    single = state.count[layer][slots] == 1
    for _ in range(4 * slots.shape[1]):
        loads = each[slots].sum(axis=1)
        busy = int(loads.argmax())
        # [i, rank, j]: slot i of the busy rank for slot j of another.
        moved = each[slots[busy]][:, None, None] - each[slots][None]
        after = np.maximum(loads[busy] - moved, loads[None, :, None] + moved)
        after = np.where(single[busy][:, None, None] & single[None], after, np.inf)
        after[:, busy] = np.inf
        i, rank, j = np.unravel_index(int(after.argmin()), after.shape)
        if after[i, rank, j] >= loads[busy] - _EPS:
            return
        slots[busy, i], slots[rank, j] = slots[rank, j], slots[busy, i]


@dataclass(frozen=True)
class Goal:
    """What `refine` improves, and what it keeps.

    Attributes:
        features: f64[L, E, F] of one replica of an expert; a rank's feature is the sum of its
            experts'. A column that lists deviations over samples makes its squares a variance.
        bound: f64[L, R]: no rank's load goes over its own.
        islands: intp[R]: island of each rank; replicas of an expert go to different ones first.
    """

    features: Floats
    bound: Floats
    islands: Indices


def refine(state: State, goal: Goal, sweeps: int, seed: int = 0) -> None:
    """Make ranks alike in every feature: lower the sum over ranks of squared features.

    Args:
        state: Changed in place.
        goal: The features, the bound and the islands.
        sweeps: How many.
        seed: Of the pairings.
    """
    rng = np.random.default_rng(seed)
    held = state.held()
    layers, ranks, slots = state.slots.shape
    at = np.arange(layers)[:, None]
    columns = np.concatenate([state.each[..., None], goal.features], axis=2)
    for _ in range(sweeps):
        order = np.broadcast_to(rng.permutation(ranks), (layers, ranks))
        flat = columns[at, state.slots.reshape(layers, -1)]
        values = flat.reshape(layers, ranks, slots, -1)
        sums = values.sum(axis=2)
        pairs = pair_off(state, held, order)
        mine, theirs = values[at, pairs.one], values[at, pairs.two]
        a, b = sums[at, pairs.one], sums[at, pairs.two]
        moved = mine[..., 0][..., :, None] - theirs[..., 0][..., None, :]
        gets = a[..., 0][..., None, None] - moved, b[..., 0][..., None, None] + moved
        most = (goal.bound[at, side][..., None, None] for side in (pairs.one, pairs.two))
        fits = np.logical_and(*(load <= limit for load, limit in zip(gets, most, strict=True)))
        cost = _change(mine[..., 1:], theirs[..., 1:], (a - b)[..., 1:])
        cost += _crowding(state, pairs, goal.islands)
        cost = np.where(pairs.legal & fits, cost, np.inf)
        _exchange(state, held, pairs, cost, np.full(cost.shape[:2], -_EPS))


def _crowding(state: State, pairs: Pairs, islands: Indices) -> Floats:
    """Return how many more replicas share an island after an exchange: f64[L, P, S, S].

    One pair of replicas weighs as much as a whole rank's load: more than any feature.
    """
    layers, experts = state.load.shape
    number = int(islands.max()) + 1
    if number == 1 or (state.count == 1).all():
        return np.zeros(pairs.legal.shape)
    at = np.arange(layers)[:, None, None]
    found = np.zeros((layers, experts, number))
    np.add.at(found, (at, state.slots, islands[None, :, None]), 1.0)
    side = np.arange(layers)[:, None]
    home, away = islands[pairs.one][..., None], islands[pairs.two][..., None]
    mine, theirs = state.slots[side, pairs.one], state.slots[side, pairs.two]
    leaves = found[at, mine, away] - found[at, mine, home] + 1
    comes = found[at, theirs, home] - found[at, theirs, away] + 1
    apart = (home != away)[..., None]
    return np.where(apart, leaves[..., :, None] + comes[..., None, :], 0.0)


def _change(mine: Floats, theirs: Floats, gap: Floats) -> Floats:
    """Return half of how an exchange changes the sum of squares: |x - y|^2 - (x - y) gap.

    Args:
        mine: f64[L, P, S, F].
        theirs: f64[L, P, S, F].
        gap: f64[L, P, F]: the first rank's sums less the second's.
    """
    first = (mine * (mine - gap[..., None, :])).sum(axis=-1)
    second = (theirs * (theirs + gap[..., None, :])).sum(axis=-1)
    cross = mine @ np.swapaxes(theirs, -1, -2)
    return first[..., :, None] + second[..., None, :] - 2 * cross


def _exchange(state: State, held: Bools, pairs: Pairs, cost: Floats, below: Floats) -> int:
    """Make the cheapest exchange of each pair whose cost is below a limit; return how many."""
    layers, count, slots, _ = cost.shape
    flat = cost.reshape(layers, count, -1)
    best = flat.argmin(axis=2)
    good = np.take_along_axis(flat, best[..., None], axis=2)[..., 0] < below
    layer, pair = np.nonzero(good)
    i, j = np.divmod(best[layer, pair], slots)
    one, two = pairs.one[layer, pair], pairs.two[layer, pair]
    mine, theirs = state.slots[layer, one, i], state.slots[layer, two, j]
    state.slots[layer, one, i], state.slots[layer, two, j] = theirs, mine
    held[layer, one, mine] = held[layer, two, theirs] = False
    held[layer, one, theirs] = held[layer, two, mine] = True
    return len(layer)
