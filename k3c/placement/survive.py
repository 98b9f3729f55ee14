"""What the ranks that are left should hold when others are gone.

Every expert with a living replica stays where it is. One whose replicas are all gone is named:
somebody must read its weights again. It takes an empty slot, or one of an expert that has another.
This is the plan; how a running server agrees on it is the server's part.

Source: fault EP03.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from k3c.errors import PlacementError
from k3c.placement.loads import Floats
from k3c.placement.placement import Placement, check_counts
from k3c.placement.state import Ints


@dataclass(frozen=True)
class Recovery:
    """A placement without the dead ranks.

    Attributes:
        placement: Over the living ranks, numbered anew.
        ranks: New rank -> its number before.
        lost: Layer -> experts with no living replica: their weights are read again. Layers without
            any are left out.
        copies: Slots filled from another living rank, over all layers.
    """

    placement: Placement
    ranks: tuple[int, ...]
    lost: Mapping[int, tuple[int, ...]]
    copies: int


def survive(
    before: Placement, dead: Collection[int], rows: Mapping[int, Floats] | None = None
) -> Recovery:
    """Plan for the ranks that are left.

    Args:
        before: What all ranks held.
        dead: Ranks that are gone.
        rows: Layer -> f64[E] rows of each expert; without them all experts count alike.

    Raises:
        PlacementError: A dead rank does not exist, or none is left.
    """
    odd = sorted(set(dead) - set(range(before.num_ranks)))
    if odd:
        what = f"dead rank {odd[0]} of {before.num_ranks} ranks"
        raise PlacementError(what, "placement", f"ranks are 0 to {before.num_ranks - 1}")
    alive = tuple(rank for rank in range(before.num_ranks) if rank not in dead)
    if not alive:
        what = f"all {before.num_ranks} ranks are dead, expected one alive"
        raise PlacementError(what, "placement", "start the server again")
    fewest = -(-before.num_experts // len(alive))
    slots = max(before.slots_per_rank, fewest)
    check_counts(before.num_experts, len(alive), slots)
    layers: dict[int, tuple[tuple[int, ...], ...]] = {}
    lost: dict[int, tuple[int, ...]] = {}
    copies = 0
    for layer, ranks in before.layers.items():
        weight = np.ones(before.num_experts) if rows is None else rows[layer]
        held = np.full((len(alive), slots), -1, np.int32)
        held[:, : before.slots_per_rank] = [ranks[rank] for rank in alive]
        missing, copied = _refill(held, weight)
        layers[layer] = tuple(map(tuple, held.tolist()))
        lost |= {layer: missing} if missing else {}
        copies += copied
    return Recovery(Placement(before.num_experts, len(alive), slots, layers), alive, lost, copies)


def _refill(held: Ints, weight: Floats) -> tuple[tuple[int, ...], int]:
    """Give lost experts a slot, then fill what is empty; return the lost ones, and slots copied."""
    count = np.bincount(held[held >= 0], minlength=len(weight))
    missing = [int(expert) for expert in np.flatnonzero(count == 0)]
    for expert in sorted(missing, key=lambda e: (-weight[e], e)):
        rank, slot = _free_slot(held, count, weight)
        old = held[rank, slot]
        if old >= 0:
            count[old] -= 1
        held[rank, slot] = expert
        count[expert] = 1
    empty = np.argwhere(held < 0)
    for rank, slot in empty:
        each = weight / count
        each[held[rank][held[rank] >= 0]] = -1.0
        expert = int(each.argmax())
        held[rank, slot] = expert
        count[expert] += 1
    return tuple(missing), len(empty)


def _free_slot(held: Ints, count: np.ndarray, weight: Floats) -> tuple[int, int]:
    """Return an empty slot, or else that of the expert that loses least by giving one up.

    Of equals, one on the rank with the least load.
    """
    filled = np.maximum(held, 0)
    loads = np.where(held >= 0, (weight / np.maximum(count, 1))[filled], 0.0).sum(axis=1)
    after = np.where(count > 1, weight / np.maximum(count - 1, 1), np.inf)
    price = np.where(held < 0, -1.0, after[filled])
    best = np.argwhere(price == price.min())
    rank, slot = min(best.tolist(), key=lambda place: (loads[place[0]], place))
    assert np.isfinite(price[rank, slot]), "the slots hold all experts"
    return rank, slot
