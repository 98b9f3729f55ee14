"""A better placement than the one that runs, for as few moved experts as it takes.

The layer and the change with the most relief for a moved expert come first. A change gives a slot
of the busiest rank to another rank's expert and back (two moves), or gives the busiest rank's
heaviest expert one more replica, in place of a replica that another expert can spare (one move).
Everything else stays in its slot. A layer whose busiest rank is within what chance explains is left
alone: a balanced trace moves nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from k3c.errors import PlacementError
from k3c.placement.loads import ExpertLoad, Floats
from k3c.placement.placement import Placement
from k3c.placement.state import Ints, counts, normalised

TOLERANCE = 0.02  # of the mean: less is not worth a move
_LEAST = 1e-6


def rebalance(load: ExpertLoad, previous: Placement, max_moves: int | None = None) -> Placement:
    """Improve a placement for a new load.

    Args:
        load: What was counted since.
        previous: What the ranks hold now.
        max_moves: Slots that may be written, over all layers and ranks; None: no limit.

    Raises:
        PlacementError: The placement is of another model.
    """
    check_previous(load, previous)
    layers = {n: _Layer(rows, previous, n) for n, rows in zip(load.layers, load.rows, strict=True)}
    left = math.inf if max_moves is None else max_moves
    queue = [entry for n in layers for entry in _next(n, layers[n])]
    heapq.heapify(queue)
    while queue:
        _, number, change = heapq.heappop(queue)
        if change.moves > left:
            continue
        left -= change.moves
        layers[number].apply(change)
        for entry in _next(number, layers[number]):
            heapq.heappush(queue, entry)
    placed = {n: layers[n].ranks() if n in layers else previous.layers[n] for n in previous.layers}
    return Placement(previous.num_experts, previous.num_ranks, previous.slots_per_rank, placed)


def check_previous(load: ExpertLoad, previous: Placement) -> None:
    """Check that a placement holds the experts and layers of a load.

    Raises:
        PlacementError: Another number of experts, or a layer is missing.
    """
    where = "previous placement"
    if previous.num_experts != load.num_experts:
        what = f"{previous.num_experts} experts, the load has {load.num_experts}"
        raise PlacementError(what, where, "take the placement of this model")
    missing = sorted(set(load.layers) - set(previous.layers))
    if missing:
        what = f"{len(previous.layers)} layers, the load has {len(load.layers)}"
        raise PlacementError(f"{what}; layer {missing[0]} is missing", where, "place all layers")


@dataclass(frozen=True, order=True)
class _Change:
    """Two slots change places; or, in one move, slot `j` of `two` gets a replica of slot `i`."""

    moves: int
    one: int
    i: int
    two: int
    j: int


def _next(number: int, layer: _Layer) -> Iterator[tuple[float, int, _Change]]:
    """Give the queue entry of a layer's best change, if there is one: most relief a move first."""
    found = layer.best()
    if found is not None:
        relief, change = found
        yield -relief / change.moves, number, change


class _Layer:
    """One layer under its new load; loads are in units of the mean rank's.

    What counts is the sum of squares of what ranks have over the mean: it falls with every useful
    change even where several ranks are equally busy.
    """

    def __init__(self, rows: Floats, previous: Placement, number: int) -> None:
        self.load: Floats = normalised(rows[None], previous.num_ranks)[0]
        self.slots: Ints = np.array(previous.layers[number], dtype=np.int32)
        self.count = counts(self.slots[None], len(rows))[0]
        self.limit = 1 + max(TOLERANCE, chance(float(rows.sum()), previous.num_ranks))

    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Return the experts of each rank's slots."""
        return tuple(map(tuple, self.slots.tolist()))

    def best(self) -> tuple[float, _Change] | None:
        """Return the change with the most relief a move; None: good enough, or nothing helps."""
        each = self.load / self.count
        loads = each[self.slots].sum(axis=1)
        if loads.max() <= self.limit:
            return None
        held = np.zeros((len(self.slots), len(each)), np.bool_)
        np.put_along_axis(held, self.slots, True, axis=1)
        found = [self._swap(each, loads, held), self._replica(each, loads, held)]
        good = [pair for pair in found if pair is not None and pair[0] > _LEAST]
        return max(good, key=lambda pair: (pair[0] / pair[1].moves, pair[1]), default=None)

    def apply(self, change: _Change) -> None:
        """Make a change."""
        mine = self.slots[change.one, change.i]
        theirs = self.slots[change.two, change.j]
        self.slots[change.two, change.j] = mine
        if change.moves == 2:
            self.slots[change.one, change.i] = theirs
        else:
            self.count[mine] += 1
            self.count[theirs] -= 1

    def _swap(self, each: Floats, loads: Floats, held: np.ndarray) -> tuple[float, _Change]:
        busy = int(loads.argmax())
        mine = self.slots[busy]
        # [i, rank, j]: slot i of the busy rank and slot j of another.
        moved = each[mine][:, None, None] - each[self.slots][None]
        legal = ~held[:, mine].T[:, :, None] & ~held[busy][self.slots][None]
        before = _over(loads)
        relief = before[busy] - _over(loads[busy] - moved)
        relief += before[None, :, None] - _over(loads[None, :, None] + moved)
        relief = np.where(legal, relief, -np.inf)
        i, two, j = (int(n) for n in np.unravel_index(int(relief.argmax()), relief.shape))
        return float(relief[i, two, j]), _Change(2, busy, i, two, j)

    def _replica(
        self, each: Floats, loads: Floats, held: np.ndarray
    ) -> tuple[float, _Change] | None:
        busy = int(loads.argmax())
        i = int(each[self.slots[busy]].argmax())
        expert = int(self.slots[busy, i])
        spare = (self.count[self.slots] > 1) & ~held[:, expert][:, None]
        two, j = np.nonzero(spare)
        if not len(two):
            return None
        gives = self.slots[two, j]
        thinner = self.load[expert] / (self.count[expert] + 1)
        base = loads - held[:, expert] * (each[expert] - thinner)
        # [victim, rank]: the other replicas of the expert that gives a slot take its rows.
        rise = self.load[gives] / (self.count[gives] - 1) - each[gives]
        after = base[None] + held[:, gives].T * rise[:, None]
        at = np.arange(len(two))
        after[at, two] += thinner - each[gives] - rise
        relief = _over(loads).sum() - _over(after).sum(axis=1)
        best = int(relief.argmax())
        return float(relief[best]), _Change(1, busy, i, int(two[best]), int(j[best]))


def _over(loads: Floats) -> Floats:
    return np.maximum(loads - 1, 0) ** 2


def chance(rows: float, ranks: int) -> float:
    """Return how far over the mean a rank is by chance, but once in a hundred layers, as a share.

    Args:
        rows: Counted rows of a layer; the trace that the placement was made from had as many.
        ranks: Ranks.

    Source: a rank's count differs by the root of itself, in both traces; the largest of n normal
        deviations is about sqrt(2 ln n) standard deviations.
    """
    return math.sqrt(2 * math.log(100 * ranks) * 2 * ranks / max(rows, 1.0))
