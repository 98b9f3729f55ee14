"""k3-demo on a GPU: every launch against its reference op, and the golden text."""

from dataclasses import dataclass

import numpy as np
import pytest

from k3c.runtime.engine import Engine
from tests.support.plan_differ import diff_plan

# f32: sums in another order. bf16: a rounding of a sum that lies near the middle, and in the MoE
# two roundings (SiTU's branches) before a product.
BOUND = {"demo-f32": 2e-5, "demo-bf16": 2e-2}


@dataclass(frozen=True)
class Rows:
    """What each live segment of a step has: tokens, tokens before, state slot."""

    bucket: str
    tokens: tuple[int, ...]
    context: tuple[int, ...]
    slots: tuple[int, ...]


# In this order: a later step goes on from the state that an earlier one left.
STEPS = (
    Rows("prefill.t64", (20, 3, 1, 17), (0, 0, 0, 0), (1, 2, 3, 4)),
    Rows("prefill.t256", (100, 63, 5), (20, 3, 0), (1, 2, 5)),
    Rows("decode.b4", (1, 1, 1), (120, 66, 1), (1, 2, 3)),
    Rows("decode.b1", (1,), (121,), (1,)),
    Rows("decode.b8", (1,) * 8, (122, 67, 2, 17, 5, 0, 0, 0), (1, 2, 3, 4, 5, 6, 7, 8)),
)


@pytest.mark.parametrize("name", BOUND)
def test_every_node_of_every_kind_of_step_equals_its_reference(opened, name):
    loaded = opened(name, executor="command")
    for rows in STEPS:
        plan = loaded.buckets[rows.bucket].plan
        found = diff_plan(
            loaded, rows.bucket, lambda io, rows=rows, plan=plan: fill(io, rows, plan)
        )
        assert len(found) > 200
        beyond = [f for f in found if not f.error <= BOUND[name]]
        assert not beyond, f"{rows.bucket}: {beyond[:5]}"


@pytest.mark.parametrize("executor", ["whole", "command"])
def test_all_prompts_continue_as_golden_in_one_batch(opened, golden, executor):
    engine = Engine(opened("demo-f32", executor=executor))
    prompts = [p["prompt_ids"] for p in golden["prompts"]]
    results = engine.generate(prompts, golden["max_new_tokens"])
    assert [list(r.token_ids) for r in results] == [p["greedy_ids"] for p in golden["prompts"]]


def test_replayed_graphs_run_ahead_and_single_launches_give_the_same_tokens(opened, golden):
    prompts = [p["prompt_ids"] for p in golden["prompts"]]
    texts = []
    for options in ({}, {"run_ahead": False}, {"executor": "command", "run_ahead": False}):
        engine = Engine(opened("demo-bf16", **options))
        results = engine.generate(prompts, golden["max_new_tokens"])
        texts.append([list(r.token_ids) for r in results])
    assert texts[0] == texts[1] == texts[2]


def test_losses_of_bf16_stay_near_the_golden_loss(opened, golden):
    engine = Engine(opened("demo-bf16"))
    for text in golden["nll"]:
        (logprobs,) = engine.score([text["ids"]])
        assert abs(-float(np.mean(logprobs)) / text["mean_nll"] - 1) < 0.005


def fill(io, rows, plan):
    for field in io.values():
        field[...] = 0
    size, pages = plan.bucket.dims["T"], plan.bucket.dims["M"]
    io["ids"][...] = np.random.default_rng(0).integers(0, 4000, size)
    row = 0
    for s, (tokens, context, slot) in enumerate(
        zip(rows.tokens, rows.context, rows.slots, strict=True)
    ):
        io["seg_start"][s], io["seg_tokens"][s], io["context"][s] = row, tokens, context
        io["slots"][s] = slot
        io["page_table"][s] = 1 + (slot - 1) * pages + np.arange(pages)
        io["sample_rows"][s] = row + tokens - 1
        row += tokens
    io["seg_start"][len(rows.tokens) :] = row
    io["top_p"][...] = 1
