"""The prefix cache on the trained demo: a hit gives, bit for bit, what a cold run gives."""

import numpy as np
import pytest

from k3c.runtime.cache.prefix import PrefixOptions
from k3c.runtime.loader import LoadOptions, load_artifact
from tests.support.compiled import WatchedEngine, demo_golden

UNIT = 8


def open_engine(artifact, options=None):
    options = options or PrefixOptions()
    return WatchedEngine(load_artifact(artifact, LoadOptions()), prefix=options)


def long_prompt(length):
    tokens = [t for case in demo_golden()["prompts"] for t in case["prompt_ids"]]
    return (tokens * (length // len(tokens) + 1))[:length]


def logits_of(engine, prompt, count=4):
    """Run one prompt; return its logits by token, and how many tokens were cached."""
    number = engine.add(prompt, count, stop_ids=())
    cached = None
    while engine.has_work:
        for event in engine.step():
            cached = event.cached_tokens if cached is None else cached
    return np.array(engine.logits[number]), cached


@pytest.mark.parametrize("length", [127, 128, 129, 200])
def test_a_hit_gives_the_bits_of_a_cold_run(demo_bf16, length):
    engine, prompt = open_engine(demo_bf16), long_prompt(length)
    cold, missed = logits_of(engine, prompt)
    warm, hit = logits_of(engine, prompt)
    assert (missed, hit) == (0, (length - 1) // UNIT * UNIT)
    assert (cold == warm).all()


def test_a_longer_prompt_goes_on_from_a_shorter_one_as_from_its_own(demo_bf16):
    first, more = long_prompt(130), [*long_prompt(130), 5, 6, 7, 8, 9]
    engine = open_engine(demo_bf16)
    logits_of(engine, first)
    warm, hit = logits_of(engine, more)
    assert hit == 128
    # The same chunks, computed: a snapshot is planned where the shorter one left one.
    cold_engine = open_engine(demo_bf16, PrefixOptions(snapshot_every=128))
    cold, missed = logits_of(cold_engine, more)
    assert missed == 0
    # The last 7 tokens are one chunk here and two there: 128 + 7 against 128 + 0 + 7.
    assert np.array_equal(warm, cold)


def test_what_was_evicted_is_computed_again(demo_bf16):
    engine = open_engine(demo_bf16)
    first = logits_of(engine, long_prompt(100))
    engine.forget_prefixes()
    again = logits_of(engine, long_prompt(100))
    assert again[1] == 0
    assert (first[0] == again[0]).all()
