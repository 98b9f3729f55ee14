"""Whole artifacts on a GPU driver that is a stub: steps as graphs and launch by launch, and ahead.

The stub runs what is enqueued as late as it may, so a missing wait or a buffer that is reused too
early changes tokens.
"""

import time

import numpy as np
import pytest

from k3c.runtime.engine import Engine
from k3c.runtime.loader import LoadOptions, load_artifact
from tests.support.fake_plan import STOP, Sizes, expected_tokens
from tests.support.stub_gpu import write_gpu_artifact

PROMPTS = [[1, 2, 3], [5], list(range(20)), [7] * 9, [11, 12]]


@pytest.fixture
def artifact(kind, stub, tmp_path):
    return write_gpu_artifact(tmp_path, kind)


def quiet(line):
    raise AssertionError(line)


def open_engine(artifact, **options):
    return Engine(load_artifact(artifact, LoadOptions(say=quiet, **options)))


@pytest.mark.parametrize("executor", ["whole", "command"])
@pytest.mark.parametrize("run_ahead", [True, False])
def test_an_artifact_generates_and_scores(artifact, executor, run_ahead):
    engine = open_engine(artifact, executor=executor, run_ahead=run_ahead)
    for _ in range(2):
        results = engine.generate(PROMPTS, 12)
        assert [list(r.token_ids) for r in results] == [expected_tokens(p, 12) for p in PROMPTS]
    assert engine.score([[1, 2, 3]])[0].tolist() == [-(1 + 2 / 128), -(2 + 3 / 128)]


