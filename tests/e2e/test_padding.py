"""Padded rows, scratch memory and neighbours: nothing of them reaches a live request."""

import hashlib

import numpy as np
import pytest

from tests.support.compiled import POISON, WatchedEngine, open_loaded, poison

STEPS = 24
STATE = ("kv_pages", "state_slots")


@pytest.fixture(params=["f32", "bf16"])
def loaded(request, demo_loaded, demo_bf16_loaded):
    found = demo_loaded if request.param == "f32" else demo_bf16_loaded
    yield found
    for space in STATE:
        found.memory[space].array[:] = 0


@pytest.fixture(scope="module")
def demo_bf16_loaded(demo_bf16):
    return open_loaded(demo_bf16)


def units(loaded):
    """Return every slot and page of every layer as a view: {("slot" or "page", number): [...]}."""
    cache, found = loaded.manifest.cache, {}
    plan = loaded.buckets["decode.b1"].plan
    for call in plan.calls:
        for buffer in plan.buffers:
            if buffer.graph != call.graph or buffer.space not in STATE:
                continue
            kind, count = ("slot", cache.slots)
            if buffer.space == "kv_pages":
                kind, count = ("page", cache.pages)
            first = call.bases[buffer.space] + buffer.offset
            rows = loaded.memory[buffer.space].array[first : first + buffer.nbytes]
            for number, row in enumerate(rows.reshape(count, -1)):
                found.setdefault((kind, number), []).append(row)
    return found


def owned(engine, requests):
    """Return the slots and pages of requests."""
    keys = set()
    for request in requests:
        keys.add(("slot", engine._state.slot(request)))
        keys |= {("page", int(p)) for p in engine._state.page_row(request) if p}
    return keys


def digest(loaded, keys):
    every = units(loaded)
    return {key: hashlib.sha256(b"".join(r.tobytes() for r in every[key])).digest() for key in keys}


def start(engine, prompts):
    """Prefill all prompts in one step; return their ids."""
    requests = [engine.add(prompt, STEPS + 1, stop_ids=()) for prompt in prompts]
    events = engine.step()
    assert [e.request_id for e in events] == requests
    return requests


def short_prompts(prompts):
    # 3 and 4 of them fill the same prefill bucket, t64, so that their kernels see the same sizes.
    return [prompts[i][:n] for i, n in ((8, 17), (20, 9), (4, 13), (7, 11))]


def run_in_bucket_of_four(loaded, prompts, fill):
    """Decode some requests on memory that holds `fill`; return the first three's state and text."""
    for space in ("arena", "io", *STATE):
        loaded.memory[space].array[:] = fill
    engine = WatchedEngine(loaded)
    requests = start(engine, prompts)[:3]
    for _ in range(STEPS - 1):
        engine.step()
    assert engine.timings["buckets"]["decode.b4"]["steps"] == STEPS - 1
    state = written(loaded, engine, requests)
    return state, [engine._requests[r].output for r in requests]


