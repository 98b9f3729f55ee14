"""The prefix cache under the engine, on the fake model, which refuses a wrong slot or page."""

import random

import pytest

from k3c.errors import ConfigError
from k3c.runtime.cache.prefix import PrefixOptions
from k3c.runtime.engine import Engine
from k3c.runtime.request import RequestOptions, Sampling
from tests.support.fake_plan import PAGE_TOKENS, STOP, expected_tokens, make_fake

UNIT = PAGE_TOKENS // 2
EAGER = PrefixOptions(least_tokens=0)


def make_engine(options=EAGER, max_chunk_tokens=None, **sizes):
    return Engine(make_fake(**{"snapshots": 4, **sizes}).loaded, max_chunk_tokens, options)


def run(engine, *prompts, count=3, **options):
    """Run prompts together; return for each its output and how many tokens were cached."""
    stops = frozenset({STOP})
    ids = [
        engine.submit(p, RequestOptions(count, Sampling(), 0, stops, **options)) for p in prompts
    ]
    tokens, cached = {i: [] for i in ids}, {}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id].append(event.token_id)
            if event.cached_tokens is not None:
                cached[event.request_id] = event.cached_tokens
    for number, prompt in zip(ids, prompts, strict=True):
        assert tokens[number] == expected_tokens(prompt, count)
    return [cached[i] for i in ids]


def prompt_of(length, first=0):
    return [(first + i * 7) % 90 for i in range(length)]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 15, 16, 17, 32])
@pytest.mark.parametrize("max_chunk_tokens", [None, 1, 3, 5])
def test_a_prompt_that_comes_again_starts_at_its_last_unit(length, max_chunk_tokens):
    engine = make_engine(max_chunk_tokens=max_chunk_tokens)
    assert run(engine, prompt_of(length)) == [0]
    expected = (length - 1) // UNIT * UNIT
    assert run(engine, prompt_of(length)) == [expected]
    assert engine.counters["prefix_hit_tokens"] == expected
    assert engine.counters["prefix_queried_tokens"] == 2 * length


