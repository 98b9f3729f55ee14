"""From logits to a token or to a token's log probability."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3c.export.ops.registry import define, internal

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

# The token of a row whose logits are a fault of the step: no vocabulary has it.
BROKEN_ROW = -1


def counter_uniform(seed: int, position: int) -> float:
    """Return u in [0, 1), a pure function of (seed, position), exact in float32.

    splitmix64 of z = seed * 0x9E3779B97F4A7C15 + position (mod 2^64, two's complement):
    z += 0x9E3779B97F4A7C15; z = (z ^ z>>30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z>>27) * 0x94D049BB133111EB; z ^= z>>31; u = (z >> 40) / 2^24.
    """
    z = (seed * _GOLDEN + position + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 40) / 2.0**24


@dataclass(frozen=True)
class SamplingRow:
    """The sampling parameters of one row."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float


def _kept_masses(e: Tensor, row: SamplingRow) -> Tensor:
    """Zero the entries of e f32[V] (largest 1) that top-k, top-p and min-p exclude."""
    if 0 < row.top_k < e.shape[0]:
        threshold = e.topk(row.top_k).values[-1]
        e = torch.where(e >= threshold, e, 0.0)
    if row.top_p < 1.0:
        ordered = e.sort(descending=True).values
        mass = ordered.double().cumsum(0)
        count = int((mass < row.top_p * mass[-1]).sum())
        e = torch.where(e >= ordered[min(count, e.shape[0] - 1)], e, 0.0)
    return torch.where(e >= row.min_p, e, 0.0) if row.min_p > 0 else e


def sample_row(logits: Tensor, row: SamplingRow) -> int:
    """Return the token for one row of logits f32[V]; `sample` states the rule."""
    best = logits.max()  # NaN where any logit is
    if not torch.isfinite(best):
        return BROKEN_ROW
    if row.temperature <= 0:
        return int((logits == best).nonzero()[0])
    e = _kept_masses(torch.exp((logits - best) / row.temperature), row)
    cumulative = e.double().cumsum(0)
    above = (cumulative > row.uniform * cumulative[-1]).nonzero()
    return int(above[0] if len(above) else e.nonzero()[-1])


@define(
    "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed,"
    " Tensor position) -> Tensor",
    lambda logits, *rest: logits.new_empty((logits.shape[0],), dtype=torch.int32),
)
def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    seed: Tensor, position: Tensor,
) -> Tensor:  # fmt: skip
    """Choose one token a row; float32 unless said, every row on its own.

    temperature <= 0 is greedy: the lowest index among the largest logits. Otherwise, with
    e_v = exp((logit_v - max) / temperature), unnormalised so that the largest is 1:
    1. top-k (0: off): keep e_v >= the k-th largest e. 2. top-p (>= 1: off): keep the smallest set
    {e_v >= t} with mass >= top_p * (mass kept so far), at least the largest. 3. min-p (0: off):
    keep e_v >= min_p. Values equal to a threshold are all kept. 4. With u = counter_uniform(seed,
    position) and M the mass kept: the first index in ascending order whose cumulative kept mass
    exceeds u * M; if rounding leaves none, the last kept index. Sums may run in any order of at
    least float32 accuracy (float64 here): a choice differs only within rounding of a boundary.
    A row that holds a NaN, or whose largest logit is not finite, gives -1: it is a fault of the
    step, not an answer, and the caller fails that request alone.

    Args:
        logits: f32[B, V].
        temperature: f32[B].
        top_k: i32[B].
        top_p: f32[B].
        min_p: f32[B].
        seed: i64[B].
        position: i32[B], the output token's index in its request.

    Returns:
        tokens i32[B].
    """
    parameters = zip(
        temperature.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True
    )
    uniforms = map(counter_uniform, seed.tolist(), position.tolist())
    rows = [SamplingRow(*p, uniform=u) for p, u in zip(parameters, uniforms, strict=True)]
    tokens = [sample_row(x, row) for x, row in zip(logits.float(), rows, strict=True)]
    return torch.tensor(tokens, dtype=torch.int32, device=logits.device)


@define(
    "(Tensor logits, Tensor targets) -> Tensor",
    lambda logits, targets: logits.new_empty((logits.shape[0],)),
)
def token_logprob(logits: Tensor, targets: Tensor) -> Tensor:
    """Return log softmax(logits f32[T, V]) at targets i32[T] as f32[T]; 0 where a target is < 0."""
    chosen = targets.clamp(min=0).long()[:, None]
    logprobs = torch.log_softmax(internal(logits), -1).gather(-1, chosen)[:, 0]
    return torch.where(targets >= 0, logprobs, 0.0)
