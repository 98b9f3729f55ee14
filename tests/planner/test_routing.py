"""Experts and rows of the busiest rank, against simulated routers and small cases by hand."""

import pytest

from k3c.planner.routing import Routing, routing_of


@pytest.mark.parametrize(
    ("ranks", "tokens", "experts"),
    # performance.md 2.4 and section 3: simulated uniform router, 896 experts, 16 of them a token.
    [(16, 1, 3.06), (16, 8, 12.2), (16, 64, 44.2), (8, 1, 4.12), (64, 1, 2.0)],
)
def test_the_busiest_rank_is_that_of_a_simulated_router(ranks, tokens, experts):
    found = Routing().experts(tokens, 16, 896, 896 // ranks)
    assert found == pytest.approx(experts, rel=0.05)


@pytest.mark.parametrize(("tokens", "experts"), [(1, 1.0), (8, 7.5), (64, 38.3)])
def test_the_mean_rank_is_that_of_a_simulated_router(tokens, experts):
    found = Routing(busiest=False).experts(tokens, 16, 896, 56)
    assert found == pytest.approx(experts, rel=0.01)


def test_one_rank_has_all_experts_that_are_chosen():
    assert Routing().experts(1, 2, 4, 4) == pytest.approx(2.0)
    assert Routing().rows(8, 2, 4, 4) == 16


def test_two_ranks_of_one_expert_by_hand():
    # Each expert is chosen with chance 1/2; the busiest rank has one unless neither is chosen.
    assert Routing().experts(1, 1, 2, 1) == pytest.approx(0.75)


def test_a_popular_expert_makes_its_rank_busier_and_a_replica_relieves_it():
    shares = (0.7, 0.1, 0.1, 0.1)
    skewed = Routing(shares).rows(1000, 1, 4, 2)
    assert skewed > Routing().rows(1000, 1, 4, 2) > 500
    relieved = Routing(shares, ((0, 1, 2), (0, 3, 1))).rows(1000, 1, 4, 3)
    assert relieved < skewed


def test_experts_grow_with_tokens_and_never_beyond_those_of_the_rank():
    found = [Routing().experts(t, 16, 896, 56) for t in (1, 2, 8, 64, 512, 8192)]
    assert found == sorted(found)
    assert found[-1] <= 56


def test_a_load_and_a_placement_give_the_routing():
    found = routing_of([30, 10, 0, 0], [[0, 1], [2, 3]])
    assert found.shares == (0.75, 0.25, 0, 0)
    # Everything goes to the first rank.
    assert found.rows(100, 1, 4, 2) == pytest.approx(100)
    assert found.experts(100, 1, 4, 2) == pytest.approx(2, abs=0.01)
