"""The sampling kernel's parameters, and the log probabilities that a request asks to see.

The kernel chooses the token; the runtime only fills its arrays. Random numbers are keyed by the
request's seed and the token's position, so a request's text does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from k3c.runtime.events import TopLogprobs
from k3c.runtime.request import Request

# What a row without a request holds: greedy, nothing filtered.
NEUTRAL: tuple[tuple[str, float], ...] = (
    ("temperature", 0.0),
    ("top_k", 0),
    ("top_p", 1.0),
    ("min_p", 0.0),
    ("seed", 0),
    ("position", 0),
)


def fill_sampling(io: Mapping[str, npt.NDArray], row: int, request: Request, position: int) -> None:
    """Write one request's parameters.

    Args:
        io: The step's input arrays, each [B].
        row: The request's row.
        request: The request.
        position: Index in the request of the token to be sampled.
    """
    sampling = request.options.sampling
    io["temperature"][row] = sampling.temperature
    io["top_k"][row] = sampling.top_k
    io["top_p"][row] = sampling.top_p
    io["min_p"][row] = sampling.min_p
    io["seed"][row] = request.seed
    io["position"][row] = position


def clear_sampling(io: Mapping[str, npt.NDArray], first: int) -> None:
    """Write neutral parameters to the rows `first` and up."""
    for name, value in NEUTRAL:
        io[name][first:] = value


def top_logprobs(logits: npt.NDArray[np.float32], count: int) -> TopLogprobs:
    """Return the `count` likeliest tokens with their raw log-softmax values (no temperature).

    Args:
        logits: f32[V], one row; not changed.
        count: How many; equal values go to the lower id first.
    """
    if count == 0:
        return ()
    exact = logits.astype(np.float64)
    # Taken from the peak first: a large logit would swallow the logarithm of the sum.
    exact -= exact.max()
    log_sum = np.log(np.exp(exact).sum())
    threshold = np.partition(exact, len(exact) - count)[len(exact) - count]
    candidates = np.flatnonzero(exact >= threshold)
    order = candidates[np.argsort(-exact[candidates], kind="stable")][:count]
    return tuple((int(i), float(exact[i] - log_sum)) for i in order)
