"""What the engine tells its caller: an event per generated token, a result per request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "error"]
TopLogprobs = tuple[tuple[int, float], ...]  # (token id, natural log probability), likeliest first


@dataclass(frozen=True)
class Event:
    """One generated token of one request.

    Attributes:
        request_id: The request, as `Engine.add` named it.
        token_id: The token; None where `finish_reason` is "error" (the model gave NaN: no token).
        finish_reason: Set on the last event of a request: "stop" (the token is a stop token),
            "length" (the request has its `max_tokens`), "error".
        top_logprobs: As many of the likeliest tokens as the request asked for.
        logprob: The token's natural log probability, where the request asked for it.
        cached_tokens: Prompt tokens that did not go through the model; on the first event.
    """

    request_id: int
    token_id: int | None
    finish_reason: FinishReason | None = None
    top_logprobs: TopLogprobs = ()
    logprob: float | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True)
class Result:
    """A finished request: its prompt, what was generated (with the stop token) and why it ended."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    top_logprobs: tuple[TopLogprobs, ...]
