"""The engine in its thread: events arrive, aborts work, failures and hangs are seen."""

import asyncio
import threading
import time

import pytest

from k3c.errors import ConfigError, DeviceFault
from k3c.runtime.engine import Engine
from k3c.runtime.request import RequestOptions, Sampling
from k3c.runtime.server.engine_thread import EngineThread, stream
from tests.support.fake_plan import STOP, expected_tokens, make_fake

WAIT_S = 20


def options_of(count=12, **more):
    return RequestOptions(count, Sampling(), 0, frozenset({STOP}), **more)


@pytest.fixture
def fake():
    return make_fake(snapshots=2)


@pytest.fixture
def thread(fake):
    running = EngineThread(Engine(fake.loaded), stuck_s=0.2).start()
    yield running
    running.stop(WAIT_S)


async def tokens_of(thread, prompt, count=12):
    return [e.token_id async for e in stream(thread, prompt, options_of(count))]


def test_concurrent_streams_give_what_each_prompt_gives_alone(thread):
    prompts = [[i, i + 1, *range(i)] for i in range(12)]

    async def all_of_them():
        return await asyncio.gather(*(tokens_of(thread, p) for p in prompts))

    assert asyncio.run(all_of_them()) == [expected_tokens(p, 12) for p in prompts]
    assert thread.engine.usage.pages_used == 0
    assert thread.problem == ""


def test_a_stream_that_is_left_early_frees_its_state(thread):
    async def leave():
        async for _ in stream(thread, [1, 2, 3], options_of(60)):
            break

    asyncio.run(leave())
    end = time.monotonic() + WAIT_S
    while thread.engine.usage.slots_used and time.monotonic() < end:
        time.sleep(0.01)
    assert thread.engine.usage.slots_used == 0


def test_a_request_that_can_never_fit_is_refused_at_once(thread):
    with pytest.raises(ConfigError, match="exceed the planned 64 tokens"):
        thread.submit(range(60), options_of(30), lambda _: None)


def test_a_failed_launch_ends_every_request_and_the_next_is_refused(fake, thread):
    fake.faults.launch = True
    ended, events = threading.Event(), []

    def deliver(event):
        events.append(event)
        ended.set()

    thread.submit([1, 2], options_of(), deliver)
    assert ended.wait(WAIT_S)
    assert [e.finish_reason for e in events] == ["error"]
    assert "the engine failed" in thread.problem
    with pytest.raises(DeviceFault, match="the engine failed"):
        thread.submit([1], options_of(), deliver)


def test_a_step_that_hangs_is_seen(fake, thread):
    entered, go_on = threading.Event(), threading.Event()

    def hang():
        entered.set()
        go_on.wait(WAIT_S)

    fake.faults.before_launch.append(hang)
    thread.submit([1, 2], options_of(1), lambda _: None)
    assert entered.wait(WAIT_S)
    assert thread.problem == ""
    time.sleep(0.3)
    assert "a step has taken" in thread.problem
    fake.faults.before_launch.clear()
    go_on.set()


def test_stopping_finishes_what_runs_and_takes_nothing_new(fake):
    running, events = EngineThread(Engine(fake.loaded)).start(), []
    running.submit([5], options_of(20), events.append)
    assert running.stop(WAIT_S)
    assert [e.token_id for e in events] == expected_tokens([5], 20)
    assert running.problem == "the server is draining"
    with pytest.raises(DeviceFault, match="drains"):
        running.submit([5], options_of(), events.append)


def test_an_abort_right_after_a_submit_is_not_lost(thread):
    for _ in range(50):
        thread.abort(thread.submit([1, 2, 3], options_of(60), lambda _: None))
    assert thread.stop(WAIT_S)
    assert not thread.engine.has_work
