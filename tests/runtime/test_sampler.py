"""Log probabilities that a request asks to see."""

import numpy as np

from k3c.runtime.sampler import top_logprobs


def test_equal_values_go_to_the_lower_id_first():
    logits = np.array([0, 1, 1, 1, -5], np.float32)
    assert [i for i, _ in top_logprobs(logits, 2)] == [1, 2]
    assert [i for i, _ in top_logprobs(logits, 4)] == [1, 2, 3, 0]


def test_all_values_together_are_one():
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32) * 30
    total = sum(np.exp(v) for _, v in top_logprobs(logits, 1000))
    # float64 sums of 1,000 terms.
    assert abs(total - 1) < 1e-12


def test_large_and_masked_logits_stay_finite():
    logits = np.array([3e38, -np.inf, 3e38], np.float32)
    assert top_logprobs(logits, 2) == ((0, -np.log(2.0)), (2, -np.log(2.0)))
    assert top_logprobs(logits, 0) == ()
