"""Chooses a token on the host, for requests whose logits are changed or constrained first.

The rule is the sampling kernel's, on the same random numbers; only what it chooses from differs.

Source: the docstrings of `k3c:sample` (the rule) and of its random numbers (splitmix64).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3c.runtime.request import Adjustments, Request, Sampling

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
BROKEN = -1  # the row's logits are a fault of the step

Logits = npt.NDArray[np.float32]


def choose(logits: Logits, request: Request) -> int:
    """Return a request's next token, -1 where its logits hold a NaN.

    Args:
        logits: f32[V], raw; not changed.
        request: Its adjustments, constraint, sampling and position.
    """
    if np.isnan(logits).any():
        return BROKEN
    adjusted = adjust(logits, request)
    position = request.total_tokens
    return sample(adjusted, request.options.sampling, uniform(request.seed, position))


def adjust(logits: Logits, request: Request) -> Logits:
    """Return f32[V]: the logits after penalties, biases and masks; what is masked is -inf."""
    options, found = request.options, logits.astype(np.float32)
    _penalise(found, options.adjustments, request)
    for token, bias in options.adjustments.logit_bias.items():
        found[token] += bias
    allowed = np.ones(len(found), np.bool_)
    if options.adjustments.allowed:
        allowed[:] = False
        allowed[list(options.adjustments.allowed)] = True
    if options.constraint is not None:
        allowed &= options.constraint.mask()
    allowed[list(options.adjustments.forbidden)] = False
    if len(request.output) < options.adjustments.min_tokens:
        allowed[list(options.stop_ids)] = False
    found[~allowed] = -np.inf
    return found


def _penalise(logits: Logits, adjustments: Adjustments, request: Request) -> None:
    if adjustments.repetition_penalty != 1.0:
        seen = np.unique(request.tokens(0, request.total_tokens))
        penalty = np.float32(adjustments.repetition_penalty)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    if request.output and (adjustments.presence_penalty or adjustments.frequency_penalty):
        tokens, counts = np.unique(np.array(request.output, np.int32), return_counts=True)
        logits[tokens] -= adjustments.presence_penalty
        logits[tokens] -= np.float32(adjustments.frequency_penalty) * counts.astype(np.float32)


def sample(logits: Logits, sampling: Sampling, at: float) -> int:
    """Return the token of one row.

    Args:
        logits: f32[V]; -inf is never chosen.
        sampling: How to choose.
        at: A number in [0, 1).

    Returns:
        The token, -1 where nothing may be chosen.
    """
    best = logits.max()
    if not np.isfinite(best):
        return BROKEN
    if sampling.temperature <= 0:
        return int(np.argmax(logits))
    masses = np.exp((logits - best) / np.float32(sampling.temperature))
    masses = _kept(masses, sampling)
    cumulative = np.cumsum(masses, dtype=np.float64)
    above = np.flatnonzero(cumulative > at * cumulative[-1])
    return int(above[0]) if len(above) else int(np.flatnonzero(masses)[-1])


def _kept(masses: Logits, sampling: Sampling) -> Logits:
    """Zero what top-k, top-p and min-p exclude; values equal to a threshold are kept."""
    if 0 < sampling.top_k < len(masses):
        threshold = np.partition(masses, len(masses) - sampling.top_k)[len(masses) - sampling.top_k]
        masses = np.where(masses >= threshold, masses, np.float32(0))
    if sampling.top_p < 1:
        ordered = np.sort(masses)[::-1]
        mass = np.cumsum(ordered, dtype=np.float64)
        count = int((mass < sampling.top_p * mass[-1]).sum())
        threshold = ordered[min(count, len(ordered) - 1)]
        masses = np.where(masses >= threshold, masses, np.float32(0))
    if sampling.min_p > 0:
        masses = np.where(masses >= np.float32(sampling.min_p), masses, np.float32(0))
    return masses


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1), a pure function of seed and position."""
    z = (seed * _GOLDEN + position + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 40) / 2.0**24


def logprob(logits: Logits, token: int) -> float:
    """Return the natural log probability of a token by the raw logits, without temperature."""
    exact = logits.astype(np.float64)
    exact -= exact.max()
    return float(exact[token] - np.log(np.exp(exact).sum()))
