"""Statistics of placements, against counts by hand."""

import numpy as np
import pytest

from k3c.placement.loads import ExpertLoad
from k3c.placement.placement import Placement, contiguous
from k3c.placement.statistics import (
    decode_experts,
    island_traffic,
    max_over_mean,
    moves,
    routes,
)
from k3c.placement.traffic import steady

# Expert 0 on ranks 0 and 1, expert 1 on 1 and 0 (its first replica is on rank 1), 2 and 3 once.
PLACED = Placement(4, 2, 3, {0: ((0, 1, 2), (0, 1, 3))})


def test_rows_go_to_replica_token_mod_count():
    where = routes(PLACED, 0)
    chosen = np.array([[0, 1], [0, 1], [0, 2], [3, 1]])
    assert where.rank_of(chosen).tolist() == [[0, 1], [1, 0], [0, 0], [1, 0]]
    assert where.tokens(chosen).tolist() == [5, 3]


def test_an_expert_counts_once_on_each_rank_that_reads_it():
    where = routes(PLACED, 0)
    one = [[0, 2], [0, 2], [0, 3], [0, 3]]  # tokens 0 and 2 on rank 0, 1 and 3 on rank 1
    two = [[2, 3], [2, 3], [2, 3], [2, 3]]
    assert where.distinct(np.array([one, two])).tolist() == [[2, 2], [1, 1]]


def test_replicas_share_the_rows_of_their_expert():
    rows = np.array([[8.0, 4, 6, 2]])
    # Rank 0: 4 + 2 + 6, rank 1: 4 + 2 + 2; the mean is 10.
    assert max_over_mean(PLACED, [0], rows).tolist() == [1.2]


def test_rows_between_islands_are_those_whose_replica_is_elsewhere():
    rows = np.array([[8.0, 4, 6, 2]])
    found = island_traffic(PLACED, [0], rows, [0, 1])
    # By number half of all rows leave, as tokens are as likely in either island.
    assert found.by_number == pytest.approx(0.5)
    # Nearest: only experts 2 and 3 are ever elsewhere, for half of the tokens.
    assert found.nearest == pytest.approx(0.5 * 8 / 20)
    assert island_traffic(PLACED, [0], rows, [3, 3]).by_number == pytest.approx(0)


def test_moves_count_written_slots_and_those_that_come_from_another_rank():
    before = Placement(4, 2, 2, {0: ((0, 1), (2, 3)), 1: ((0, 1), (2, 3))})
    after = Placement(4, 2, 2, {0: ((1, 0), (2, 3)), 1: ((2, 1), (0, 3))})
    found = moves(before, after)
    assert (found.slots, found.layers, found.between_ranks) == (4, 2, 2)


def test_the_busiest_rank_of_a_decode_step_reads_what_chance_says():
    """Ratios of performance.md section 5 for EP16: 3.06 x, 1.62 x and 1.15 x the mean rank's."""
    load = ExpertLoad(tuple(range(12)), 16, np.ones((12, 896)))
    found = decode_experts(contiguous(896, 16, load.layers), steady(load))
    for batch, ratio in {1: 3.06, 8: 1.62, 64: 1.15}.items():
        mean = 56 * (1 - (1 - 16 / 896) ** batch)
        # 192 drawn steps: their mean is within 5 % of it.
        assert found[batch] == pytest.approx(ratio * mean, rel=0.05)
