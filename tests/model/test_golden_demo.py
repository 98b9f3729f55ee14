"""The oracle against the trained demo model's golden file."""

import pytest
import torch

from tests.support.closeness import relative_error

# Shortest prompts of both kinds: one with a stop token, one that runs to the token limit.
GREEDY = (20, 8)


def test_top5_logits_at_every_prompts_end_are_golden(demo32, demo_golden):
    prompts = [p for p in demo_golden["prompts"] if len(p["prompt_ids"]) <= 150]
    chunks = [p["prompt_ids"] for p in prompts]
    results, _ = demo32(chunks, demo32.new_state(len(chunks), 150))
    for prompt, logits in zip(prompts, results, strict=True):
        want = torch.tensor(prompt["top5_logits"])
        # The file has five decimals; float32 implementations differ by about 1e-5.
        assert relative_error(logits[-1][prompt["top5_ids"]], want) < 1e-5
        assert logits[-1].topk(5).indices.tolist() == prompt["top5_ids"]


@pytest.mark.parametrize("index", GREEDY)
def test_greedy_continuation_is_golden(demo32, demo_golden, index):
    prompt = demo_golden["prompts"][index]
    limits = (demo_golden["max_new_tokens"], demo_golden["stop_ids"])
    assert demo32.greedy(prompt["prompt_ids"], *limits) == prompt["greedy_ids"]


@pytest.mark.slow
def test_every_greedy_continuation_is_golden(demo32, demo_golden):
    limits = (demo_golden["max_new_tokens"], demo_golden["stop_ids"])
    for prompt in demo_golden["prompts"]:
        assert demo32.greedy(prompt["prompt_ids"], *limits) == prompt["greedy_ids"]


@pytest.mark.parametrize("index", [0, 1])
def test_mean_loss_on_fixed_text_is_golden(demo32, demo_golden, index):
    text = demo_golden["nll"][index]
    logprobs = torch.log_softmax(demo32.logits(text["ids"])[:-1], -1)
    nll = -logprobs.gather(-1, torch.tensor(text["ids"][1:])[:, None]).mean()
    # The file has six digits.
    assert abs(float(nll) - text["mean_nll"]) < 1e-5
