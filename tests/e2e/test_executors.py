"""The compiled entry function and the plan run command by command give the same bits."""

import numpy as np
import pytest

from tests.support.compiled import WatchedEngine, open_loaded


def trace(loaded, prompts, chunk):
    """Return everything that a run leaves behind."""
    engine = WatchedEngine(loaded, chunk)
    scores = engine.score([prompts[20], prompts[8][:17]])
    requests = [engine.add(prompts[i], 12, top_logprobs=3) for i in (8, 20, 7, 4, 15)]
    events = []
    while engine.has_work:
        events += engine.step()
    state = [loaded.memory[space].array.copy() for space in ("kv_pages", "state_slots")]
    return events, [engine.logits[r] for r in requests], scores, state


@pytest.mark.parametrize("name", ["demo_f32", "demo_bf16", "tiny_f32"])
def test_entry_and_command_executor_agree_bit_by_bit(name, request, prompts):
    artifact = request.getfixturevalue(name)
    small = [[t % 2048 for t in p] for p in prompts]
    entry, command = (
        trace(open_loaded(artifact, executor), small, 29) for executor in ("whole", "command")
    )
    assert entry[0] == command[0]
    for mine, other in zip(entry[1:], command[1:], strict=True):
        for a, b in zip(mine, other, strict=True):
            # Bytes, so that NaN equals NaN and 0 differs from -0.
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_two_runs_of_one_engine_agree_bit_by_bit(demo, prompts):
    first, second = (demo.force(prompts[8], prompts[20]) for _ in range(2))
    demo.finish()
    third = demo.force(prompts[8], prompts[20])
    demo.finish()
    fourth = demo.force(prompts[8], prompts[20])
    demo.finish()
    assert np.array_equal(demo.logits[third], demo.logits[fourth])
    assert np.array_equal(demo.logits[first], demo.logits[second])
