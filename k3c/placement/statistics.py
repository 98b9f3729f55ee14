"""What a placement does to batches: balance, experts read by a step, rows between islands.

Batches are drawn (`traffic.py`); nothing here changes a placement. A row goes to the replica that
the runtime takes: token number mod replicas, in the order of `Placement.homes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from k3c.placement.loads import Floats
from k3c.placement.placement import Placement
from k3c.placement.traffic import Experts, Traffic


@dataclass(frozen=True)
class Routes:
    """Where rows of a layer go.

    Attributes:
        ranks: Ranks of the placement.
        home: i64[E, most replicas]: rank of a replica; what is past the last repeats the first.
        count: i64[E]: replicas.
    """

    ranks: int
    home: NDArray[np.int64]
    count: NDArray[np.int64]

    def rank_of(self, chosen: Experts) -> NDArray[np.int64]:
        """Return the ranks i64[..., T, k] of the rows of tokens 0 to T - 1; experts alike."""
        token = np.arange(chosen.shape[-2])[:, None]
        return self.home[chosen, token % self.count[chosen]]

    def tokens(self, chosen: Experts) -> NDArray[np.int64]:
        """Return i64[R]: rows that each rank gets of a batch i64[T, k]."""
        return np.bincount(self.rank_of(chosen).ravel(), minlength=self.ranks)

    def distinct(self, chosen: Experts) -> NDArray[np.int64]:
        """Return i64[N, R]: different experts that each rank reads, for N batches i64[N, T, k]."""
        batches = len(chosen)
        experts = len(self.count)
        rank = self.rank_of(chosen) + (np.arange(batches) * self.ranks)[:, None, None]
        keys = np.unique(rank * experts + chosen)
        found = np.bincount(keys // experts, minlength=batches * self.ranks)
        return found.reshape(batches, self.ranks)


def routes(placement: Placement, layer: int) -> Routes:
    """Return where the rows of a layer go."""
    homes = placement.homes(layer)
    count = np.array([len(ranks) for ranks in homes])
    most = int(count.max())
    home = np.array([[ranks[n % len(ranks)] for n in range(most)] for ranks in homes])
    return Routes(placement.num_ranks, home, count)


def max_over_mean(placement: Placement, layers: Sequence[int], rows: Floats) -> Floats:
    """Return f64[L]: rows of the busiest rank over the mean, replicas of an expert taken as equal.

    Args:
        placement: Holds `layers`.
        layers: In the order of `rows`.
        rows: f64[L, E].
    """
    found = np.zeros(len(layers))
    for at, layer in enumerate(layers):
        slots = np.array(placement.layers[layer])
        count = np.bincount(slots.ravel(), minlength=placement.num_experts)
        loads = (rows[at] / count)[slots].sum(axis=1)
        found[at] = loads.max() / loads.mean()
    return found


@dataclass(frozen=True)
class IslandTraffic:
    """Share of rows that leave the island of their token, when tokens are spread evenly over ranks.

    Attributes:
        by_number: With the replica that the runtime takes.
        nearest: If each row took a replica in its island where there is one.
    """

    by_number: float
    nearest: float


def island_traffic(
    placement: Placement, layers: Sequence[int], rows: Floats, islands: Sequence[int]
) -> IslandTraffic:
    """Return the share of rows between islands over all layers.

    Args:
        placement: Holds `layers`.
        layers: In the order of `rows`.
        rows: f64[L, E].
        islands: Island of each rank.
    """
    of_rank = np.unique(np.asarray(islands), return_inverse=True)[1]
    size = np.bincount(of_rank) / len(of_rank)
    left_by_number = left_nearest = 0.0
    for at, layer in enumerate(layers):
        slots = np.array(placement.layers[layer])
        held = np.zeros((len(size), placement.num_experts))
        np.add.at(held, (of_rank[:, None], slots), 1.0)
        share = rows[at] / rows[at].sum()
        stays = (held / held.sum(axis=0) * share).sum(axis=1)
        left_by_number += max(0.0, 1.0 - float(stays @ size))
        left_nearest += float(((held == 0) * share).sum(axis=1) @ size)
    return IslandTraffic(left_by_number / len(layers), left_nearest / len(layers))


@dataclass(frozen=True)
class Moves:
    """What a rebalance writes.

    Attributes:
        slots: Physical experts that change, over all layers and ranks.
        layers: Layers with a change.
        between_ranks: Of `slots`, those whose weights another rank must send.
    """

    slots: int
    layers: int
    between_ranks: int


def moves(before: Placement, after: Placement) -> Moves:
    """Count the slots that differ.

    Args:
        before: What the ranks hold now.
        after: The same ranks and slots.
    """
    slots = layers = sent = 0
    for layer, ranks in after.layers.items():
        changed = 0
        for old, new in zip(before.layers[layer], ranks, strict=True):
            changed += sum(a != b for a, b in zip(old, new, strict=True))
            sent += len(set(new) - set(old))
        slots += changed
        layers += bool(changed)
    return Moves(slots, layers, sent)


DECODE_BATCHES = (1, 8, 64)
_TRIALS = 16
_LAYERS = 12


def decode_experts(placement: Placement, traffic: Traffic, seed: int = 0) -> dict[int, float]:
    """Estimate the different experts that the busiest rank reads in a decode step, by batch.

    Args:
        placement: Holds the traffic's layers.
        traffic: Where tokens come from; every token is another request's.
        seed: Of the draws: 16 steps of at most 12 layers, spread evenly.

    Returns:
        Tokens of a step -> mean over steps and layers.
    """
    rng = np.random.default_rng(seed)
    count = len(traffic.layers)
    chosen_layers = sorted({at * count // _LAYERS for at in range(_LAYERS)})
    found: dict[int, list[float]] = {batch: [] for batch in DECODE_BATCHES}
    for at in chosen_layers:
        where = routes(placement, traffic.layers[at])
        steps = [traffic.batch(at, max(DECODE_BATCHES), 1, rng) for _ in range(_TRIALS)]
        tokens = np.stack(steps)
        for batch, values in found.items():
            values.append(float(where.distinct(tokens[:, :batch]).max(axis=1).mean()))
    return {batch: float(np.mean(values)) for batch, values in found.items()}
