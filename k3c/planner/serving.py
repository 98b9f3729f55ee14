"""What users see: time to the first token, time per token and rates, from estimates of steps.

A speculative step needs its acceptance length as an input: no model here predicts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k3c.planner.estimate import StepEstimate


@dataclass(frozen=True)
class Range:
    """A predicted number with its error bar: low <= value <= high."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Wave:
    """How a deployment is used: requests that come together, each with a prompt and an answer.

    Attributes:
        requests: Requests that decode together, of one data-parallel rank.
        output_tokens: Tokens generated for each.
        ranks: Ranks of the deployment.
        data_ranks: Data-parallel ranks, each with requests of its own.
        accepted: Tokens that a step gives a request in the mean: 1, or with speculation what the
            caller states.
    """

    requests: int
    output_tokens: int
    ranks: int
    data_ranks: int = 1
    accepted: float = 1.0


@dataclass(frozen=True)
class Served:
    """Predicted times and rates.

    Attributes:
        ttft_us: Time to the first token of a prompt on an idle deployment.
        tpot_us: Mean time per further token of a request, prompts of the others included.
        user: Tokens per second of a user: one token in each `tpot_us`.
        gpu: Output tokens per second and rank while all requests decode.
    """

    ttft_us: Range
    tpot_us: Range
    user: Range
    gpu: Range


def serve(decode: StepEstimate, prompt: Sequence[StepEstimate], wave: Wave) -> Served:
    """Return what users see.

    Prompts are prefilled one after another before decoding goes on, so that a request waits in the
    mean for half of the other prompts of its wave while it decodes.

    Args:
        decode: A step with all requests of the wave (a draft's steps included, if there is one).
        prompt: The steps of one prompt: its chunks in order.
        wave: The requests.
    """
    ttft = Range(*(sum(getattr(s, f) for s in prompt) for f in ("us", "low_us", "high_us")))
    waits = (wave.requests - 1) / 2 / max(1, wave.output_tokens - 1)
    tpot = Range(
        decode.us / wave.accepted + waits * ttft.value,
        decode.low_us / wave.accepted + waits * ttft.low,
        decode.high_us / wave.accepted + waits * ttft.high,
    )
    together = wave.requests * wave.data_ranks / wave.ranks
    return Served(ttft, tpot, _rate(tpot, 1.0), _rate(tpot, together))


def _rate(time_us: Range, tokens: float) -> Range:
    """Return tokens per second; the longer time is the lower end."""
    return Range(*(tokens * 1e6 / us for us in (time_us.value, time_us.high, time_us.low)))