@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_a_prompt_that_goes_on_starts_where_the_earlier_one_could_have(length):
    engine = make_engine()
    run(engine, prompt_of(length))
    assert run(engine, [*prompt_of(length), 5, 6]) == [(length - 1) // UNIT * UNIT]


def test_a_shared_beginning_is_used_once_it_has_been_seen_twice():
    engine = make_engine()
    shared = prompt_of(13)
    assert run(engine, [*shared, 1, 1, 1]) == [0]
    # Its pages are found, no snapshot; one is taken where the two part.
    assert run(engine, [*shared, 2, 2, 2]) == [0]
    assert run(engine, [*shared, 3, 3, 3]) == [12]


def test_a_breakpoint_saves_the_second_time():
    engine = make_engine()
    shared = prompt_of(13)
    run(engine, [*shared, 1, 1, 1], breakpoints=(13,))
    assert run(engine, [*shared, 2, 2, 2]) == [12]


def test_snapshots_every_so_many_tokens_let_any_prompt_go_on_from_the_last():
    engine = make_engine(PrefixOptions(snapshot_every=8, least_tokens=0), snapshots=8)
    run(engine, prompt_of(30))
    assert run(engine, [*prompt_of(21), 88]) == [16]


def test_short_prompts_take_no_snapshot_and_no_step_more():
    fake = make_fake(snapshots=4)
    engine = Engine(fake.loaded)
    run(engine, prompt_of(30))
    assert engine.counters["snapshots_kept"] == 0
    assert fake.runs("prefill.t16") == [[16], [14]]


def test_the_middle_of_an_earlier_turn_that_is_edited_is_computed_again():
    engine = make_engine()
    first = prompt_of(24)
    run(engine, first)
    edited = [*first[:10], 89, *first[11:], 3]
    assert run(engine, edited) == [0]
    assert run(engine, [*first, 3]) == [22]


def test_a_b_a_gives_a_again_what_it_gave():
    engine = make_engine()
    a = prompt_of(20)
    b = [*a[:10], *prompt_of(10, 40)]
    for _ in range(3):
        run(engine, a)
        run(engine, b)


def test_salted_requests_share_with_their_own_kind_alone():
    engine = make_engine()
    run(engine, prompt_of(20), salt=b"one")
    assert run(engine, prompt_of(20), salt=b"two") == [0]
    assert run(engine, prompt_of(20), salt=b"one") == [18]


def test_off_is_off():
    engine = make_engine(PrefixOptions(on=False))
    for _ in range(2):
        assert run(engine, prompt_of(20)) == [0]
    assert engine.counters["prefix_hit_tokens"] == engine.counters["snapshots_kept"] == 0
    assert engine.usage.pages_kept == engine.usage.snapshots == 0


def test_without_a_slot_for_a_snapshot_nothing_is_found_and_nothing_breaks():
    engine = make_engine(snapshots=0, max_requests=1, decode=(1,))
    for _ in range(2):
        assert run(engine, prompt_of(20)) == [0]
    assert engine.counters["snapshots_missed"] == 2


def test_a_conversation_computes_each_turn_once():
    engine = make_engine(max_context_tokens=256, pages=129)
    history, computed = prompt_of(40), 0
    for turn in range(8):
        (cached,) = run(engine, history, count=6)
        computed += len(history) - cached
        history = [*history, *expected_tokens(history, 6), *prompt_of(5, turn)]
    # 40 tokens, then per turn 11 new ones and what lies behind the last whole unit.
    assert computed <= 40 + 7 * (11 + UNIT)


@pytest.mark.parametrize("seed", range(8))
def test_random_prompts_that_share_beginnings_are_right_whatever_is_evicted(seed):
    draw = random.Random(seed)
    engine = make_engine(
        PrefixOptions(least_tokens=0, snapshot_every=draw.choice([0, 6])),
        max_chunk_tokens=draw.choice([None, 3]),
        pages=draw.choice([18, 40]),
        snapshots=draw.choice([1, 3]),
    )
    roots = [prompt_of(draw.randint(1, 40), 11 * i) for i in range(3)]
    for _ in range(25):
        batch = []
        for _ in range(draw.randint(1, 5)):
            root = draw.choice(roots)
            tail = [draw.randrange(90) for _ in range(draw.randint(1, 6))]
            batch.append([*root[: draw.randint(0, len(root))], *tail])
        run(engine, *batch, count=draw.randint(1, 12))
    usage = engine.usage
    assert (usage.pages_used, usage.slots_used) == (0, 0)
    engine.forget_prefixes()
    assert (engine.usage.pages_kept, engine.usage.snapshots) == (0, 0)


def test_requests_that_outgrow_the_pages_wait_and_go_on_where_they_were():
    engine = make_engine(pages=13, max_context_tokens=48)
    prompts = [prompt_of(9, 10 * i) for i in range(4)]
    run(engine, *prompts, count=30)
    assert engine.counters["preemptions"] > 0
    assert engine.usage.pages_used == 0


def test_the_request_that_goes_last_gives_way():
    engine = make_engine(PrefixOptions(on=False), pages=9, max_context_tokens=32)
    stops = frozenset({STOP})
    first = engine.submit([1] * 8, RequestOptions(20, Sampling(), 0, stops, priority=1))
    second = engine.submit([2] * 8, RequestOptions(20, Sampling(), 0, stops, priority=0))
    ended = []
    while engine.has_work:
        ended += [e.request_id for e in engine.step() if e.finish_reason]
    assert ended == [second, first]


@pytest.mark.parametrize("seed", range(6))
def test_aborts_at_any_time_leak_nothing(seed):
    draw = random.Random(seed)
    engine = make_engine(pages=17, snapshots=2)
    live = {}
    for _ in range(300):
        if len(live) < 8 and draw.random() < 0.4:
            prompt = [*prompt_of(draw.randint(1, 20)), draw.randrange(5)]
            options = RequestOptions(draw.randint(1, 20), Sampling(), 0, frozenset({STOP}))
            live[engine.submit(prompt, options)] = (prompt, [])
        if live and draw.random() < 0.15:
            number = draw.choice(sorted(live))
            engine.cancel(number)
            del live[number]
        for event in engine.step() if engine.has_work else ():
            prompt, output = live[event.request_id]
            output.append(event.token_id)
            assert output == expected_tokens(prompt, len(output))
            if event.finish_reason:
                del live[event.request_id]
    for number in live:
        engine.cancel(number)
    usage = engine.usage
    assert (usage.pages_used, usage.slots_used) == (0, 0)
    assert not engine.has_work


def test_a_unit_that_does_not_divide_a_page_is_refused():
    with pytest.raises(ConfigError, match="3 tokens in pages of 4"):
        make_engine(PrefixOptions(unit_tokens=3))
