"""Tokens that the host chooses: the kernel's rule, on logits that a request has changed."""

import numpy as np
import pytest
import torch

from k3c.export.ops.sampling import SamplingRow, counter_uniform, sample_row
from k3c.runtime.host_sampler import adjust, choose, logprob, sample, uniform
from k3c.runtime.request import Adjustments, Request, RequestOptions, Sampling

V = 101


def request_of(prompt=(1, 2), output=(), **options):
    full = RequestOptions(9, Sampling(), 0, options.pop("stop_ids", frozenset()), **options)
    return Request(0, np.array(prompt, np.int32), full, list(output))


@pytest.fixture
def logits():
    return np.random.default_rng(1).normal(size=V).astype(np.float32)


@pytest.mark.parametrize("seed", [0, 1, -7, 2**63 - 1, -(2**63)])
def test_random_numbers_are_the_kernels(seed):
    for position in (0, 1, 17, 2**20):
        assert uniform(seed, position) == counter_uniform(seed, position)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (7, 0.9, 0.1)]
)
def test_the_choice_is_the_reference_ops(temperature, top_k, top_p, min_p):
    draw = np.random.default_rng(3)
    sampling = Sampling(temperature, top_k, top_p, min_p)
    for _ in range(200):
        row = draw.normal(size=V).astype(np.float32) * 3
        at = float(np.float32(draw.random()))
        expected = sample_row(
            torch.from_numpy(row), SamplingRow(temperature, top_k, top_p, min_p, at)
        )
        assert sample(row, sampling, at) == expected


def test_a_row_with_nan_is_a_fault_and_so_is_a_mask_that_allows_nothing(logits):
    broken = logits.copy()
    broken[3] = np.nan
    assert choose(broken, request_of(adjustments=Adjustments(min_tokens=1))) == -1
    everything = frozenset(range(V))
    assert choose(logits, request_of(adjustments=Adjustments(forbidden=everything))) == -1


def test_a_bias_moves_the_choice_and_leaves_the_logits_alone(logits):
    before = logits.copy()
    adjustments = Adjustments(logit_bias={7: 100.0})
    assert choose(logits, request_of(adjustments=adjustments)) == 7
    assert (logits == before).all()


def test_only_allowed_tokens_are_chosen_and_forbidden_ones_never(logits):
    order = np.argsort(-logits)
    adjustments = Adjustments(
        allowed=frozenset(map(int, order[3:6])), forbidden=frozenset({int(order[3])})
    )
    assert choose(logits, request_of(adjustments=adjustments)) == order[4]


def test_penalties_count_generated_tokens_and_repetition_counts_the_prompt_too(logits):
    request = request_of((5,), (9, 9, 4), adjustments=Adjustments(2.0, 0.5, 0.25))
    expected = logits.astype(np.float64)
    for token in (4, 5, 9):
        expected[token] = expected[token] / 2 if expected[token] > 0 else expected[token] * 2
    expected[9] -= 0.5 + 2 * 0.25
    expected[4] -= 0.5 + 0.25
    # float32 sums of a few terms near 1.
    assert np.abs(adjust(logits, request) - expected).max() < 1e-6


def test_a_stop_token_is_not_chosen_before_the_least_length(logits):
    best = int(np.argmax(logits))
    options = {"adjustments": Adjustments(min_tokens=2), "stop_ids": frozenset({best})}
    assert choose(logits, request_of(output=(1,), **options)) != best
    assert choose(logits, request_of(output=(1, 1), **options)) == best


def test_a_log_probability_is_of_the_raw_logits(logits):
    exact = logits.astype(np.float64)
    expected = exact[3] - np.log(np.exp(exact).sum())
    # float64 throughout.
    assert abs(logprob(logits, 3) - expected) < 1e-12
