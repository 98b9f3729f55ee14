"""Packing is legal for any lifetimes, deterministic, and close to the lower bound."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3c.passes.plan_memory import Buffer, Problem, lower_bound_bytes, plan


@st.composite
def problems(draw):
    count = draw(st.integers(0, 24))
    items = []
    for i in range(count):
        first = draw(st.integers(0, 20))
        last = first + draw(st.integers(1, 12))
        align = draw(st.sampled_from([1, 2, 16, 64]))
        items.append(Buffer(f"b{i}", draw(st.integers(0, 5000)), first, last, align))
    return Problem(tuple(items))


def check(problem, solution):
    for b in problem.buffers:
        offset = solution.offsets[b.id]
        assert offset >= 0
        assert offset % b.align == 0
        assert offset + b.nbytes <= solution.height_bytes
    for a, b in itertools.combinations(problem.buffers, 2):
        if a.first < b.last and b.first < a.last:
            low, high = sorted((a, b), key=lambda x: (solution.offsets[x.id], x.nbytes))
            assert solution.offsets[low.id] + low.nbytes <= solution.offsets[high.id]


@settings(max_examples=80, deadline=None)
@given(problems())
def test_any_lifetimes_pack_without_overlap(problem):
    solution = plan(problem)
    check(problem, solution)
    live = [
        sum(-(-b.nbytes // b.align) * b.align for b in problem.buffers if b.first <= t < b.last)
        for t in range(40)
    ]
    assert solution.lower_bound_bytes == max(live)


@settings(max_examples=30, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_the_buffers_does_not_matter(problem, rng):
    shuffled = list(problem.buffers)
    rng.shuffle(shuffled)
    assert plan(problem) == plan(Problem(tuple(shuffled)))


def chain(seed):
    """Return lifetimes as a layer has them: most values die soon, a few live long."""
    rng = random.Random(seed)
    items = [Buffer("carry", 4096, 0, 40)]
    for i in range(40):
        last = min(40, i + rng.choice([2, 2, 2, 3, 4, 9]))
        items.append(Buffer(f"v{i}", rng.choice([64, 640, 1024, 3072, 5120]), i, last))
    return Problem(tuple(items))


@pytest.mark.parametrize("seed", range(20))
def test_layer_like_lifetimes_stay_within_five_percent_of_the_bound(seed):
    solution = plan(chain(seed))
    check(chain(seed), solution)
    assert solution.height_bytes <= 1.05 * solution.lower_bound_bytes


def test_parts_of_the_time_line_share_the_bytes():
    items = [Buffer(f"b{i}", 100, i, i + 1) for i in range(5)]
    assert plan(Problem(tuple(items))).height_bytes == 128


def test_nothing_takes_nothing():
    assert plan(Problem(())).height_bytes == 0
    assert lower_bound_bytes([]) == 0
