"""The sampling kernel chooses the reference's token, and -1 where logits are broken."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from k3c.codegen.templates.tvm.sample import TEMPLATES
from k3c.export.ops import REFERENCE
from tests.support.kernel_runner import check, node, run

SAMPLE = TEMPLATES[0]


def operands(logits: Tensor, rows: list[tuple[float, int, float, float]], seed: int = 0):
    """Operands for parameters (temperature, top_k, top_p, min_p) a row."""
    gen = torch.Generator().manual_seed(seed)
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(rows),), generator=gen)
    positions = torch.randint(0, 2**20, (len(rows),), generator=gen, dtype=torch.int32)
    return [
        logits,
        torch.tensor(temperature, dtype=torch.float32),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p, dtype=torch.float32),
        torch.tensor(min_p, dtype=torch.float32),
        seeds,
        positions,
    ]


def compare(logits: Tensor, rows: list[tuple[float, int, float, float]], seed: int = 0) -> Tensor:
    """Check the kernel's tokens against the reference's, exactly, and return them."""
    tensors = operands(logits, rows, seed)
    return check(SAMPLE, node("sample", tensors, [("i32", len(rows))]), tensors, 0.0)[0]


def random_logits(rows: int, vocab: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


PARAMETERS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.05),
    (0.9, 40, 0.8, 0.02),
    (5.0, 3, 0.5, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (2.0, 0, 0.0, 0.0),
    (0.01, 0, 1.0, 0.0),
]


@pytest.mark.parametrize("vocab", [5, 96, 101, 2048])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_equal_the_reference_for_every_kind_of_filter(vocab, seed):
    compare(random_logits(len(PARAMETERS), vocab, seed), PARAMETERS, seed)


def test_tokens_equal_the_reference_on_the_full_vocabulary():
    rows = PARAMETERS[:6]
    compare(random_logits(len(rows), 163840), rows)


def test_top_k_and_top_p_above_everything_keep_all():
    compare(
        random_logits(3, 97), [(1.0, 97, 1.0, 0.0), (1.0, 1000, 2.0, 0.0), (1.0, -1, 1.0, -1.0)]
    )


def test_equal_logits_are_all_kept_and_greedy_takes_the_lowest_index():
    tokens = compare(torch.zeros(len(PARAMETERS), 101), PARAMETERS)
    assert tokens[0] == 0


def test_ties_at_a_threshold_are_kept():
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, 1.0, -3.0]).repeat(64, 1)
    rows = [(1.0, k, p, 0.0) for k in (1, 2, 3, 4) for p in (1.0, 0.3, 0.6, 0.95)] * 4
    tokens = compare(logits, rows)
    # top-k 3 reaches the three logits of 1.0, and keeps them all.
    kept = {int(t) for t, r in zip(tokens, rows, strict=True) if r[1] == 3 and r[2] == 1.0}
    assert kept <= {1, 2, 3, 4, 5}


def test_logits_of_minus_infinity_are_never_chosen():
    logits = random_logits(len(PARAMETERS), 130)
    logits[:, ::2] = -math.inf
    logits[:, 3] = -math.inf
    tokens = compare(logits, PARAMETERS)
    assert (tokens % 2 == 1).all()
    assert (tokens != 3).all()


def test_the_last_index_can_be_chosen_and_the_padding_behind_it_cannot():
    logits = torch.full((8, 67), -200.0)
    logits[:, 66] = 5.0
    tokens = compare(logits, [(1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0)] * 4)
    assert (tokens == 66).all()


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("index", [0, 63, 96, 100])
def test_a_broken_row_gives_minus_one_and_leaves_its_neighbours_alone(broken, index):
    rows = [(0.0, 0, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (0.0, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0)]
    logits = random_logits(4, 101)
    want = REFERENCE["sample"](*operands(logits, rows))[0]
    logits[:2, index] = broken
    tensors = operands(logits, rows)
    tokens = run(SAMPLE, node("sample", tensors, [("i32", 4)]), tensors)[0]
    assert tokens.tolist() == [-1, -1, *want[2:].tolist()]


def test_a_row_without_any_finite_logit_gives_minus_one():
    tensors = operands(torch.full((2, 33), -math.inf), [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0)])
    assert run(SAMPLE, node("sample", tensors, [("i32", 2)]), tensors)[0].tolist() == [-1, -1]


def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    count = 4000
    tensors = operands(probabilities.log().repeat(count, 1), [(1.0, 0, 1.0, 0.0)] * count)
    tokens = run(SAMPLE, node("sample", tensors, [("i32", count)]), tensors)[0]
    shares = torch.bincount(tokens, minlength=5) / count
    # Five standard deviations of a share of 1/2 over 4000 draws.
    assert (shares - probabilities).abs().max() < 5 * math.sqrt(0.25 / count)
