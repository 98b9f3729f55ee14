"""Sampling: the counter RNG bit for bit, each filter, ties, and the law of the samples."""

import pytest
import torch

from k3c.export.ops import counter_uniform, sample, token_logprob
from k3c.export.ops.sampling import SamplingRow, sample_row


def support(logits, **settings):
    """Tokens that some u can choose."""
    row = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    grid = (i / 256 for i in range(256))
    return sorted({sample_row(logits, SamplingRow(**row, uniform=u)) for u in grid})


def probabilities(*values):
    return torch.tensor(values).log()


def test_the_counter_rng_is_splitmix64():
    # Reference values of splitmix64 for the state 0 and 1234567: the first output of each.
    assert counter_uniform(0, 0) == (0xE220A8397B1DCDAF >> 40) / 2**24
    assert counter_uniform(0, 1234567) == (6457827717110365317 >> 40) / 2**24
    assert 0 <= counter_uniform(-1, 2**31 - 1) < 1
    assert counter_uniform(-1, 5) == counter_uniform(2**64 - 1, 5)


def test_the_counter_rng_spreads_over_positions_and_seeds():
    values = torch.tensor([counter_uniform(s, p) for s in range(40) for p in range(100)])
    assert len(values.unique()) > 3990
    # Standard error of the mean of 4000 uniforms: 0.0046.
    assert abs(float(values.mean()) - 0.5) < 0.02


def test_temperature_zero_takes_the_lowest_of_equal_maxima():
    logits = torch.tensor([1.0, 3.0, 3.0, -1.0])
    assert support(logits, temperature=0.0) == [1]


def test_top_k_keeps_ties_at_its_threshold():
    logits = probabilities(0.1, 0.3, 0.2, 0.2, 0.2)
    assert support(logits, top_k=1) == [1]
    assert support(logits, top_k=2) == [1, 2, 3, 4]
    assert support(logits, top_k=0) == support(logits, top_k=99) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_smallest_set_with_the_mass():
    logits = probabilities(0.1, 0.5, 0.25, 0.15)
    assert support(logits, top_p=0.4) == [1]
    assert support(logits, top_p=0.6) == [1, 2]
    assert support(logits, top_p=0.8) == [1, 2, 3]
    assert support(logits, top_p=0.0) == [1]


def test_top_p_counts_the_mass_that_top_k_left():
    logits = probabilities(0.1, 0.5, 0.25, 0.15)
    # Of 0.75 left, 0.5 is two thirds.
    assert support(logits, top_k=2, top_p=0.6) == [1]
    assert support(logits, top_k=2, top_p=0.7) == [1, 2]


def test_min_p_is_relative_to_the_most_likely():
    logits = probabilities(0.1, 0.5, 0.25, 0.15)
    assert support(logits, min_p=0.4) == [1, 2]
    assert support(logits, min_p=1.0) == [1]


def test_impossible_tokens_are_never_drawn():
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    assert support(logits) == [1, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_row_with_a_nan_or_an_infinite_maximum_gives_minus_one(temperature, broken):
    logits = torch.tensor([1.0, broken, 3.0, -torch.inf])
    assert support(logits, temperature=temperature) == [-1]
    nothing = torch.full((4,), -torch.inf)
    assert support(nothing, temperature=temperature) == [-1]


def test_samples_follow_the_tempered_law():
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])
    count = 4000
    batch = logits.expand(count, 4)
    one = torch.ones(count)
    zero = torch.zeros(count)
    seed, position = torch.full((count,), 7), torch.arange(count, dtype=torch.int32)
    tokens = sample(batch, 0.7 * one, zero.int(), one, zero, seed, position)
    shares = torch.bincount(tokens, minlength=4) / count
    # Five standard errors of a share at 4000 draws are below 0.04.
    assert torch.allclose(shares, torch.softmax(logits / 0.7, 0), atol=0.04)


def test_a_rows_token_does_not_depend_on_the_batch():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    settings = (
        torch.tensor([0.0, 1.0, 0.8, 1.5, 1.0, 0.7]),
        torch.tensor([0, 5, 0, 0, 3, 0], dtype=torch.int32),
        torch.tensor([1.0, 0.9, 0.5, 1.0, 0.8, 1.0]),
        torch.tensor([0.0, 0.0, 0.1, 0.05, 0.0, 0.3]),
        torch.tensor([1, 2, -3, 2**62, 5, 6]),
        torch.arange(6, dtype=torch.int32),
    )
    together = sample(logits, *settings)
    for s in range(6):
        row = slice(s, s + 1)
        assert sample(logits[row], *(x[row] for x in settings)) == together[s]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_probabilities_are_zero_where_there_is_no_target(dtype):
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = token_logprob(logits, torch.tensor([4, -1, 0], dtype=torch.int32))
    want = torch.log_softmax(logits, -1)
    assert torch.allclose(got, torch.stack([want[0, 4], want[1, 0] * 0, want[2, 0]]))
