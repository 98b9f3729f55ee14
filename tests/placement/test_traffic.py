"""Made-up loads, and batches drawn from a load."""

import numpy as np
import pytest

from k3c.errors import ConfigError
from k3c.placement.traffic import balanced, draw, inclusion, lognormal, steady, topical, zipf


def test_a_token_has_different_experts_each_as_often_as_the_load_says():
    shares = inclusion(np.arange(1.0, 33.0) ** -1.1, 4)
    chosen = draw(shares, 40_000, np.random.default_rng(1))
    assert chosen.shape == (40_000, 4)
    assert (np.diff(np.sort(chosen, axis=1), axis=1) > 0).all()
    found = np.bincount(chosen.ravel(), minlength=32) / 40_000
    # Five standard deviations of a share: at most 5 * sqrt(0.25 / 40000).
    np.testing.assert_allclose(found, shares, atol=0.0125)


def test_an_expert_that_every_token_chooses_is_in_every_token():
    shares = inclusion(np.array([100.0, 1, 1, 1, 1]), 2)
    assert shares.tolist() == [1, 0.25, 0.25, 0.25, 0.25]
    assert (draw(shares, 100, np.random.default_rng(0)) == 0).any(axis=1).all()


def test_shares_keep_their_ratios_below_the_cap():
    shares = inclusion(np.array([50.0, 40, 6, 3, 1]), 3)
    assert shares[:2].tolist() == [1, 1]
    np.testing.assert_allclose(shares[2:], [0.6, 0.3, 0.1])


def test_equal_seeds_give_equal_loads_and_others_differ():
    for make in (
        lambda seed: balanced([1, 2], 64, 4, 100, seed),
        lambda seed: lognormal([1, 2], 64, 4, 1.0, seed),
        lambda seed: zipf([1, 2], 64, 4, 1.2, seed),
    ):
        np.testing.assert_array_equal(make(3).rows, make(3).rows)
        assert (make(3).rows != make(4).rows).any()
        assert (make(3).rows[0] != make(3).rows[1]).any()


def test_zipf_follows_its_exponent_and_the_cap_takes_what_no_trace_can_have():
    plain = np.sort(zipf([1], 896, 16, 1.2, capped=False).rows[0])[::-1]
    np.testing.assert_allclose(plain[0] / plain[1:4], np.array([2.0, 3, 4]) ** 1.2)
    capped = zipf([1], 896, 16, 1.2)
    assert capped.rows.max() == capped.rows.sum() / 16


def test_requests_of_a_topic_prefer_the_same_experts():
    load = lognormal([1], 128, 8, 0.5)
    traffic = topical(load, 4, 1.5)
    np.testing.assert_allclose(traffic.shares.sum(axis=2), 8)
    seen = traffic.observe(40, 1, 200, seed=2)
    spread = seen.steps[0].std(axis=0).mean()
    plain = steady(load).observe(40, 1, 200, seed=2).steps[0].std(axis=0).mean()
    assert spread > 3 * plain


def test_observed_rows_steps_and_pairs_agree():
    seen = topical(lognormal([1, 2], 32, 4, 0.5), 3, 1.0).observe(5, 2, 10, seed=0)
    assert seen.rows.sum(axis=1).tolist() == [5 * 2 * 10 * 4] * 2
    np.testing.assert_array_equal(seen.steps.sum(axis=1), seen.rows)
    # A token's expert meets the 3 others of the token.
    np.testing.assert_array_equal(seen.pairs.sum(axis=2), 3 * seen.rows)
    assert seen.pairs_of == 4


@pytest.mark.parametrize("sigma", [-1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_refused(sigma):
    with pytest.raises(ConfigError, match="expected a number from 0 on"):
        lognormal([1], 8, 2, sigma)