def step_calls(stub):
    names = ("cuGraphLaunch", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2")
    hip_names = ("hipGraphLaunch", "hipMemcpyHtoDAsync", "hipMemcpyDtoHAsync")
    return [stub.calls(n) for n in (names if stub.kind == "cuda" else hip_names)]


def test_a_decode_step_is_one_launch_and_one_read_and_starts_before_the_last_is_read(
    artifact, stub
):
    engine = open_engine(artifact)
    engine.add([1, 2, 3], 30, stop_ids=())
    engine.step()  # the prompt
    engine.step()  # the first decode step brings its input, and starts the second
    before = step_calls(stub)
    for _ in range(10):
        (event,) = engine.step()
        assert event.token_id is not None
    after = step_calls(stub)
    assert [b - a for a, b in zip(before, after, strict=True)] == [10, 0, 10]
    # One more decode step is launched than tokens were read.
    assert after[0] == 1 + 11 + 1


def test_nothing_is_started_beyond_the_last_token(artifact, stub):
    engine = open_engine(artifact)
    (result,) = engine.generate([[1, 2, 3]], 7, stop_ids=())
    assert len(result.token_ids) == 7
    assert step_calls(stub)[0] == 7


def stopping_prompt(after):
    """A prompt whose continuation gives the stop token as its token number `after`."""
    for first in range(2000):
        tokens = expected_tokens([first % 96, first // 96], after + 1)
        if len(tokens) == after and tokens[-1] == STOP:
            return [first % 96, first // 96]
    raise AssertionError(f"no prompt stops after {after}")


def test_a_stop_wastes_one_step_whose_token_is_dropped(artifact, stub):
    engine, prompt = open_engine(artifact), stopping_prompt(5)
    (result,) = engine.generate([prompt], 40)
    assert list(result.token_ids) == expected_tokens(prompt, 40)
    assert result.finish_reason == "stop"
    assert step_calls(stub)[0] == 6, "five steps gave tokens, one was under way"
    # Its slot and pages go to the next request while that step may still write them.
    (again,) = engine.generate([[9, 8, 7]], 20)
    assert list(again.token_ids) == expected_tokens([9, 8, 7], 20)


def test_requests_that_come_and_go_give_the_tokens_of_requests_alone(artifact):
    engine, events, expected = open_engine(artifact), {}, {}
    random = np.random.default_rng(3)
    for step in range(400):
        if step < 300 and random.random() < 0.3:
            prompt = random.integers(0, 90, random.integers(1, 25)).tolist()
            count = int(random.integers(1, 30))
            request = engine.add(prompt, count)
            events[request], expected[request] = [], expected_tokens(prompt, count)
        if events and random.random() < 0.05:
            cancelled = random.choice(list(events))
            engine.cancel(int(cancelled))
            events.pop(cancelled)
        for event in engine.step():
            if event.request_id in events:
                events[event.request_id].append(event.token_id)
    while engine.has_work:
        for event in engine.step():
            if event.request_id in events:
                events[event.request_id].append(event.token_id)
    assert len(events) > 50
    for request, tokens in events.items():
        assert tokens == expected[request][: len(tokens)]
        if request in events and len(tokens) != len(expected[request]):
            raise AssertionError(f"{request}: {tokens} of {expected[request]}")


def test_events_are_those_of_an_engine_that_does_not_run_ahead(artifact):
    def events(run_ahead):
        engine = open_engine(artifact, run_ahead=run_ahead)
        for prompt in PROMPTS:
            engine.add(prompt, 15, stop_ids=())
        found = []
        while engine.has_work:
            found.append(engine.step())
        return found

    assert events(True) == events(False)


def test_likeliest_tokens_are_those_of_the_tokens_own_step(artifact):
    engine = open_engine(artifact)
    (result,) = engine.generate([[1, 2, 3]], 8, top_logprobs=2, stop_ids=())
    assert [likeliest[0][0] for likeliest in result.top_logprobs] == list(result.token_ids)


def test_scores_between_steps_that_are_under_way_change_nothing(artifact):
    engine = open_engine(artifact)
    request, tokens = engine.add([1, 2, 3], 20, stop_ids=()), []
    while engine.has_work:
        tokens += [e.token_id for e in engine.step()]
        assert len(engine.score([[4, 5]])[0]) == 1
    assert request == 0
    assert tokens == expected_tokens([1, 2, 3], 20, ())


def test_a_plan_without_advance_sends_every_steps_input(kind, stub, tmp_path):
    engine = open_engine(write_gpu_artifact(tmp_path, kind, advance=False))
    (result,) = engine.generate([[1, 2, 3]], 8, stop_ids=())
    assert list(result.token_ids) == expected_tokens([1, 2, 3], 8, ())
    launches, uploads, _ = step_calls(stub)
    assert launches == 8
    assert uploads >= 8


def test_loading_changes_no_state(artifact, stub):
    """GR03: nothing runs before the first request; the spaces are zero."""
    loaded = load_artifact(artifact, LoadOptions())
    assert stub.order == []
    for space in ("kv_pages", "state_slots"):
        memory = loaded.memory[space]
        assert not any(memory.read(0, memory.nbytes))


def test_padded_rows_touch_no_state_over_a_hundred_steps(kind, stub, tmp_path):
    """GR01: three requests in a bucket of four leave the state that each leaves alone."""
    prompts = [[1, 2], [3], [4, 5, 6]]

    def states(name, decode, groups):
        sizes = Sizes(decode=decode, prefill=(8,), max_context_tokens=128, pages=200)
        (tmp_path / name).mkdir()
        loaded = load_artifact(
            write_gpu_artifact(tmp_path / name, kind, sizes), LoadOptions(run_ahead=False)
        )
        engine, found = Engine(loaded), []
        for group in groups:
            requests = [engine.add(p, 120, stop_ids=()) for p in group]
            for _ in range(101):
                engine.step()
            ranges, memory = engine._state._slot_rows._ranges, loaded.memory["state_slots"]
            for number in map(engine._state.slot, requests):
                parts = [memory.read(r.offset + number * r.nbytes, r.nbytes) for r in ranges]
                found.append(b"".join(parts))
            for request in requests:
                engine.cancel(request)
        assert not any(loaded.memory["state_slots"].read(0, 16)), "slot 0 was written"
        assert not any(loaded.memory["kv_pages"].read(0, 16)), "page 0 was written"
        return found

    together = states("four", (4,), [prompts])
    assert len(set(together)) == 3
    assert together == states("one", (1,), [[p] for p in prompts])


def test_a_longer_step_leaves_nothing_in_the_same_bucket(kind, stub, tmp_path):
    """GR07: every step with other requests sends every row of every input."""
    sizes = Sizes(decode=(4,), prefill=(16,))
    engine = open_engine(write_gpu_artifact(tmp_path, kind, sizes))
    engine.generate(PROMPTS[:4], 12, stop_ids=())
    (result,) = engine.generate([[9]], 6)
    assert list(result.token_ids) == expected_tokens([9], 6)


def test_an_engine_that_is_closed_gives_all_memory_back(artifact, stub):
    before = stub.used_bytes
    engine = open_engine(artifact)
    engine.generate(PROMPTS, 3)
    assert stub.used_bytes > before
    engine.close()
    assert stub.used_bytes == before


def test_a_decode_step_costs_the_host_little(cuda, tmp_path):
    """At most 50 us a step of four rows; the fastest of many, for the machine may be busy."""
    engine, waited = open_engine(write_gpu_artifact(tmp_path)), [0.0]
    functions = engine._loaded.buckets["decode.b4"].executor._gpu.api.functions
    wait, seconds = functions["event_wait"], []

    def timed_wait(event):
        start_s = time.perf_counter()
        code = wait(event)
        waited[0] = time.perf_counter() - start_s
        return code

    functions["event_wait"] = timed_wait
    for first in range(4):
        engine.add([first], 60, stop_ids=())
    for _ in range(60):
        start_s = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start_s - waited[0])
    assert min(seconds) <= 50e-6
