"""What ranks should have alike besides their load: what makes the busiest rank of a batch busy.

A rank's count of rows (prefill) or of different experts (decode) in a batch is random, and the
step waits for the largest of the ranks' counts. For R counts with means m_r and variances v_r,
  E[max] <= (1/t) log sum_r exp(t m_r + t^2 v_r / 2),  t about sqrt(2 ln R / v).
To second order the sum grows with sum_r (m_r + t/2 v_r - mean)^2 + sum_r v_r. The first term asks
for ranks that are alike; the second is not constant only through covariances: experts that fire
together add theirs where they share a rank, so they go apart. All of it is a sum of squares of sums
over a rank's experts, which is what `swap.refine` lowers.
"""

from __future__ import annotations

import math

import numpy as np

from k3c.placement.loads import ExpertLoad, Floats
from k3c.placement.state import Ints

BATCHES = (8, 64)  # tokens of a decode step; at 1 the expected experts are the load itself
FACTORS = 64  # directions kept of what was seen in steps and pairs
_ROUNDS = 4  # of the subspace iteration that finds them


def features(load: ExpertLoad, count: Ints, ranks: int) -> Floats:
    """Return f64[L, E, F]: what to make alike on all ranks.

    Args:
        load: Rows, and where known pairs and steps.
        count: i32[L, E] replicas.
        ranks: Ranks that share the experts.
    """
    share = load.token_shares
    # The load itself too: where a giant lifts the bound, the other ranks still should be alike.
    rows = load.rows * (ranks / load.rows.sum(axis=1, keepdims=True)) / count
    columns = [rows[..., None]]
    columns += [_experts_read(share, count, ranks, batch)[..., None] for batch in BATCHES]
    seen: list[Floats] = []
    if load.steps is not None and load.steps.shape[1] > 1:
        seen.append(_drift(load.steps, ranks) / count[..., None])
    if load.pairs is not None:
        seen.append(_together(load, count, ranks))
    if seen:
        columns.append(_strongest(np.concatenate(seen, axis=2)))
    return np.concatenate(columns, axis=2)


def _strongest(columns: Floats) -> Floats:
    """Turn columns so that few hold most of the squares, and keep these; the rest is chance."""
    if columns.shape[2] <= FACTORS:
        return columns
    vectors = np.linalg.eigh(np.swapaxes(columns, 1, 2) @ columns)[1]
    return columns @ vectors[..., -FACTORS:]


def _experts_read(share: Floats, count: Ints, ranks: int, batch: int) -> Floats:
    """f64[L, E]: chance that a decode step reads a replica, spread included, over the mean."""
    active = 1.0 - (1.0 - share) ** (batch / count)
    spread = active * (1.0 - active)
    # Of physical experts: each of an expert's replicas counts on its rank.
    mean = (active * count).sum(axis=1, keepdims=True) / ranks
    variance = (spread * count).sum(axis=1, keepdims=True) / ranks
    tilt = np.sqrt(2 * math.log(max(ranks, 2)) / np.maximum(variance, 1e-12))
    return (active + tilt / 2 * spread) / mean


def _drift(steps: Floats, ranks: int) -> Floats:
    """f64[L, E, N]: how an expert's share of the rows differs from its mean, step by step."""
    shares = steps * (ranks / steps.sum(axis=2, keepdims=True))
    deviation = shares - shares.mean(axis=1, keepdims=True)
    return np.swapaxes(deviation, 1, 2) / math.sqrt(steps.shape[1])


def _together(load: ExpertLoad, count: Ints, ranks: int) -> Floats:
    """f64[L, E, FACTORS]: factors of the covariance of two experts firing in a decode step."""
    assert load.pairs is not None, "a load with co-activation"
    batch = BATCHES[0]
    share = load.token_shares
    active = 1.0 - (1.0 - share) ** (batch / count)
    mean = (active * count).sum(axis=1) / ranks
    tokens = load.rows.sum(axis=1) / load.experts_per_token
    number = min(FACTORS, load.num_experts)
    found = np.zeros((*share.shape, number))
    for at in range(len(share)):
        together = _excess(load.pairs[at]) / tokens[at]
        # d(active)/d(share), a replica's part of the batch: how a token's choice shows in a step.
        slope = (1.0 - share[at]) ** np.maximum(batch / count[at] - 1, 0) / count[at]
        scale = slope * math.sqrt(batch) / mean[at]
        found[at] = _factors(together * scale[:, None] * scale[None, :], number)
    return found


def _excess(pairs: Floats) -> Floats:
    """How much more often two experts fire together than by chance; the sum over pairs is 0."""
    side = pairs.sum(axis=1)
    chance = np.outer(side, side)
    np.fill_diagonal(chance, 0.0)
    total = chance.sum()
    return pairs - chance * (pairs.sum() / total) if total else pairs


def _factors(matrix: Floats, number: int) -> Floats:
    """Return f64[E, number] whose rows' products approach the matrix's positive part."""
    rng = np.random.default_rng(0)
    # The shift makes the largest eigenvalues the ones furthest from zero.
    shift = float(np.abs(matrix).sum(axis=1).max())
    basis = rng.standard_normal((len(matrix), number))
    for _ in range(_ROUNDS):
        basis = np.linalg.qr(matrix @ basis + shift * 0.1 * basis)[0]
    values, vectors = np.linalg.eigh(basis.T @ matrix @ basis)
    return (basis @ vectors) * np.sqrt(np.maximum(values, 0.0))
