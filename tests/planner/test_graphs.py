"""Graph memory by bucket, and which buckets a budget drops."""

import pytest

from k3c.planner.graphs import (
    CONTEXT_BYTES,
    LAUNCH_BYTES,
    RESERVE_BYTES,
    BucketCost,
    driver_bytes,
    graph_bytes,
    keep_buckets,
)
from k3c.targets.target import load_target

GPU, CPU = load_target("gb300"), load_target("cpu-avx2")
FLOORS_US = {1: 100, 2: 150, 4: 160, 8: 300}
ALL = (
    *(BucketCost(f"decode.b{n}", "decode", n, 1000, us) for n, us in FLOORS_US.items()),
    BucketCost("prefill.t64", "prefill", 64, 1000, 500),
)


def budget(count):
    return count * 1000 * LAUNCH_BYTES


def test_every_bucket_has_its_bytes():
    assert graph_bytes(GPU, 1214) == 1214 * LAUNCH_BYTES
    assert graph_bytes(CPU, 1214) == 0


def test_all_are_kept_where_the_budget_allows():
    kept = keep_buckets(ALL, GPU, budget(5))
    assert (len(kept.names), kept.dropped, kept.graph_bytes) == (5, {}, budget(5))


def test_the_bucket_whose_steps_lose_least_goes_first():
    # A step of 2 requests takes 150 us, in the bucket of 4 it takes 160: 7 % more.
    kept = keep_buckets(ALL, GPU, budget(4))
    assert list(kept.dropped) == ["decode.b2"]
    assert kept.dropped["decode.b2"].endswith("its steps run in decode.b4, floor +7%")


def test_the_largest_bucket_of_a_phase_is_never_dropped():
    kept = keep_buckets(ALL, GPU, 0)
    assert kept.names == ("decode.b8", "prefill.t64")
    assert kept.graph_bytes == budget(2)


@pytest.mark.parametrize("graphs", [0, 2**29, 2**30, 2**31])
def test_driver_and_graphs_take_the_reserve_and_more_only_where_graphs_need_it(graphs):
    total = driver_bytes(GPU, graphs) + graphs
    assert total == max(RESERVE_BYTES, CONTEXT_BYTES + graphs)
