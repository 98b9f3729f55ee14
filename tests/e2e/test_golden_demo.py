"""Compiled k3-demo against its golden file: greedy text, the largest logits, the loss."""

import random

import numpy as np
import pytest

from tests.support.compiled import WatchedEngine, open_loaded

# Shortest prompts, long ones, text that ends in a stop token and text that does not.
GROUPS = {
    1: [[8], [20], [15], [19]],
    2: [[20, 8], [17, 4]],
    4: [[8, 20, 7, 14]],
    8: [[20, 8, 7, 4, 2, 18, 15, 22]],
}


def run(engine, golden, chosen):
    prompts = [golden["prompts"][i]["prompt_ids"] for i in chosen]
    results = engine.generate(prompts, golden["max_new_tokens"])
    return [list(result.token_ids) for result in results]


def expect(golden, chosen):
    return [golden["prompts"][i]["greedy_ids"] for i in chosen]


def test_every_prompt_continues_as_golden_with_all_of_them_in_one_batch(demo, golden):
    every = range(len(golden["prompts"]))
    assert run(demo, golden, every) == expect(golden, every)


def test_prompts_end_in_the_golden_five_largest_logits(demo, golden):
    for prompt in golden["prompts"]:
        request = demo.add(prompt["prompt_ids"], 1, stop_ids=())
        demo.finish()
        logits = demo.logits[request][0]
        # The file has five decimals; float32 implementations differ by about 1e-5 of the largest.
        wanted = np.array(prompt["top5_logits"])
        assert np.abs(logits[prompt["top5_ids"]] - wanted).max() < 1e-4 * np.abs(wanted).max()
        assert np.argsort(-logits, kind="stable")[:5].tolist() == prompt["top5_ids"]


@pytest.mark.parametrize("size", GROUPS)
def test_prompts_continue_as_golden_in_groups_of_every_decode_bucket(demo, golden, size):
    for chosen in GROUPS[size]:
        assert len(chosen) == size
        assert run(demo, golden, chosen) == expect(golden, chosen)
    assert demo.timings["buckets"][f"decode.b{size}"]["steps"] > 0


@pytest.mark.parametrize("limit", [1, 3, 63])
def test_prompts_continue_as_golden_when_prefilled_in_odd_chunks(demo_loaded, golden, limit):
    chosen = [20, 8, 15] if limit == 1 else [20, 8, 15, 13, 10]
    assert run(WatchedEngine(demo_loaded, limit), golden, chosen) == expect(golden, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 1, 3, 63])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_prompt_continues_as_golden_in_every_bucket(demo_loaded, golden, size, limit):
    order = list(range(len(golden["prompts"])))
    random.Random(size).shuffle(order)
    engine = WatchedEngine(demo_loaded, limit)
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        assert run(engine, golden, chosen) == expect(golden, chosen)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_requests_that_come_and_go_at_any_time_do_not_touch_each_other(demo_loaded, golden, seed):
    choice = random.Random(seed)
    engine = WatchedEngine(demo_loaded, choice.choice([None, 5, 40]))
    waiting = choice.sample([i for i in range(26) if i not in (16, 19, 22)], 14)
    running, outputs, cancelled = {}, {}, set()
    while waiting or engine.has_work:
        for _ in range(choice.randrange(3) if waiting else 0):
            if waiting:
                index = waiting.pop()
                prompt = golden["prompts"][index]["prompt_ids"]
                running[engine.add(prompt, golden["max_new_tokens"])] = index
        if running and choice.random() < 0.01:
            request = choice.choice(sorted(running))
            engine.cancel(request)
            cancelled.add(running.pop(request))
        for event in engine.step():
            outputs.setdefault(event.request_id, []).append(event.token_id)
            if event.finish_reason:
                index = running.pop(event.request_id)
                assert outputs[event.request_id] == golden["prompts"][index]["greedy_ids"]
    assert len(cancelled) < 14
    assert (engine._state.free_slots, engine._state.free_pages) == (8, 4096)


def mean_nll(engine, text):
    (row,) = engine.score([text["ids"]])
    assert len(row) == len(text["ids"]) - 1
    return -float(np.mean(row, dtype=np.float64))


@pytest.mark.parametrize("index", [0, 1])
def test_the_mean_loss_of_a_text_is_golden(demo, golden, index):
    text = golden["nll"][index]
    assert abs(mean_nll(demo, text) - text["mean_nll"]) < 1e-4


def test_the_mean_loss_in_bf16_is_within_half_a_percent(demo_bf16, golden):
    engine = WatchedEngine(open_loaded(demo_bf16))
    for text in golden["nll"]:
        assert abs(mean_nll(engine, text) / text["mean_nll"] - 1) < 0.005


def test_sampled_text_depends_on_seed_and_prompt_not_on_the_batch(demo, golden):
    prompts = [golden["prompts"][i]["prompt_ids"] for i in (8, 20, 7, 4)]
    options = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.02}
    alone = [demo.generate([p], 16, seed=5, **options)[0].token_ids for p in prompts]
    together = demo.generate(prompts, 16, seed=5, **options)
    assert [r.token_ids for r in together] == alone
    assert demo.generate([prompts[0]], 16, seed=6, **options)[0].token_ids != alone[0]
