"""A request: what was asked for, checked before it is queued, and how far it has come."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypedDict

import numpy as np
import numpy.typing as npt

from k3c.artifact import Manifest
from k3c.errors import ConfigError
from k3c.runtime.cache.hashing import HashChain

SEED_LIMIT = 2**63  # seeds are i64
AHEAD_TOKENS = 128


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


class Constraint(Protocol):
    """What an answer may look like; see `k3c.runtime.server.constraint`."""

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return bool[V]: which tokens may come next."""
        ...

    def accept(self, token: int) -> bool:
        """Go on by one token; False: it is not allowed."""
        ...


@dataclass(frozen=True)
class Adjustments:
    """What is done to a request's logits before a token is chosen, in this order.

    Attributes:
        repetition_penalty: Divides positive logits of tokens that were seen, multiplies others; 1:
            off.
        presence_penalty: Subtracted from the logits of tokens that were generated.
        frequency_penalty: Subtracted as often as a token was generated.
        logit_bias: Added, by token.
        allowed: Nothing else may be chosen; empty: everything.
        forbidden: May not be chosen.
        min_tokens: The stop tokens may not be chosen before as many tokens were generated.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed: frozenset[int] = frozenset()
    forbidden: frozenset[int] = frozenset()
    min_tokens: int = 0


NO_ADJUSTMENTS = Adjustments()


@dataclass(frozen=True)
class RequestOptions:
    """Everything of a request but its prompt.

    Attributes:
        max_tokens: Tokens to generate at most, the stop token included.
        sampling: How tokens are chosen.
        top_logprobs: Likeliest tokens to report with every generated one.
        stop_ids: Tokens that end the request.
        logprobs: Report the log probability of every generated token.
        adjustments: What is done to the logits first.
        constraint: What the answer may look like; it goes on with the answer.
        priority: Requests of a lower number go first, and are preempted last.
        salt: Keeps its state apart from that of requests with another salt.
        breakpoints: Positions in the prompt where others will go on from, as in a shared prefix.
        after: A request whose prompt must be through before this one starts, to share its state.
    """

    max_tokens: int
    sampling: Sampling
    top_logprobs: int
    stop_ids: frozenset[int]
    logprobs: bool = False
    adjustments: Adjustments = NO_ADJUSTMENTS
    constraint: Constraint | None = None
    priority: int = 0
    salt: bytes = b""
    breakpoints: tuple[int, ...] = ()
    after: int | None = None

    @cached_property
    def chosen_on_host(self) -> bool:
        """Whether the host chooses the tokens."""
        return self.constraint is not None or self.adjustments != NO_ADJUSTMENTS

    @cached_property
    def needs_logits(self) -> bool:
        """Whether the host must read the logits of every token."""
        return self.chosen_on_host or self.logprobs or self.top_logprobs > 0


@dataclass(eq=False)
class Request:
    """A checked request and its progress. Compared by identity.

    Attributes:
        id: The engine's name for it.
        prompt: i32[prompt tokens].
        options: What was asked for.
        output: Tokens generated so far.
        context_tokens: Tokens whose state is in the request's slot and pages.
        chain: Hashes of its tokens; None: nothing of it is kept.
        stops: Positions, ascending, where a prompt's chunk ends so that its state can be kept.
        cached_tokens: Tokens of the prompt that did not go through the model; None: not started.
    """

    id: int
    prompt: npt.NDArray[np.int32]
    options: RequestOptions
    output: list[int] = field(default_factory=list)
    context_tokens: int = 0
    chain: HashChain | None = None
    stops: tuple[int, ...] = ()
    cached_tokens: int | None = None

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def pending_tokens(self) -> int:
        """Tokens that have not been through the model; 0: the next one is due."""
        return self.total_tokens - self.context_tokens

    @property
    def chunk_tokens(self) -> int:
        """Pending tokens up to the next stop."""
        end = next((s for s in self.stops if s > self.context_tokens), self.total_tokens)
        return min(end, self.total_tokens) - self.context_tokens

    @property
    def state_tokens(self) -> int:
        """Tokens that the state holds at the end: the last generated one is never fed back."""
        return len(self.prompt) + self.options.max_tokens - 1

    @property
    def tokens_ahead(self) -> int:
        """Tokens to have pages for, where there are enough: each new page costs an upload."""
        return min(self.total_tokens + AHEAD_TOKENS, max(self.total_tokens, self.state_tokens))

    @property
    def seed(self) -> int:
        """The seed of its random numbers."""
        given = self.options.sampling.seed
        return self.id if given is None else given

    @property
    def order(self) -> tuple[int, int]:
        """What goes first: the lower priority number, then the earlier arrival."""
        return self.options.priority, self.id

    def tokens(self, first: int, last: int) -> npt.NDArray[np.int32]:
        """Return i32[last - first] of prompt and output."""
        length = len(self.prompt)
        if last <= length:
            return self.prompt[first:last]
        output = np.array(self.output[max(0, first - length) : last - length], np.int32)
        return np.concatenate((self.prompt[first:length], output))


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
    _check_adjustments(options.adjustments, vocab, where)
    _in_range(options.priority, "priority", -(2**31), 2**31 - 1, where)
    return Request(request_id, prompt, options)


def _check_sampling(sampling: Sampling, where: str) -> None:
    """Refuse sampling values that mean nothing."""
    _check_real(sampling.temperature, "temperature", sampling.temperature >= 0, "0 or more", where)
    _check_real(sampling.top_p, "top_p", 0 < sampling.top_p <= 1, "in (0, 1]", where)
    _check_real(sampling.min_p, "min_p", 0 <= sampling.min_p <= 1, "in [0, 1]", where)
    _in_range(sampling.top_k, "top_k", 0, 2**31 - 1, where)
    if sampling.seed is not None:
        _in_range(sampling.seed, "seed", -SEED_LIMIT, SEED_LIMIT - 1, where)


def _check_adjustments(adjust: Adjustments, vocab_size: int, where: str) -> None:
    """Refuse tokens outside the vocabulary and penalties that mean nothing."""
    listed = {*adjust.logit_bias, *adjust.allowed, *adjust.forbidden}
    wrong = sorted(token for token in listed if not 0 <= token < vocab_size)
    if wrong:
        what = f"token id {wrong[0]} is outside the vocabulary of {vocab_size}"
        raise ConfigError(what, f"{where}, logit_bias")
    for token, bias in adjust.logit_bias.items():
        _check_real(bias, f"logit_bias of {token}", abs(bias) <= 100, "-100..100", where)
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(adjust, name)
        _check_real(value, name, abs(value) <= 2, "-2..2", where)
    penalty = adjust.repetition_penalty
    _check_real(penalty, "repetition_penalty", 0 < penalty <= 10, "in (0, 10]", where)
    _in_range(adjust.min_tokens, "min_tokens", 0, 2**31 - 1, where)


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
