"""Lines through measured launches, and the cost of the events around them."""

import pytest

from k3c.planner.fit import Fit, Row, fit
from k3c.planner.measured import EventCost, Sample, Step, event_cost, measured_steps
from k3c.planner.work import Work
from k3c.targets.target import load_target


def rows(*pairs):
    return [Row(floor_us, us, "x") for floor_us, us in pairs]


def work(kind="linear", count=10):
    return Work(kind, kind, "decode", True, 0.0, 0.0, count)


def test_rows_on_a_line_give_its_latency_and_share_and_no_spread():
    found = fit(rows((1, 4), (2, 6), (10, 22), (40, 82)))
    assert found.latency_us == pytest.approx(2)
    assert found.share == pytest.approx(0.5)
    assert found.spread == pytest.approx(0, abs=1e-9)
    assert found.us(100) == pytest.approx(202)


def test_the_spread_is_the_error_of_rows_that_the_fit_has_not_seen():
    # Without the third row the line is us = floor; with it at twice that, its error is a factor 2.
    found = fit(rows((1, 1), (10, 10), (100, 200), (30, 30), (50, 50)))
    assert found.spread > 0.25


def test_no_latency_is_negative_and_more_work_is_never_faster():
    for data in (rows((1, 0.2), (10, 20)), rows((1, 9), (10, 3)), rows((5, 7))):
        found = fit(data)
        assert found.latency_us >= 0
        assert found.share > 0
        assert found.us(20) > found.us(2)


def test_launches_of_one_size_keep_the_share_of_their_parent():
    parent = Fit(1.0, 0.5, 0.3, 100)
    found = fit(rows((2, 9), (2.5, 10)), parent)
    assert found.share == pytest.approx(0.5, rel=0.05)
    assert found.us(2.25) == pytest.approx(9.5, rel=0.02)
    assert found.spread == 0.3


def test_a_long_launch_of_one_size_is_slow_by_its_share_not_by_its_latency():
    found = fit(rows((100, 400)), Fit(1.0, 0.5, 0.3, 100))
    assert found.latency_us == 10.0
    assert found.us(100) == pytest.approx(400)


def test_events_cost_what_makes_launches_sum_to_their_step():
    def step(name, kernels, gathers):
        # A kernel takes 5 us and a gather 2; events add 3 and 30.
        samples = (
            Sample(work(count=kernels), kernels, 8.0),
            Sample(work("all_gather", gathers), gathers, 32.0),
        )
        return Step(name, "first", 5.0 * kernels + 2.0 * gathers, samples)

    found = event_cost([step("a", 100, 1), step("b", 200, 50), step("c", 300, 20)])
    assert found == EventCost(pytest.approx(3.0), pytest.approx(30.0))
    assert found.without(Sample(work(), 20, 16.0)) == pytest.approx(10.0)


def test_the_events_of_our_steps_cost_what_the_measurements_say():
    # perf/README.md: about 3 us of each figure are the event and the launch.
    assert 2.5 < event_cost(measured_steps("h200")).kernel_us < 4.5
    assert measured_steps("b200") == ()


@pytest.mark.parametrize(
    ("name", "floor_ms"),
    # performance.md 2.3: bytes of a rank of TEP16 at 4.3 TB/s, uniform router, as published.
    [
        ("W1 decode.b1", 4.58),
        ("W1 decode.b8", 7.49),
        ("W1 decode.b64", 22.74),
        ("W1S decode.b1", 2.52),
        ("W1S decode.b8", 5.43),
        ("W1S decode.b64", 20.67),
        ("W1L decode.b1", 5.37),
        ("W1L decode.b8", 13.81),
        # 2.71, 6.27 and 23.62 of 8 layers with experts; ours are 7, a dense layer and the head:
        # 1.45 + 2.35 GB more, 0.38 GB and 16, 120 or 613 experts of 17.5 MB less.
        ("W3 decode.b1", 3.44),
        ("W3 decode.b8", 6.58),
        ("W3 decode.b64", 21.91),
    ],
)
def test_the_work_of_a_measured_step_is_that_of_the_published_floor(name, floor_ms):
    step = next(s for s in measured_steps("h200") if s.name == name)
    target = load_target("h200")
    # Collectives of a rank alone are copies, which the floor does not count.
    kernels = [s.work for s in step.samples if not s.work.family.startswith("local_")]
    found = sum(work.floor_us(target) * work.count for work in kernels) / 1e3
    assert found == pytest.approx(floor_ms, rel=0.05)
