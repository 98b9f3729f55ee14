"""The engine on the fake model, whose every token depends on the whole history of its request."""

from itertools import pairwise

import numpy as np
import pytest

from k3c.errors import CapacityError, ConfigError, DeviceFault
from k3c.runtime.engine import Engine
from k3c.runtime.events import Event
from tests.support.fake_plan import STOP, VOCAB, expected_tokens, make_fake

PROMPTS = [[1, 2, 3], [5], list(range(20)), [7] * 9, [8, 8], [3] * 30]


def outputs(results):
    return [list(r.token_ids) for r in results]


def expected(prompts, count):
    return [expected_tokens(p, count) for p in prompts]


@pytest.mark.parametrize("max_chunk_tokens", [None, 1, 3, 5])
def test_mixed_requests_give_the_tokens_that_they_give_alone(max_chunk_tokens):
    engine = Engine(make_fake().loaded, max_chunk_tokens)
    assert outputs(engine.generate(PROMPTS, 12)) == expected(PROMPTS, 12)
    assert outputs([engine.generate([p], 12)[0] for p in PROMPTS]) == expected(PROMPTS, 12)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_decode_bucket_gives_the_same_tokens(count):
    fake = make_fake(decode=(count,))
    engine = Engine(fake.loaded)
    assert outputs(engine.generate(PROMPTS, 9)) == expected(PROMPTS, 9)


def test_requests_that_join_while_others_run_change_nothing_for_them():
    engine, tokens = Engine(make_fake().loaded), {}
    prompts = {}
    for prompt in PROMPTS:
        number = engine.add(prompt, 15)
        prompts[number], tokens[number] = prompt, []
        for _ in range(3):
            for event in engine.step():
                tokens[event.request_id].append(event.token_id)
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id].append(event.token_id)
    assert list(tokens.values()) == expected(prompts.values(), 15)


def test_slots_and_pages_that_are_used_again_carry_nothing_over():
    engine = Engine(make_fake(max_requests=1, decode=(1,), pages=17).loaded)
    for _ in range(3):
        assert outputs(engine.generate(PROMPTS, 6)) == expected(PROMPTS, 6)


def test_a_stop_token_ends_the_request_and_is_reported():
    engine = Engine(make_fake().loaded)
    prompt = next(
        [a, b] for a in range(90) for b in range(90) if STOP in expected_tokens([a, b], 9)
    )
    (result,) = engine.generate([prompt], 30)
    assert result.finish_reason == "stop"
    assert result.token_ids[-1] == STOP
    stops = expected_tokens(prompt, 30)[:1]
    engine.add(prompt, 30, stop_ids=stops)
    events = [e for _ in range(2) for e in engine.step()]
    assert events == [Event(1, stops[0], "stop", cached_tokens=0)]
    assert not engine.has_work


def test_length_ends_a_request_with_exactly_max_tokens():
    (result,) = Engine(make_fake().loaded).generate([[5]], 1)
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 1


def test_a_request_may_fill_the_context_to_the_last_token():
    engine = Engine(make_fake(max_context_tokens=20, pages=6).loaded)
    prompt = list(range(12))
    assert outputs(engine.generate([prompt], 8)) == [expected_tokens(prompt, 8)]


def test_a_nan_row_ends_its_request_alone_with_an_error():
    fake = make_fake()
    engine = Engine(fake.loaded)
    ids = [engine.add(p, 8, stop_ids=()) for p in PROMPTS[:3]]
    events = [*engine.step(), *engine.step()]
    fake.faults.nan_slots = {2}
    while engine.has_work:
        events += engine.step()
    ends = {e.request_id: (e.token_id, e.finish_reason) for e in events if e.finish_reason}
    assert ends[ids[1]] == (None, "error")
    for i in (0, 2):
        tokens = [e.token_id for e in events if e.request_id == ids[i]]
        assert tokens == expected_tokens(PROMPTS[i], 8, stops=())
    fake.faults.nan_slots = set()
    assert outputs(engine.generate([[4, 4]], 5)) == expected([[4, 4]], 5)


def test_a_failed_launch_stops_the_engine_loudly_for_good():
    fake = make_fake()
    engine = Engine(fake.loaded)
    engine.add([1, 2], 4)
    fake.faults.launch = True
    with pytest.raises(DeviceFault, match="injected"):
        engine.step()
    fake.faults.launch = False
    with pytest.raises(DeviceFault, match="stopped by an earlier fault"):
        engine.step()


def test_cancelling_frees_the_state_and_spares_the_others():
    engine = Engine(make_fake(max_requests=2, decode=(2,), pages=33).loaded)
    first, second, third = (engine.add(p, 6) for p in PROMPTS[:3])
    engine.step()
    engine.cancel(first)
    engine.cancel(first)
    events = []
    while engine.has_work:
        events += engine.step()
    assert {e.request_id for e in events} == {second, third}
    assert [e.token_id for e in events if e.request_id == third] == expected_tokens(PROMPTS[2], 6)


