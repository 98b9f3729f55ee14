"""A first placement: replicas for the heaviest experts, then the heaviest onto the lightest rank.

Two greedy rules, all layers at once. They are the rules of EPLB with one more: a rank never gets a
second replica of an expert. Where EPLB keeps to that by itself, both choose the same loads, so what
improves this start is never worse than EPLB.

Source: k3_serving.md section 7.
"""

from __future__ import annotations

import numpy as np

from k3c.placement.loads import Floats
from k3c.placement.state import Indices, Ints, State, counts

_CROWDED = 1e6  # an island that has the expert weighs more than any load


def first_state(load: Floats, islands: Indices, slots: int, *, thrifty: bool = False) -> State:
    """Return the greedy placement.

    Args:
        load: f64[L, E] in units of a rank's mean.
        islands: intp[R]: island of each rank; replicas of an expert go to different ones first.
        slots: Physical experts of a rank; with all ranks they hold all experts.
        thrifty: No replicas where one holds no more than a rank should: what is left of them goes
            to the lightest experts, where it changes nothing.
    """
    ranks = len(islands)
    count = replicate(load, ranks * slots - load.shape[1], ranks, 1.0 if thrifty else 0.0)
    return State(load, count, pack(load, count, islands, slots))


def published_worst(load: Floats, ranks: int, slots: int) -> Floats:
    """Return f64[L]: the busiest rank by the rules of EPLB alone, twins on a rank allowed.

    It may be below what the same rules give without twins: a rank with two of an expert's three
    replicas gets two thirds of its rows.
    """
    replicas = ranks * slots - load.shape[1]
    count = replicate(load, replicas, load.shape[1] + replicas)
    each = load / count
    order = np.argsort(-each, axis=1, kind="stable")
    each = np.take_along_axis(each, order, axis=1)
    sizes = np.take_along_axis(count, order, axis=1)
    weights = np.array([np.repeat(w, n) for w, n in zip(each, sizes, strict=True)])
    total = np.zeros((len(load), ranks))
    used = np.zeros((len(load), ranks), np.int32)
    at = np.arange(len(load))
    for weight in weights.T:
        rank = np.where(used == slots, np.inf, total).argmin(axis=1)
        total[at, rank] += weight
        used[at, rank] += 1
    return total.max(axis=1)


def replicate(load: Floats, replicas: int, ranks: int, enough: float = 0.0) -> Ints:
    """Give replicas one by one to the expert with the most load a replica.

    Args:
        load: f64[L, E].
        replicas: How many, beyond one for each expert.
        ranks: No expert gets more than one on each.
        enough: Once no replica has more load, the lightest experts get what is left.

    Returns:
        i32[L, E]: at least 1, at most `ranks`.
    """
    count = np.ones(load.shape, np.int32)
    each = load.copy()
    at = np.arange(len(load))
    for _ in range(replicas):
        expert = each.argmax(axis=1)
        light = each[at, expert] <= enough
        if light.any():
            expert[light] = np.where(count < ranks, load, np.inf)[light].argmin(axis=1)
        count[at, expert] += 1
        left = np.where(count[at, expert] < ranks, load[at, expert] / count[at, expert], -1.0)
        each[at, expert] = left
    return count


def pack(load: Floats, count: Ints, islands: Indices, slots: int) -> Ints:
    """Put replicas on ranks, heaviest first, each on the lightest rank that can take it.

    Returns:
        i32[L, R, S]: no rank has an expert twice.
    """
    layers, experts = load.shape
    ranks = len(islands)
    each = load / count
    order = np.argsort(-each, axis=1, kind="stable")
    sizes = np.take_along_axis(count, order, axis=1)
    items = np.array([np.repeat(order[at], sizes[at]) for at in range(layers)])
    weights = np.take_along_axis(each, items, axis=1)
    found = np.full((layers, ranks, slots), -1, np.int32)
    total = np.zeros((layers, ranks))
    used = np.zeros((layers, ranks), np.int32)
    held = np.zeros((layers, ranks, experts), np.bool_)
    near = np.zeros((layers, experts, int(islands.max()) + 1), np.int32)
    at = np.arange(layers)
    for item, weight in zip(items.T, weights.T, strict=True):
        closed = (used == slots) | held[at, :, item]
        price = total if near.shape[2] == 1 else total + _CROWDED * near[at, item][:, islands]
        rank = np.where(closed, np.inf, price).argmin(axis=1)
        stuck = closed[at, rank]
        for layer in np.flatnonzero(stuck):
            rank[layer] = _make_room(found[layer], used[layer], held[layer], int(item[layer]))
            total[layer] = np.where(found[layer] >= 0, each[layer][found[layer]], 0.0).sum(axis=1)
        found[at, rank, used[at, rank]] = item
        used[at, rank] += 1
        total[at, rank] += weight
        held[at, rank, item] = True
        near[at, item, islands[rank]] += 1
    assert (counts(found, experts) == count).all(), "every replica has a slot"
    return found


def _make_room(found: Ints, used: Ints, held: np.ndarray, item: int) -> int:
    """Free a slot on a rank without `item` by moving an expert to a rank with room.

    All ranks with room hold `item`. A full rank without it exists, as there are no more replicas
    than ranks; it holds some expert that the rank with room lacks, as it holds more of them.

    Returns:
        The rank, with a slot free at its end.
    """
    taker = int((used < found.shape[1]).argmax())
    for rank in np.flatnonzero(~held[:, item]):
        for slot in range(int(used[rank]) - 1, -1, -1):
            expert = found[rank, slot]
            if not held[taker, expert]:
                found[taker, used[taker]] = expert
                found[rank, slot] = found[rank, used[rank] - 1]
                found[rank, used[rank] - 1] = -1
                used[taker] += 1
                used[rank] -= 1
                held[taker, expert], held[rank, expert] = True, False
                return int(rank)
    raise AssertionError("more replicas than ranks")
