"""Log probabilities of targets against the reference op."""

from __future__ import annotations

import math

import pytest
import torch

from k3c.codegen.templates.tvm.token_logprob import TEMPLATES
from tests.support.kernel_runner import check, node, run

LOGPROB = TEMPLATES[0]
# The reference sums up to 163,840 terms in float32; the kernel sums in float64.
BOUND = 3e-6


@pytest.mark.parametrize(("rows", "vocab"), [(1, 2048), (3, 96), (63, 101), (100, 5), (2, 163840)])
def test_log_probabilities_equal_the_reference_and_are_zero_without_a_target(rows, vocab):
    gen = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, vocab, generator=gen) * 5
    targets = torch.randint(-1, vocab, (rows,), generator=gen, dtype=torch.int32)
    tensors = [logits, targets]
    got = check(LOGPROB, node("token_logprob", tensors, [("f32", rows)]), tensors, BOUND)[0]
    assert (got[targets < 0] == 0).all()


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, 1e4 - 1.0, -1e4], [-3e4, -3e4, -3e4]])
    tensors = [logits, torch.tensor([1, 2], dtype=torch.int32)]
    check(LOGPROB, node("token_logprob", tensors, [("f32", 2)]), tensors, BOUND)


def test_a_nan_stays_in_its_row():
    logits = torch.zeros(3, 20)
    logits[1, 7] = math.nan
    tensors = [logits, torch.tensor([4, 4, 4], dtype=torch.int32)]
    got = run(LOGPROB, node("token_logprob", tensors, [("f32", 3)]), tensors)[0]
    assert torch.isnan(got).tolist() == [False, True, False]


def test_a_target_past_the_vocabulary_gives_nan_and_reads_nothing():
    tensors = [torch.randn(2, 96), torch.tensor([96, 2**31 - 1], dtype=torch.int32)]
    got = run(LOGPROB, node("token_logprob", tensors, [("f32", 2)]), tensors)[0]
    assert torch.isnan(got).all()