def test_top_logprobs_are_raw_log_softmax_values_likeliest_first():
    (result,) = Engine(make_fake().loaded).generate([[1, 2, 3]], 4, top_logprobs=3)
    for token, likeliest in zip(result.token_ids, result.top_logprobs, strict=True):
        logits = -np.abs(np.arange(VOCAB) - token).astype(np.float64)
        exact = logits - np.log(np.exp(logits).sum())
        ids = sorted(range(VOCAB), key=lambda i: (-exact[i], i))[:3]
        assert [i for i, _ in likeliest] == ids
        assert np.allclose([v for _, v in likeliest], exact[ids], rtol=0, atol=1e-12)


def test_scores_are_those_of_each_following_token_in_any_chunks():
    for max_chunk_tokens in (None, 1, 3):
        engine = Engine(make_fake(max_requests=2, pages=33).loaded, max_chunk_tokens)
        lists = [[1, 2, 3, 4, 5], [4] * 20, [9], [6, 7]]
        for tokens, logprobs in zip(lists, engine.score(lists), strict=True):
            exact = [-(a + b / 128) for a, b in pairwise(tokens)]
            assert logprobs.tolist() == exact
        assert outputs(engine.generate(PROMPTS, 5)) == expected(PROMPTS, 5)


def test_scoring_while_requests_hold_all_state_can_be_tried_again():
    engine = Engine(make_fake(max_requests=1, pages=17).loaded)
    engine.add([1, 2], 4)
    engine.step()
    with pytest.raises(CapacityError):
        engine.score([[1, 2, 3]])
    while engine.has_work:
        engine.step()
    assert len(engine.score([[1, 2, 3]])[0]) == 2


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "no token ids"),
        ([1, VOCAB], {}, f"token id {VOCAB} at index 1 is outside the vocabulary of {VOCAB}"),
        ([-1], {}, "token id -1 at index 0"),
        ([True], {}, "token id True is bool"),
        ([1.0], {}, "token id 1.0 is float"),
        ([1] * 60, {"max_tokens": 5}, "60 prompt tokens [+] max_tokens 5 exceed the planned 64"),
        ([1], {"max_tokens": 0}, r"max_tokens is 0, expected 1\.\.64"),
        ([1], {"temperature": -0.5}, "temperature is -0.5"),
        ([1], {"temperature": float("inf")}, "temperature is inf"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"top_p": 0.0}, "top_p is 0.0"),
        ([1], {"min_p": 1.5}, "min_p is 1.5"),
        ([1], {"top_k": -1}, "top_k is -1"),
        ([1], {"seed": 2**63}, f"seed is {2**63}"),
        ([1], {"top_logprobs": VOCAB + 1}, f"top_logprobs is {VOCAB + 1}"),
        ([1], {"heat": 1.0}, "unknown sampling option heat"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_when_it_is_added(prompt, options, message):
    engine = Engine(make_fake().loaded)
    with pytest.raises(ConfigError, match=message):
        engine.add(prompt, **{"max_tokens": 8, **options})
    assert not engine.has_work


def test_a_prompt_that_more_pages_than_there_are_would_hold_is_refused_not_queued():
    engine = Engine(make_fake(pages=5).loaded)
    with pytest.raises(ConfigError, match="exceed the planned 16"):
        engine.add([1] * 15, 2)


def test_one_bad_prompt_of_a_batch_runs_none():
    engine = Engine(make_fake().loaded)
    with pytest.raises(ConfigError, match="request 1"):
        engine.generate([[1], [VOCAB]], 4)
    assert not engine.has_work


def test_seeds_default_to_the_request_id_and_are_passed_with_the_position():
    fake = make_fake()
    engine, seen = Engine(fake.loaded), []
    fields = fake.loaded.buckets["prefill.t4"].io.fields
    fake.faults.before_launch.append(lambda: seen.append(fields["seed"].tolist()))
    engine.generate([[1], [1, 2], [3]], 1, temperature=0.5)
    engine.generate([[1], [2]], 1, temperature=0.5, seed=-7)
    assert seen == [[0, 1, 2, 0], [-7, -7, 0, 0]]


def test_timings_count_steps_and_live_tokens_by_bucket():
    engine = Engine(make_fake().loaded)
    engine.generate([[1, 2, 3]], 5)
    buckets = engine.timings["buckets"]
    assert (buckets["prefill.t4"]["steps"], buckets["prefill.t4"]["tokens"]) == (1, 3)
    assert (buckets["decode.b1"]["steps"], buckets["decode.b1"]["tokens"]) == (4, 4)
