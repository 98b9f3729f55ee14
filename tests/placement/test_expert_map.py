"""The table that sends rows to replicas."""

import numpy as np

from k3c.placement.expert_map import expert_map, most_replicas
from k3c.placement.placement import Placement, contiguous
from k3c.placement.solve import place
from k3c.placement.statistics import routes
from k3c.placement.traffic import zipf


def test_a_row_has_the_replicas_and_this_ranks_slot_of_each():
    # Expert 0 has replicas on ranks 0 and 1; expert 1 starts on rank 1; slots are not ascending.
    placed = Placement(3, 2, 2, {4: ((1, 0), (0, 2))})
    assert most_replicas(3, 2, 2) == 2
    assert expert_map(placed, 4).tolist() == [
        [2, 1, -1], [1, 0, -1], [1, -1, -1],
        [2, -1, 0], [1, -1, -1], [1, 1, -1],
    ]  # fmt: skip


def test_the_width_is_what_any_placement_of_the_slots_can_need():
    assert most_replicas(896, 72, 13) == 41
    assert most_replicas(896, 64, 14) == 1
    assert most_replicas(896, 64, 15) == 64
    assert expert_map(contiguous(896, 72, [0]), 0).shape == (72 * 896, 42)


def test_every_row_lies_on_one_rank_and_that_is_where_statistics_send_it():
    placed = place(zipf([0], 64, 4, 1.2), 6, 13)
    table = expert_map(placed, 0).reshape(6, 64, -1)
    chosen = np.random.default_rng(0).integers(0, 64, (50, 4))
    token = np.arange(50)[:, None]
    replica = token % table[0, chosen, 0]
    slots = table[:, chosen, 1 + replica]  # [rank, token, k]
    assert ((slots >= 0).sum(axis=0) == 1).all()
    rank = (slots >= 0).argmax(axis=0)
    np.testing.assert_array_equal(rank, routes(placed, 0).rank_of(chosen))
    held = np.array(placed.layers[0])
    np.testing.assert_array_equal(held[rank, slots.max(axis=0)], chosen)
