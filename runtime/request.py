"""A request: what was asked for, checked before it is queued, and how far it has come."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from k3c.artifact import Manifest
from k3c.errors import ConfigError

SEED_LIMIT = 2**63  # seeds are i64


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the likeliest tokens up to this mass, in (0, 1].
        min_p: Drop tokens below this share of the likeliest one's probability, in [0, 1].
        seed: Key of the random numbers, with the token's position. None derives it from the request
            id, which counts up from 0: a program run again repeats its text, and equal prompts of
            one batch differ.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling` as keyword arguments."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None


@dataclass(frozen=True)
class RequestOptions:
    """Everything of a request but its prompt.

    Attributes:
        max_tokens: Tokens to generate at most, the stop token included.
        sampling: How tokens are chosen.
        top_logprobs: Likeliest tokens to report with every generated one.
        stop_ids: Tokens that end the request.
    """

    max_tokens: int
    sampling: Sampling
    top_logprobs: int
    stop_ids: frozenset[int]


@dataclass(eq=False)
class Request:
    """A checked request and its progress. Compared by identity.

    Attributes:
        id: The engine's name for it.
        prompt: i32[prompt tokens].
        options: What was asked for.
        output: Tokens generated so far.
        context_tokens: Tokens whose state is in the request's slot and pages.
    """

    id: int
    prompt: npt.NDArray[np.int32]
    options: RequestOptions
    output: list[int] = field(default_factory=list)
    context_tokens: int = 0

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that have not been through the model."""
        return max(0, len(self.prompt) - self.context_tokens)

    @property
    def state_tokens(self) -> int:
        """Tokens that the state holds at the end: the last generated one is never fed back."""
        return len(self.prompt) + self.options.max_tokens - 1

    @property
    def seed(self) -> int:
        """The seed of its random numbers."""
        given = self.options.sampling.seed
        return self.id if given is None else given


def check_tokens(tokens: Iterable[int], vocab_size: int, where: str) -> npt.NDArray[np.int32]:
    """Return token ids as i32[n].

    Raises:
        ConfigError: The list is empty, an id is no integer or is outside the vocabulary.
    """
    ids = [_integer(token, "token id", where) for token in tokens]
    if not ids:
        raise ConfigError("no token ids, expected at least 1", where)
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"token id {token} at index {index} is outside the vocabulary of {vocab_size}",
                where,
                "use the tokenizer of this model",
            )
    return np.array(ids, np.int32)


def check_request(
    request_id: int, tokens: Iterable[int], options: RequestOptions, manifest: Manifest
) -> Request:
    """Build a request that the plan can hold.

    Raises:
        ConfigError: The prompt, the lengths or a sampling value cannot be served.
    """
    where = f"request {request_id}"
    vocab, cache = manifest.model.vocab_size, manifest.cache
    limit = min(cache.max_context_tokens, (cache.pages - 1) * cache.page_tokens)
    prompt = check_tokens(tokens, vocab, where)
    max_tokens = _in_range(options.max_tokens, "max_tokens", 1, limit, where)
    if len(prompt) + max_tokens > limit:
        raise ConfigError(
            f"{len(prompt)} prompt tokens + max_tokens {max_tokens} exceed the planned "
            f"{limit} tokens of a request",
            where,
            "shorten the prompt, lower max_tokens, or compile with a larger --max-model-len",
        )
    _in_range(options.top_logprobs, "top_logprobs", 0, vocab, where)
    _check_sampling(options.sampling, where)
    return Request(request_id, prompt, options)


def _check_sampling(sampling: Sampling, where: str) -> None:
    """Refuse sampling values that mean nothing."""
    _check_real(sampling.temperature, "temperature", sampling.temperature >= 0, "0 or more", where)
    _check_real(sampling.top_p, "top_p", 0 < sampling.top_p <= 1, "in (0, 1]", where)
    _check_real(sampling.min_p, "min_p", 0 <= sampling.min_p <= 1, "in [0, 1]", where)
    _in_range(sampling.top_k, "top_k", 0, 2**31 - 1, where)
    if sampling.seed is not None:
        _in_range(sampling.seed, "seed", -SEED_LIMIT, SEED_LIMIT - 1, where)


def _check_real(value: float, name: str, ok: bool, expected: str, where: str) -> None:
    if not ok or not math.isfinite(value):
        raise ConfigError(f"{name} is {value}, expected {expected}", where)


def _in_range(value: int, name: str, low: int, high: int, where: str) -> int:
    number = _integer(value, name, where)
    if not low <= number <= high:
        raise ConfigError(f"{name} is {number}, expected {low}..{high}", where)
    return number


def _integer(value: object, name: str, where: str) -> int:
    try:
        # True is 1 to Python, but in a list of ids it is a mistake.
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise ConfigError(f"{name} {value!r} is {type(value).__name__}, expected an integer", where)
