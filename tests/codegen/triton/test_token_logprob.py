"""Log probabilities of targets on GPUs, against the reference op."""

import math

import pytest
import torch

from k3c.codegen.templates.triton.token_logprob import TokenLogprob
from k3c.ir.graph import Node
from k3c.targets.target import load_target
from tests.support.triton_runner import GPU_TARGETS, check, compiles, node, run, value

# The reference sums up to 163,840 terms in float32; the kernel sums lanes, then in float64.
BOUND = 3e-6


def problem(rows, vocab):
    gen = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, vocab, generator=gen) * 5
    targets = torch.randint(-1, vocab, (rows,), generator=gen, dtype=torch.int32)
    return [logits, targets]


def scored(tensors):
    return node("token_logprob", tensors, [("f32", len(tensors[1]))])


@pytest.mark.parametrize(("rows", "vocab"), [(1, 2048), (3, 96), (21, 101), (2, 5), (2, 20000)])
def test_log_probabilities_equal_the_reference_and_are_zero_without_a_target(rows, vocab):
    tensors = problem(rows, vocab)
    got = check(TokenLogprob(), scored(tensors), tensors, BOUND)[0]
    assert (got[tensors[1] < 0] == 0).all()


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, 1e4 - 1.0, -1e4], [-3e4, -3e4, -3e4]])
    tensors = [logits, torch.tensor([1, 2], dtype=torch.int32)]
    check(TokenLogprob(), scored(tensors), tensors, BOUND)


def test_a_nan_stays_in_its_row():
    logits = torch.zeros(3, 20)
    logits[1, 7] = math.nan
    tensors = [logits, torch.tensor([4, 4, 4], dtype=torch.int32)]
    got = run(TokenLogprob(), scored(tensors), tensors)[0]
    assert torch.isnan(got).tolist() == [False, True, False]


def test_a_target_past_the_vocabulary_gives_nan_and_reads_nothing():
    tensors = [torch.randn(2, 96), torch.tensor([96, 2**31 - 1], dtype=torch.int32)]
    assert torch.isnan(run(TokenLogprob(), scored(tensors), tensors)[0]).all()


@pytest.mark.device
@pytest.mark.parametrize("rows", [1, 64, 300])
def test_real_shapes(rows):
    tensors = problem(rows, 163840)
    check(TokenLogprob(), scored(tensors), tensors, BOUND)


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_every_target_has_the_kernel(target):
    operands = (value("l", "f32", 8192, 163840), value("t", "i32", 8192))
    n = Node("token_logprob", operands, (value("p", "f32", 8192),), {})
    compiles(TokenLogprob(), n, load_target(target))
