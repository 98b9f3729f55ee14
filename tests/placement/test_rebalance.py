"""Rebalancing: few moves, none for a balanced trace; survivors keep every expert."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3c.errors import PlacementError
from k3c.placement.loads import ExpertLoad
from k3c.placement.placement import Placement, contiguous
from k3c.placement.rebalance import rebalance
from k3c.placement.solve import place
from k3c.placement.statistics import max_over_mean, moves
from k3c.placement.survive import survive
from k3c.placement.traffic import balanced, lognormal, zipf


def test_a_balanced_trace_moves_nothing():
    """EP05: what differs by chance is no reason to move weights."""
    before = place(balanced(range(4), 896, 16, 1024, seed=1), 72, 13)
    after = rebalance(balanced(range(4), 896, 16, 1024, seed=2), before)
    assert moves(before, after).slots == 0


@pytest.mark.parametrize("limit", [0, 1, 7, 100])
def test_a_skewed_trace_moves_no_more_than_allowed(limit):
    """EP05: moves a rebalance are capped, and each one helps."""
    load = lognormal(range(8), 896, 16, 1.0)
    before = contiguous(896, 72, load.layers)
    after = rebalance(load, before, limit)
    assert moves(before, after).slots <= limit
    old, new = (max_over_mean(p, load.layers, load.rows) for p in (before, after))
    assert (new <= old + 1e-9).all()
    if limit == 100:
        assert moves(before, after).slots >= 99
        assert new.mean() < old.mean() - 0.1


def test_without_a_limit_every_layer_comes_close():
    load = lognormal(range(4), 896, 16, 1.0)
    after = rebalance(load, contiguous(896, 72, load.layers))
    assert max_over_mean(after, load.layers, load.rows).max() < 1.03


def test_one_move_gives_the_busiest_expert_a_replica():
    load = ExpertLoad((0,), 1, np.array([[6e7, 1e7, 1e7, 1e7]]))
    before = Placement(4, 4, 2, {0: ((0, 1), (2, 3), (1, 2), (1, 3))})
    after = rebalance(load, before, 1)
    assert moves(before, after).slots == 1
    assert len(after.homes(0)[0]) == 2


def test_experts_that_stay_keep_their_slots():
    load = lognormal(range(3), 896, 16, 1.0)
    before = contiguous(896, 64, load.layers, spare=1)
    after = rebalance(load, before, 30)
    changed = moves(before, after)
    # A swap inside a rank would copy weights and change no load: all that is written is sent.
    assert changed.slots == changed.between_ranks


def test_layers_without_a_new_load_stay():
    before = contiguous(64, 8, range(4))
    after = rebalance(lognormal([2], 64, 4, 1.5), before)
    assert [n for n in range(4) if after.layers[n] != before.layers[n]] == [2]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 10), st.integers(0, 3), st.integers(0, 30), st.integers(0, 2**31))
def test_any_rebalance_is_legal_equal_and_within_its_limit(ranks, spare, limit, seed):
    load = lognormal([0, 1], 24, 3, 1.5, seed)
    spare = min(spare, 24 - -(-24 // ranks))
    before = contiguous(24, ranks, [0, 1], spare)
    after = rebalance(load, before, limit)  # the type checks that it is legal
    assert moves(before, after).slots <= limit
    assert after == rebalance(load, before, limit)
    old, new = (max_over_mean(p, load.layers, load.rows) for p in (before, after))
    assert (new <= old + 1e-9).all()


def test_a_placement_of_another_model_is_refused_with_both_numbers():
    load = lognormal([1, 2], 64, 4, 1.0)
    with pytest.raises(PlacementError, match="32 experts, the load has 64"):
        rebalance(load, contiguous(32, 4, [1, 2]))
    with pytest.raises(PlacementError, match="1 layers, the load has 2; layer 2 is missing"):
        rebalance(load, contiguous(64, 4, [1]))


def test_with_a_rank_of_four_dead_the_others_hold_every_expert_and_the_lost_are_named():
    """EP03, the plan: what to read again, and where. The live protocol is not part of it."""
    load = zipf(range(2), 32, 4, 1.0)
    before = place(load, 4, 10)
    plan = survive(before, {1})
    assert plan.ranks == (0, 2, 3)
    assert plan.placement.slots_per_rank == 11  # 32 experts on 3 ranks
    for layer in load.layers:
        only = {e for e, ranks in enumerate(before.homes(layer)) if ranks == (1,)}
        assert only
        assert set(plan.lost[layer]) == only
        kept = sum(
            len(set(before.layers[layer][old]) & set(plan.placement.layers[layer][new]))
            for new, old in enumerate(plan.ranks)
        )
        # Three slots are new; the other lost experts take the place of a replica.
        assert kept == 30 - (len(only) - 3)


def test_replicas_on_living_ranks_need_no_reading():
    before = contiguous(4, 4, [0], spare=1)  # (0, 1), (2, 3), (0, 1), (2, 3)
    plan = survive(before, {3})
    assert plan.lost == {}
    assert plan.placement.layers[0] == ((0, 1), (2, 3), (0, 1))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.integers(0, 3), st.data())
def test_any_dead_ranks_leave_a_legal_placement(ranks, spare, data):
    before = contiguous(18, ranks, [0], min(spare, 18 - -(-18 // ranks)))
    dead = data.draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    plan = survive(before, dead, {0: np.arange(18.0)})
    living = {e for rank in plan.ranks for e in before.layers[0][rank]}
    assert set(plan.lost.get(0, ())) == set(range(18)) - living
    assert plan.placement.num_ranks == ranks - len(dead)


@pytest.mark.parametrize(
    ("dead", "message"), [({4}, "dead rank 4 of 4 ranks"), ({0, 1, 2, 3}, "all 4 ranks are dead")]
)
def test_impossible_deaths_are_refused(dead, message):
    with pytest.raises(PlacementError, match=message):
        survive(contiguous(8, 4, [0]), dead)
