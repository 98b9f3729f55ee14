"""Made-up loads, and batches drawn from a load: to plan without a trace, and to judge a plan.

A drawn token chooses exactly `experts_per_token` different experts, each with the probability that
the load gives it: systematic sampling over a random order of the experts. Topics make the traffic
uneven in time: a request has one, and it prefers other experts than the next request does.
All draws come from one seed: equal arguments, equal numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from k3c.errors import ConfigError
from k3c.placement.loads import ExpertLoad, Floats

Experts = NDArray[np.int64]
_CHUNK = 4096  # tokens drawn at once: bounds memory at 4096 x 896 random numbers


def balanced(
    layers: Sequence[int], num_experts: int, top_k: int, tokens: int, seed: int = 0
) -> ExpertLoad:
    """Return what `tokens` tokens of a router without preferences count."""
    rng = np.random.default_rng(seed)
    shares = np.full(num_experts, top_k / num_experts)
    rows = [np.bincount(draw(shares, tokens, rng).ravel(), minlength=num_experts) for _ in layers]
    return ExpertLoad(tuple(layers), top_k, np.array(rows, dtype=np.float64))


def lognormal(
    layers: Sequence[int], num_experts: int, top_k: int, sigma: float, seed: int = 0
) -> ExpertLoad:
    """Return a load of log-normal weights of scale `sigma`, other ones in each layer."""
    _check(sigma, "sigma")
    rng = np.random.default_rng(seed)
    weights = np.exp(sigma * rng.standard_normal((len(layers), num_experts)))
    return _capped(layers, weights, top_k)


def zipf(
    layers: Sequence[int], num_experts: int, top_k: int, exponent: float, seed: int = 0,
    *, capped: bool = True,
) -> ExpertLoad:  # fmt: skip
    """Return a load whose i-th expert has weight i**-exponent, in another order each layer.

    Args:
        layers: MoE layers.
        num_experts: Logical experts.
        top_k: Experts of a token.
        exponent: 0 is flat.
        seed: Of the orders.
        capped: No expert gets more rows than there are tokens. A trace always is; without it the
            load is only a list of numbers, as benchmarks of placements use it.
    """
    _check(exponent, "exponent")
    rng = np.random.default_rng(seed)
    curve = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    weights = np.array([rng.permutation(curve) for _ in layers])
    if capped:
        return _capped(layers, weights, top_k)
    rows = weights * (_ROWS / weights.sum(axis=1, keepdims=True))
    return ExpertLoad(tuple(layers), top_k, rows)


_ROWS = 16_000_000.0  # rows of a made-up load: 1 M tokens of 16 experts


def _check(value: float, name: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} is {value}, expected a number from 0 on", "made-up load", "")


def _capped(layers: Sequence[int], weights: Floats, top_k: int) -> ExpertLoad:
    return ExpertLoad(tuple(layers), top_k, inclusion(weights, top_k) * (_ROWS / top_k))


def inclusion(weights: Floats, top_k: int) -> Floats:
    """Return probabilities proportional to weights, at most 1, that sum to `top_k`.

    Args:
        weights: f64[..., E], not negative; at least `top_k` of them positive.
        top_k: Experts of a token.
    """
    # What is over 1 goes to the others in proportion, until nothing is over.
    shares = weights * (top_k / weights.sum(axis=-1, keepdims=True))
    for _ in range(weights.shape[-1]):
        full = shares >= 1.0
        if not (shares > 1.0 + 1e-12).any():
            break
        free = np.where(full, 0.0, shares)
        room = top_k - full.sum(axis=-1, keepdims=True)
        scale = room / np.maximum(free.sum(axis=-1, keepdims=True), 1e-300)
        shares = np.where(full, 1.0, free * scale)
    return np.minimum(shares, 1.0)


def draw(shares: Floats, tokens: int, rng: np.random.Generator) -> Experts:
    """Draw the experts of tokens.

    Args:
        shares: f64[E] probabilities that sum to the number of experts a token.
        tokens: How many.
        rng: Where the draws come from.

    Returns:
        i64[tokens, k]: different experts in each row.
    """
    top_k = round(float(shares.sum()))
    parts: list[Experts] = []
    for start in range(0, tokens, _CHUNK):
        size = min(_CHUNK, tokens - start)
        order = np.argsort(rng.random((size, len(shares)), dtype=np.float32), axis=1)
        ends = np.cumsum(shares[order], axis=1)
        ends *= top_k / ends[:, -1:]
        # A mark lies in an expert's interval where the count of marks below its end grows.
        marks = np.floor(ends - rng.random((size, 1))).astype(np.int64)
        marks[:, -1] = top_k - 1
        chosen = np.diff(marks, axis=1, prepend=-1) > 0
        parts.append(order[chosen].reshape(size, top_k))
    return np.concatenate(parts) if parts else np.zeros((0, top_k), np.int64)


@dataclass(frozen=True)
class Traffic:
    """Where batches come from.

    Attributes:
        layers: MoE layers.
        shares: f64[L, topics, E]: probability that a token of a topic chooses an expert.
    """

    layers: tuple[int, ...]
    shares: Floats

    def batch(self, at: int, requests: int, tokens_each: int, rng: np.random.Generator) -> Experts:
        """Draw a step of one layer: every request has one topic.

        Args:
            at: Position of the layer in `layers`.
            requests: Requests of the step.
            tokens_each: Tokens of each.
            rng: Where the draws come from.

        Returns:
            i64[requests * tokens_each, k].
        """
        topics = np.sort(rng.integers(self.shares.shape[1], size=requests))
        found = [
            draw(self.shares[at, topic], int(count) * tokens_each, rng)
            for topic, count in zip(*np.unique(topics, return_counts=True), strict=True)
        ]
        return rng.permutation(np.concatenate(found))

    def observe(self, steps: int, requests: int, tokens_each: int, seed: int) -> ExpertLoad:
        """Return the load that `steps` drawn steps count: sums, steps apart, pairs of experts."""
        rng = np.random.default_rng(seed)
        experts = self.shares.shape[2]
        counts = np.zeros((len(self.layers), steps, experts))
        pairs = np.zeros((len(self.layers), experts, experts))
        for at in range(len(self.layers)):
            for step in range(steps):
                chosen = self.batch(at, requests, tokens_each, rng)
                member = np.zeros((len(chosen), experts), np.float32)
                np.put_along_axis(member, chosen, 1.0, axis=1)
                counts[at, step] = member.sum(axis=0)
                pairs[at] += member.T @ member
            np.fill_diagonal(pairs[at], 0.0)
        top_k = round(float(self.shares[0, 0].sum()))
        return ExpertLoad(self.layers, top_k, counts.sum(axis=1), pairs, top_k, counts)


def steady(load: ExpertLoad) -> Traffic:
    """Return traffic in which every token is drawn from the load, whatever came before."""
    return Traffic(load.layers, inclusion(load.rows, load.experts_per_token)[:, None, :])


def topical(load: ExpertLoad, topics: int, sigma: float, seed: int = 0) -> Traffic:
    """Return traffic of requests with topics; over all topics it is about the load.

    Args:
        load: The mean.
        topics: How many, all equally likely.
        sigma: How far a topic's experts are from the mean: scale of a log-normal factor.
        seed: Of the factors.
    """
    _check(sigma, "sigma")
    rng = np.random.default_rng(seed)
    shape = (len(load.layers), topics, load.num_experts)
    factors = np.exp(sigma * rng.standard_normal(shape))
    factors /= factors.mean(axis=1, keepdims=True)
    return Traffic(load.layers, inclusion(load.rows[:, None, :] * factors, load.experts_per_token))
