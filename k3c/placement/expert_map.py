"""The table that sends rows to replicas: what ranks read on every step where experts are placed.

For each rank and logical expert: how many replicas it has, then for each replica its slot on that
rank, or -1 where the replica lies elsewhere. Token t takes replica t mod replicas. The width is
what any placement of so many slots can need: another placement of the same slots fits the same
artifact and is written in place.
"""

from __future__ import annotations

import numpy as np

from k3c.placement.placement import Placement
from k3c.placement.state import Ints


def most_replicas(num_experts: int, num_ranks: int, slots_per_rank: int) -> int:
    """Return how many replicas an expert can have, whatever the placement."""
    return min(num_ranks, slots_per_rank * num_ranks - num_experts + 1)


def expert_map(placement: Placement, layer: int) -> Ints:
    """Return the table of a layer, all ranks one after another.

    Args:
        placement: Holds the layer.
        layer: Which.

    Returns:
        i32[ranks * E, 1 + most]: row rank * E + e is (replicas of e, then for each replica, in the
        order of `Placement.homes`, its slot on that rank or -1; -1 past the last).
    """
    experts, ranks = placement.num_experts, placement.num_ranks
    most = most_replicas(experts, ranks, placement.slots_per_rank)
    table = np.full((ranks, experts, 1 + most), -1, np.int32)
    slot = [{e: n for n, e in enumerate(held)} for held in placement.layers[layer]]
    for expert, homes in enumerate(placement.homes(layer)):
        table[:, expert, 0] = len(homes)
        for replica, rank in enumerate(homes):
            table[rank, expert, 1 + replica] = slot[rank][expert]
    return table.reshape(ranks * experts, 1 + most)
