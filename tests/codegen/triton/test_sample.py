"""The sampling kernels choose the reference's token, and -1 where logits are broken."""

import math

import pytest
import torch

from k3c.codegen.templates.triton.sample import Sample
from k3c.ir.graph import Node
from k3c.targets.target import load_target
from tests.support.triton_runner import GPU_TARGETS, check, compiles, node, run, value

PARAMETERS = [  # temperature, top_k, top_p, min_p
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
    (1e-40, 0, 1.0, 0.0),
]
GREEDY, DRAWN, NUCLEUS = PARAMETERS[0], PARAMETERS[1], PARAMETERS[3]


def operands(logits, rows, seed=0):
    """Operands for parameters (temperature, top_k, top_p, min_p) a row."""
    gen = torch.Generator().manual_seed(seed)
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(rows),), generator=gen)
    positions = torch.randint(0, 2**20, (len(rows),), generator=gen, dtype=torch.int32)
    floats = [torch.tensor(x, dtype=torch.float32) for x in (temperature, top_p, min_p)]
    counts = torch.tensor(top_k, dtype=torch.int32)
    return [logits, floats[0], counts, *floats[1:], seeds, positions]


def compare(logits, rows, seed=0):
    """Check the tokens against the reference's, exactly, and return them."""
    tensors = operands(logits, rows, seed)
    return check(Sample(), node("sample", tensors, [("i32", len(rows))]), tensors, 0.0)[0]


def random_logits(rows, vocab, seed=1):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_tokens_equal_the_reference_for_every_kind_of_filter():
    compare(random_logits(len(PARAMETERS), 101), PARAMETERS)


def test_a_vocabulary_smaller_than_a_warp():
    compare(random_logits(3, 5), [GREEDY, NUCLEUS, PARAMETERS[6]])


def test_rows_of_many_chunks_and_tiles():
    compare(random_logits(4, 20001), [GREEDY, DRAWN, PARAMETERS[5], NUCLEUS])


# Flat rows keep more than the copy of what lies above the cut holds; peaked ones little.
@pytest.mark.parametrize("size", [0.1, 3.0])
def test_filters_find_their_threshold_in_the_row_or_in_its_copy(size):
    logits = size * random_logits(3, 9000)
    compare(logits, [(1.0, 0, 0.95, 0.0), (1.0, 3, 0.95, 0.0), (1.0, 0, 1.0, 1e-3)])


def test_top_k_and_top_p_above_everything_keep_all():
    rows = [(1.0, 97, 1.0, 0.0), (1.0, 1000, 2.0, 0.0), (1.0, -1, 1.0, -1.0)]
    compare(random_logits(3, 97), rows)


def test_equal_logits_are_all_kept_and_greedy_takes_the_lowest_index():
    rows = [GREEDY, DRAWN, (0.7, 5, 0.9, 0.0)]
    assert compare(torch.zeros(3, 101), rows)[0] == 0


def test_ties_at_a_threshold_are_kept():
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, 1.0, -3.0]).repeat(4, 1)
    compare(logits, [(1.0, k, p, 0.0) for k in (1, 3) for p in (0.3, 0.95)])


def test_logits_of_minus_infinity_are_never_chosen():
    logits = random_logits(4, 130)
    logits[:, ::2] = -math.inf
    logits[:, 3] = -math.inf
    tokens = compare(logits, [GREEDY, DRAWN, NUCLEUS, PARAMETERS[5]])
    assert (tokens % 2 == 1).all()
    assert (tokens != 3).all()


def test_the_last_index_can_be_chosen_and_what_lies_behind_it_cannot():
    logits = torch.full((2, 67), -200.0)
    logits[:, 66] = 5.0
    assert (compare(logits, [DRAWN, GREEDY]) == 66).all()


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("index", [0, 100])
def test_a_broken_row_gives_minus_one_and_leaves_its_neighbours_alone(broken, index):
    logits = random_logits(4, 101)
    logits[:2, index] = broken
    tokens = compare(logits, [GREEDY, NUCLEUS, GREEDY, NUCLEUS])
    assert tokens[:2].tolist() == [-1, -1]
    assert (tokens[2:] >= 0).all()


def test_a_row_without_any_finite_logit_gives_minus_one():
    assert compare(torch.full((2, 33), -math.inf), [GREEDY, DRAWN]).tolist() == [-1, -1]


def test_a_token_does_not_depend_on_the_other_rows():
    logits, rows = random_logits(3, 500), [NUCLEUS, DRAWN, PARAMETERS[5]]
    together = operands(logits, rows)
    want = run(Sample(), node("sample", together, [("i32", 3)]), together)[0]
    for s in range(3):
        alone = [t[s : s + 1].clone() for t in together]
        assert run(Sample(), node("sample", alone, [("i32", 1)]), alone)[0] == want[s]


@pytest.mark.device
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rows", [1, 12, 64, 512])
def test_tokens_equal_the_reference_on_the_full_vocabulary(rows, seed):
    chosen = (PARAMETERS * 43)[seed : seed + rows]
    compare(random_logits(rows, 163840, seed), chosen, seed)


@pytest.mark.device
def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    count = 4000
    tensors = operands(probabilities.log().repeat(count, 1), [DRAWN] * count)
    tokens = run(Sample(), node("sample", tensors, [("i32", count)]), tensors)[0]
    shares = torch.bincount(tokens, minlength=5) / count
    # Five standard deviations of a share of 1/2 over 4000 draws.
    assert (shares - probabilities).abs().max() < 5 * math.sqrt(0.25 / count)


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_every_target_has_the_kernels(target):
    kinds = ["f32", "i32", "f32", "f32", "i64", "i32"]
    parameters = [value(f"x{i}", kind, 512) for i, kind in enumerate(kinds)]
    n = Node("sample", (value("l", "f32", 512, 163840), *parameters), (value("t", "i32", 512),), {})
    compiles(Sample(), n, load_target(target))
