"""Compiled k3-tiny against values computed independently in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.closeness import relative_error
from tests.support.compiled import TINY, WatchedEngine

# The bound; two correct float32 implementations differ by about 1e-5 on this model.
BOUND = 1e-4
TOKENS = 130
# Around the edges of the MLA pages (16), of KDA's chunks (16) and of the buckets (16, 64, 256).
LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 100, 129, 130)
MLA_LAYERS = (3, 7, 8)


@pytest.fixture(scope="module")
def values():
    return load_file(Path(TINY) / "golden.safetensors")


@pytest.fixture(scope="module")
def ids(values):
    return values["input_ids"].tolist()


def error(rows, wanted):
    return relative_error(torch.from_numpy(np.stack(rows)), wanted)


def test_prefill_in_one_piece_ends_in_golden_logits_at_every_cut(tiny, ids, values):
    for length in LENGTHS:
        request = tiny.add(ids[:length], 1)
        tiny.finish()
        assert error(tiny.logits[request], values["logits"][length - 1 : length]) < BOUND, length


def test_decode_from_the_first_token_on_gives_golden_logits_at_every_position(tiny, ids, values):
    request = tiny.force(ids[:1], ids[1:])
    tiny.finish()
    assert len(tiny.logits[request]) == TOKENS
    assert error(tiny.logits[request], values["logits"]) < BOUND


def test_mixed_lengths_decoded_together_give_golden_logits_in_every_bucket(tiny, ids, values):
    # The shortest prompt decodes longest, so the batch shrinks from 8 requests to 1.
    starts = (129, 127, 120, 113, 100, 90, 65, 1)
    requests = [tiny.force(ids[:n], ids[n:]) for n in starts]
    tiny.finish()
    for start, request in zip(starts, requests, strict=True):
        assert error(tiny.logits[request], values["logits"][start - 1 :]) < BOUND, start
    used = {name for name, times in tiny.timings["buckets"].items() if times["steps"]}
    assert used >= {"decode.b1", "decode.b2", "decode.b4", "decode.b8"}


@pytest.mark.parametrize("limit", [1, 3, 63])
def test_prefill_in_odd_chunks_ends_in_golden_logits(tiny_loaded, ids, values, limit):
    engine = WatchedEngine(tiny_loaded, limit)
    lengths = (130, 65, 17, 3)
    requests = [engine.add(ids[:n], 1) for n in lengths]
    engine.finish()
    for length, request in zip(lengths, requests, strict=True):
        assert error(engine.logits[request], values["logits"][length - 1 : length]) < BOUND


@pytest.mark.parametrize("limit", [None, 1, 7])
def test_scores_are_the_golden_log_probabilities(tiny_loaded, ids, values, limit):
    engine = WatchedEngine(tiny_loaded, limit)
    logprobs = torch.log_softmax(values["logits"].double()[:-1], -1)
    wanted = logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    lists = [ids, ids[:64], ids[:17], ids[:2]]
    for tokens, row in zip(lists, engine.score(lists), strict=True):
        count = len(tokens) - 1
        assert error([row], wanted[None, :count]) < BOUND


@pytest.mark.parametrize("limit", [None, 3])
def test_the_state_after_the_prompt_is_golden(tiny_loaded, ids, values, limit):
    engine = WatchedEngine(tiny_loaded, limit)
    request = engine.add(ids, 2, stop_ids=())
    while not engine.step():
        pass
    found = state_of(tiny_loaded, engine, request)
    for layer, parts in found.items():
        for name, tensor in parts.items():
            assert relative_error(tensor, values[f"state.{layer}.{name}"]) < BOUND, (layer, name)
    assert sorted(found) == list(range(9))
    engine.cancel(request)


def state_of(loaded, engine, request):
    """Read a request's state out of the planned memory, by layer, with the names of the golden."""
    plan = loaded.buckets["decode.b1"].plan
    cache, state = loaded.manifest.cache, engine._state
    pages = state.page_row(request)[: -(-TOKENS // cache.page_tokens)]
    found = {}
    for call in plan.calls:
        for buffer in plan.buffers:
            if buffer.graph != call.graph or buffer.space not in ("kv_pages", "state_slots"):
                continue
            first = call.bases[buffer.space] + buffer.offset
            raw = loaded.memory[buffer.space].array[first : first + buffer.nbytes].view(np.float32)
            parts = found.setdefault(call.layer, {})
            if call.layer in MLA_LAYERS:
                rows = raw.reshape(cache.pages, cache.page_tokens, 80)[pages].reshape(-1, 80)
                parts["kv"] = torch.tensor(rows[:TOKENS])
                continue
            shape, name = ((3, 576), "conv") if "conv" in buffer.id else ((6, 32, 32), "S")
            parts[name] = torch.tensor(raw.reshape(cache.slots, *shape)[state.slot(request)])
    return found
