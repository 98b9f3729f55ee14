"""What a step finds in the io fields: nothing of an earlier step, and scratch for padded rows."""

import logging
import mmap
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from k3c.errors import ArtifactError
from k3c.runtime.driver.cpu_executor import io_views
from k3c.runtime.engine import Engine
from k3c.runtime.step_io import StepIo
from tests.support.fake_plan import PAGE_TOKENS, Sizes, expected_tokens, make_buckets, make_fake
from tests.support.fake_plan import make_plan as make_fake_plan

PROMPTS = [[1, 2, 3], [5], list(range(20))]
ALLOWED_BYTES = 16 << 10  # Python's own small objects: tuples, views, bound methods


def test_stale_fields_of_a_longer_step_never_reach_a_shorter_one():
    # The fake refuses any padded row, segment or page entry that is not neutral.
    fake = make_fake(decode=(4,), prefill=(16,))
    engine = Engine(fake.loaded)
    engine.generate(PROMPTS, 12, temperature=0.7, top_k=3, top_p=0.5, min_p=0.1, seed=5)
    for bucket in fake.loaded.buckets.values():
        for name, field in bucket.io.fields.items():
            field[...] = 77 if name not in ("tokens", "logits", "logprobs") else 0
    (result,) = engine.generate([[9]], 6)
    assert list(result.token_ids) == expected_tokens([9], 6)
    assert engine.score([[1, 2]])[0].shape == (1,)


def test_scratch_slot_and_page_and_unowned_memory_stay_as_they_were():
    fake = make_fake(decode=(4,), prefill=(16,), max_requests=4)
    engine = Engine(fake.loaded)
    state = fake.loaded.memory["state_slots"].array
    pages = fake.loaded.memory["kv_pages"].array
    before_state, before_pages = state.copy(), pages.copy()
    engine.generate(PROMPTS, 10)
    used_pages = sum(-(-(len(p) + 9) // PAGE_TOKENS) for p in PROMPTS)
    page_bytes = PAGE_TOKENS * 4
    assert (pages[:page_bytes] == before_pages[:page_bytes]).all()
    unowned = slice((1 + used_pages) * page_bytes, None)
    assert (pages[unowned] == before_pages[unowned]).all()
    for layer in (0, 1024):
        for slot in (0, 4):
            own = slice(layer + 16 * slot, layer + 16 * (slot + 1))
            assert (state[own] == before_state[own]).all()


def test_between_step_and_launch_nothing_is_allocated_or_logged(monkeypatch):
    fake = make_fake(decode=(4,), prefill=(16,), max_requests=4)
    engine, grown = Engine(fake.loaded), []
    for prompt in PROMPTS:
        engine.add(prompt, 10)
    engine.step()

    def refuse(*args, **kwargs):
        raise AssertionError("called between step and launch")

    def at_launch():
        now, peak = tracemalloc.get_traced_memory()
        grown.append(max(now, peak) - start[0])
        undo.undo()

    fake.faults.before_launch.append(at_launch)
    tracemalloc.start()
    try:
        for _ in range(6):
            undo = pytest.MonkeyPatch()
            for module, name in (
                *(
                    (np, n)
                    for n in ("empty", "zeros", "ones", "full", "array", "copy", "concatenate")
                ),
                (mmap, "mmap"),
                (logging.Logger, "_log"),
            ):
                undo.setattr(module, name, refuse)
            tracemalloc.reset_peak()
            start = tracemalloc.get_traced_memory()
            engine.step()
    finally:
        tracemalloc.stop()
    assert len(grown) == 6
    assert max(grown) < ALLOWED_BYTES


def test_a_plan_without_a_field_is_refused_by_the_fields_name():
    sizes = Sizes()
    plan = make_fake_plan(make_buckets(sizes)[0], sizes)
    memory = np.zeros(plan.space_bytes["io"], np.uint8)
    fewer = replace(plan, io=tuple(f for f in plan.io if f.name != "page_table"))
    with pytest.raises(ArtifactError, match="io fields page_table are missing"):
        StepIo(fewer, io_views(fewer, memory))


def test_a_field_larger_than_its_buffer_is_refused():
    sizes = Sizes()
    plan = make_fake_plan(make_buckets(sizes)[0], sizes)
    memory = np.zeros(plan.space_bytes["io"], np.uint8)
    larger = tuple(replace(f, shape=(99, *f.shape)) if f.name == "ids" else f for f in plan.io)
    with pytest.raises(ArtifactError, match="io field ids needs 396 B"):
        io_views(replace(plan, io=larger), memory)


def test_a_model_without_mla_needs_no_page_table():
    sizes = Sizes()
    plan = make_fake_plan(make_buckets(sizes)[0], sizes)
    memory = np.zeros(plan.space_bytes["io"], np.uint8)
    fewer = replace(
        plan,
        io=tuple(f for f in plan.io if f.name != "page_table"),
        space_bytes={**plan.space_bytes, "kv_pages": 0},
    )
    assert "page_table" not in StepIo(fewer, io_views(fewer, memory)).fields
