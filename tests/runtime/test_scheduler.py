"""Which requests run next, and in which bucket."""

import numpy as np
import pytest

from k3c.artifact import Bucket
from k3c.errors import ArtifactError
from k3c.runtime.cache.prefix import PrefixCache, PrefixOptions
from k3c.runtime.cache.state import State
from k3c.runtime.driver.cpu import allocate
from k3c.runtime.request import Request, RequestOptions, Sampling
from k3c.runtime.scheduler import Scheduler
from tests.support.fake_plan import Sizes, make_buckets, make_manifest, make_plan


def make_scheduler(max_chunk_tokens=None, **changes):
    sizes = Sizes(**changes)
    buckets = make_buckets(sizes)
    plan, cache = make_plan(buckets[0], sizes), make_manifest(sizes, buckets).cache
    memory = {s: allocate(s, plan.space_bytes[s]) for s in ("kv_pages", "state_slots")}
    state = State(cache, plan, memory, unit_tokens=2)
    prefix = PrefixCache(state, PrefixOptions(on=False))
    return Scheduler(buckets, state, prefix, max_chunk_tokens), state


def request(number, prompt_tokens, max_tokens=8):
    options = RequestOptions(max_tokens, Sampling(), 0, frozenset())
    return Request(number, np.zeros(prompt_tokens, np.int32), options)


def submit(scheduler, *prompt_tokens, max_tokens=8):
    requests = [request(i, n, max_tokens) for i, n in enumerate(prompt_tokens)]
    for each in requests:
        scheduler.submit(each)
    return requests


def run(scheduler):
    """Take one step; return its bucket and the (request id, tokens) of it."""
    step = scheduler.next_step()
    scheduler.advance(step)
    for each, _ in step.chunks:
        if each.pending_tokens == 0:
            each.output.append(0)
    return step.bucket.name, [(each.id, tokens) for each, tokens in step.chunks]


def test_an_idle_scheduler_has_no_step():
    scheduler, _ = make_scheduler()
    assert not scheduler.has_work
    assert scheduler.next_step() is None


def test_the_smallest_bucket_that_holds_the_work_is_chosen():
    scheduler, _ = make_scheduler()
    submit(scheduler, 1, 3)
    assert run(scheduler) == ("prefill.t4", [(0, 1), (1, 3)])
    assert run(scheduler) == ("decode.b2", [(0, 1), (1, 1)])


def test_chunks_fill_the_largest_bucket_in_order_of_arrival():
    scheduler, _ = make_scheduler()
    submit(scheduler, 10, 9, 3)
    assert run(scheduler) == ("prefill.t16", [(0, 10), (1, 6)])
    assert run(scheduler) == ("decode.b1", [(0, 1)])
    assert run(scheduler) == ("prefill.t16", [(1, 3), (2, 3)])
    assert run(scheduler) == ("decode.b4", [(0, 1), (1, 1), (2, 1)])


def test_prefill_and_decode_take_turns_while_there_is_work_for_both():
    scheduler, _ = make_scheduler(max_chunk_tokens=4)
    submit(scheduler, 4)
    run(scheduler)
    scheduler.submit(request(9, 40))
    kinds = [run(scheduler)[0].split(".")[0] for _ in range(8)]
    assert kinds == ["decode", "prefill"] * 4


def test_no_more_requests_than_segments_are_packed():
    scheduler, _ = make_scheduler(segments=2, max_requests=4)
    submit(scheduler, 1, 1, 1, 1)
    assert run(scheduler)[1] == [(0, 1), (1, 1)]


def test_a_chunk_limit_holds_for_each_request():
    scheduler, _ = make_scheduler(max_chunk_tokens=3)
    submit(scheduler, 7, 2)
    assert run(scheduler) == ("prefill.t16", [(0, 3), (1, 2)])


def test_more_running_requests_than_the_largest_bucket_take_turns():
    scheduler, _ = make_scheduler(decode=(1, 2), max_requests=4)
    submit(scheduler, 1, 1, 1, 1)
    run(scheduler)
    order = [[i for i, _ in run(scheduler)[1]] for _ in range(4)]
    assert order == [[0, 1], [2, 3], [0, 1], [2, 3]]
    scheduler, _ = make_scheduler(decode=(1, 2), max_requests=3)
    submit(scheduler, 1, 1, 1)
    run(scheduler)
    order = [[i for i, _ in run(scheduler)[1]] for _ in range(3)]
    assert order == [[0, 1], [2, 0], [1, 2]]


def test_a_request_waits_for_a_slot_and_is_not_overtaken_when_pages_are_short():
    scheduler, state = make_scheduler(pages=9, max_requests=4)
    first, big, small = submit(scheduler, 16, 17, 1)
    run(scheduler)
    assert scheduler.counts() == {"waiting": 2, "prefilling": 0, "running": 1}
    # Four pages of its prompt, two for the tokens to come.
    assert state.free_pages == 2
    scheduler.remove(first)
    assert run(scheduler)[1] == [(big.id, 16)]
    assert scheduler.counts()["waiting"] == 0
    assert small.context_tokens == 0


def test_removing_gives_back_the_state_wherever_the_request_stands():
    scheduler, state = make_scheduler(max_requests=2)
    requests = submit(scheduler, 1, 20, 5)
    run(scheduler)
    assert scheduler.counts() == {"waiting": 1, "prefilling": 1, "running": 1}
    for each in requests:
        scheduler.remove(each)
    assert (state.free_slots, state.free_pages) == (2, 64)
    assert not scheduler.has_work


def test_an_artifact_without_a_phase_is_refused():
    state = make_scheduler()[1]
    prefix = PrefixCache(state, PrefixOptions())
    with pytest.raises(ArtifactError, match="no prefill bucket"):
        Scheduler([Bucket("decode.b1", "decode", {"T": 1, "B": 1})], state, prefix)


def test_the_lower_priority_number_goes_first_then_the_earlier_arrival():
    scheduler, _ = make_scheduler(max_requests=1)
    order = [(0, 5), (1, 0), (2, 5), (3, -1)]
    for number, priority in order:
        options = RequestOptions(1, Sampling(), 0, frozenset(), priority=priority)
        scheduler.submit(Request(number, np.zeros(2, np.int32), options))
    seen = []
    while scheduler.has_work:
        step = scheduler.next_step()
        scheduler.advance(step)
        seen += [request.id for request, _ in step.chunks]
        for request, _ in step.chunks:
            scheduler.remove(request)
    assert seen == [3, 1, 0, 2]


def test_a_request_that_shares_a_prompt_waits_until_that_is_through():
    scheduler, _ = make_scheduler(max_chunk_tokens=4)
    parent = request(0, 10)
    options = RequestOptions(8, Sampling(), 0, frozenset(), after=0)
    scheduler.submit(parent)
    scheduler.submit(Request(1, np.zeros(10, np.int32), options))
    assert [run(scheduler)[1] for _ in range(3)] == [[(0, 4)], [(0, 4)], [(0, 2)]]
    scheduler.remove(parent)
    assert run(scheduler)[1] == [(1, 4)]