def written(loaded, engine, requests):
    """Copy the slots and the rows of pages that hold tokens."""
    every, found = units(loaded), []
    dtype = np.float32 if loaded.manifest.model.compute == "f32" else np.uint16
    page_tokens = loaded.manifest.cache.page_tokens
    for request in requests:
        found += [row.copy() for row in every["slot", engine._state.slot(request)]]
        tokens = engine._requests[request].context_tokens
        for index, page in enumerate(engine._state.page_row(request)[: -(-tokens // page_tokens)]):
            kept = min(page_tokens, tokens - index * page_tokens)
            for rows in every["page", int(page)]:
                found.append(rows.reshape(page_tokens, -1)[:kept].view(dtype).copy())
    return found


def test_what_scratch_and_free_memory_hold_changes_no_bit_of_three_requests_in_a_bucket_of_four(
    loaded, prompts
):
    runs = [run_in_bucket_of_four(loaded, short_prompts(prompts)[:3], f) for f in (POISON, 0, 0x3F)]
    for state, text in runs[1:]:
        assert text == runs[0][1]
        for a, b in zip(runs[0][0], state, strict=True):
            assert a.tobytes() == b.tobytes()


def test_a_padded_row_and_a_fourth_request_leave_three_requests_in_the_same_state(
    demo_loaded, prompts
):
    """GR01: bit for bit, however many rows an expert has."""
    padded, full = (
        run_in_bucket_of_four(demo_loaded, short_prompts(prompts)[:n], POISON) for n in (3, 4)
    )
    assert padded[1] == full[1]
    for a, b in zip(padded[0], full[0], strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_step_writes_a_slot_or_page_that_no_request_owns(loaded, prompts):
    poison(loaded, *STATE)
    engine = WatchedEngine(loaded)
    requests = start(engine, short_prompts(prompts)[:3])
    for _ in range(STEPS - 1):
        engine.step()
    live = owned(engine, requests)
    for (kind, number), rows in units(loaded).items():
        if (kind, number) not in live and number != 0:
            assert all((row == POISON).all() for row in rows), f"{kind} {number} was written"


def test_scratch_of_nan_and_stale_memory_change_no_token(loaded, prompts, greedy):
    chosen = (20, 8, 7)
    clean = WatchedEngine(loaded).generate([prompts[i] for i in chosen], 20)
    poison(loaded, *STATE)
    engine = WatchedEngine(loaded)
    # The arena and the io fields hold nothing that a step may count on.
    engine.before_step.append(lambda step: poison(loaded, "arena", "io"))
    assert engine.generate([prompts[i] for i in chosen], 20) == clean
    assert all(r.finish_reason in ("stop", "length") for r in clean)


def test_a_step_of_other_requests_leaves_a_waiting_request_bit_equal(loaded, prompts):
    engine = WatchedEngine(loaded)
    (waiting,) = start(engine, [prompts[20]])
    before = digest(loaded, owned(engine, [waiting]))
    # Scoring and prefill run in other slots while the request does not move.
    engine.score([prompts[8], prompts[4], prompts[13]])
    assert digest(loaded, owned(engine, [waiting])) == before
    engine.cancel(waiting)


def test_small_and_large_steps_in_turn_replay_nothing_stale(demo, golden, prompts, greedy):
    # 7 requests, then 1, then 3 in the same buckets, with other lengths each time.
    for chosen in ([8, 20, 7, 4, 2, 15, 18], [20], [7, 15, 8]):
        results = demo.generate([prompts[i] for i in chosen], golden["max_new_tokens"])
        assert [list(r.token_ids) for r in results] == [greedy[i] for i in chosen]


def test_nan_in_the_state_of_one_request_ends_that_request_alone(demo_loaded, prompts, greedy):
    engine = WatchedEngine(demo_loaded)
    requests = start(engine, [prompts[i] for i in (8, 20, 7)])
    ranges = engine._state._slot_rows._ranges
    slot, memory = engine._state.slot(requests[1]), demo_loaded.memory["state_slots"].array
    for part in ranges:
        memory[part.offset + slot * part.nbytes :][: part.nbytes] = POISON
    ended = [e for e in engine.step() if e.finish_reason]
    assert [(e.request_id, e.token_id, e.finish_reason) for e in ended] == [
        (requests[1], None, "error")
    ]
    others = {requests[0]: greedy[8], requests[2]: greedy[7]}
    outputs = {r: engine._requests[r].output for r in others}
    engine.finish()
    for request, wanted in others.items():
        assert outputs[request] == wanted[: STEPS + 1]


def test_logits_of_padded_rows_are_written_and_finite_where_the_arena_was_nan(demo_loaded, prompts):
    poison(demo_loaded, "arena", "io", *STATE)
    engine = WatchedEngine(demo_loaded)
    start(engine, short_prompts(prompts)[:3])
    engine.step()
    logits = demo_loaded.buckets["decode.b4"].io.fields["logits"]
    # A padded row embeds token 0 and mixes nothing in: an ordinary row, not what memory held.
    assert np.isfinite(logits).all()
