"""The engine: requests of token ids in, events of token ids out, several requests together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import numpy.typing as npt

from k3c.errors import ConfigError, K3CError
from k3c.runtime.cache.prefix import PrefixCache, PrefixOptions
from k3c.runtime.cache.state import State, Usage
from k3c.runtime.events import Event, FinishReason, Result
from k3c.runtime.host_sampler import choose, logprob
from k3c.runtime.loader import Loaded, LoadOptions, load_artifact
from k3c.runtime.request import (
    Request,
    RequestOptions,
    Sampling,
    SamplingOptions,
    check_request,
    check_tokens,
)
from k3c.runtime.runner import Runner
from k3c.runtime.sampler import top_logprobs
from k3c.runtime.scheduler import Scheduler, Step, buckets_of
from k3c.runtime.scoring import Scorer

if TYPE_CHECKING:
    from k3c.runtime.server.wire.tokenizer import Tokenizer

MAX_TOKENS = 128  # generated per request unless the caller says


class Engine:
    """Generates tokens from a loaded artifact. One thread drives it: `add`, then `step`."""

    def __init__(
        self,
        loaded: Loaded,
        max_chunk_tokens: int | None = None,
        prefix: PrefixOptions | None = None,
    ) -> None:
        """Start with no requests.

        Args:
            loaded: The artifact, from `load_artifact`.
            max_chunk_tokens: Longest prompt chunk of a request in a step; None: the bucket's rows.
            prefix: What is kept of requests for later ones.
        """
        self.manifest, self.directory = loaded.manifest, loaded.directory
        self._loaded, self._max_chunk_tokens = loaded, max_chunk_tokens
        plan, cache = next(iter(loaded.buckets.values())).plan, loaded.manifest.cache
        self.prefix_options = prefix or PrefixOptions()
        unit = self.prefix_options.unit(cache.page_tokens)
        self._state = State(cache, plan, loaded.memory, unit)
        self._prefix = PrefixCache(self._state, self.prefix_options)
        # Not the manifest's: the device may have refused one.
        self._buckets = tuple(bucket.plan.bucket for bucket in loaded.buckets.values())
        self._scheduler = Scheduler(self._buckets, self._state, self._prefix, max_chunk_tokens)
        self._runner = Runner(loaded, self._state)
        self._requests: dict[int, Request] = {}
        self._ids = itertools.count()
        self._tokenizer: Tokenizer | None = None

    @classmethod
    def open(
        cls,
        directory: str | Path,
        options: LoadOptions | None = None,
        max_chunk_tokens: int | None = None,
        prefix: PrefixOptions | None = None,
    ) -> Engine:
        """Load an artifact and return an engine on it.

        Args:
            directory: The artifact that `k3c compile` wrote.
            options: How to verify and run it.
            max_chunk_tokens: Longest prompt chunk of a request in a step; None: the bucket's rows.
            prefix: What is kept of requests for later ones.

        Raises:
            ArtifactError: The artifact is damaged, foreign, newer or for another machine.
            DeviceFault: This machine cannot load it.
        """
        loaded = load_artifact(Path(directory), options or LoadOptions())
        return cls(loaded, max_chunk_tokens, prefix)

    def close(self) -> None:
        """Give the device's memory back; the engine is of no use after that.

        Raises:
            DeviceFault: The device failed.
        """
        self._loaded.close()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.has_work

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, opened when first asked for; None when the model has none."""
        if self._tokenizer is None and self._loaded.tokenizer_folder is not None:
            from k3c.runtime.server.wire.tokenizer import Tokenizer

            self._tokenizer = Tokenizer.open(self._loaded.tokenizer_folder)
        return self._tokenizer

    @property
    def counters(self) -> dict[str, int]:
        """What has been counted since the start, by name, for metrics."""
        return {
            "prefix_queried_tokens": self._prefix.queried_tokens,
            "prefix_hit_tokens": self._prefix.hit_tokens,
            "snapshots_kept": self._prefix.snapshots_kept,
            "snapshots_missed": self._prefix.snapshots_missed,
            "preemptions": self._scheduler.preemptions,
        }

    @property
    def usage(self) -> Usage:
        """How full pages and slots are."""
        return self._state.usage

    @property
    def queues(self) -> dict[str, int]:
        """Requests that are waiting, prefilling and running."""
        return self._scheduler.counts()

    def forget_prefixes(self) -> None:
        """Drop what is kept of finished requests."""
        self._state.forget()

    @property
    def timings(self) -> dict[str, Any]:
        """Seconds of each load phase; steps, live tokens and seconds of each bucket so far."""
        buckets = {name: dict(times) for name, times in self._runner.times.items()}
        return {"load_s": dict(self._loaded.timings), "buckets": buckets}

    def add(
        self,
        prompt_token_ids: Iterable[int],
        max_tokens: int = MAX_TOKENS,
        *,
        top_logprobs: int = 0,
        stop_ids: Iterable[int] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> int:
        """Queue a request; it runs in later calls of `step`.

        Args:
            prompt_token_ids: The prompt; nothing is added to it.
            max_tokens: Tokens to generate at most, the stop token included.
            top_logprobs: Likeliest tokens to report with every generated one.
            stop_ids: Tokens that end the request; None: the model's own.
            sampling: Fields of `Sampling`; greedy when nothing is given.

        Returns:
            The request's id, counted up from 0.

        Raises:
            ConfigError: The request cannot be served; nothing is queued then.
        """
        unknown = sorted(sampling.keys() - SamplingOptions.__annotations__.keys())
        if unknown:
            raise ConfigError(f"unknown sampling option {unknown[0]}", "add")
        stops = self.manifest.model.stop_ids if stop_ids is None else stop_ids
        options = RequestOptions(max_tokens, Sampling(**sampling), top_logprobs, frozenset(stops))
        return self.submit(prompt_token_ids, options)

    def submit(self, prompt_token_ids: Iterable[int], options: RequestOptions) -> int:
        """Queue a request with everything that can be asked of it; see `add`.

        Raises:
            ConfigError: The request cannot be served; nothing is queued then.
        """
        request = self.prepare(prompt_token_ids, options)
        self.enqueue(request)
        return request.id

    def prepare(self, prompt_token_ids: Iterable[int], options: RequestOptions) -> Request:
        """Check a request and give it an id; safe in any thread, and changes nothing else.

        Raises:
            ConfigError: The request cannot be served.
        """
        return check_request(next(self._ids), prompt_token_ids, options, self.manifest)

    def enqueue(self, request: Request) -> None:
        """Queue a request that `prepare` made."""
        self._requests[request.id] = request
        self._scheduler.submit(request)

    def cancel(self, request_id: int) -> None:
        """Drop a request and free its state; no effect when it has finished."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._scheduler.remove(request)

    def step(self) -> list[Event]:
        """Return what the next step gives; where it can, the device has the one after it already.

        Returns:
            An event for each token that was generated; none when only a part of a prompt ran.

        Raises:
            DeviceFault: A launch failed; the engine is of no use after that.
        """
        step = self._oldest_step()
        if step is None:
            assert not self.has_work, "requests wait, none runs, and no state is free"
            return []
        if self._runner.can_run_ahead and self._scheduler.repeats(step):
            self._start(step)
        fields = self._runner.finish()
        # A request that ended since the step was started has no use for its token.
        live = [(i, r) for i, (r, _) in enumerate(step.chunks) if r.id in self._requests]
        self._scheduler.advance(step)
        return [
            self._finish_row(request, row, fields)
            for row, request in live
            if request.pending_tokens == 0
        ]

    def generate(
        self,
        prompts: Sequence[Iterable[int]],
        max_tokens: int = MAX_TOKENS,
        *,
        top_logprobs: int = 0,
        **sampling: Unpack[SamplingOptions],
    ) -> list[Result]:
        """Run prompts together to their ends; the arguments are those of `add`.

        Raises:
            ConfigError: A prompt cannot be served (none has run then), or requests that were added
                before are unfinished: their events would be lost.
            DeviceFault: A launch failed.
        """
        if self.has_work:
            raise ConfigError(f"{len(self._requests)} requests are unfinished", "generate")
        ids: list[int] = []
        try:
            for prompt in prompts:
                ids.append(self.add(prompt, max_tokens, top_logprobs=top_logprobs, **sampling))
        except K3CError:
            for request_id in ids:
                self.cancel(request_id)
            raise
        requests = [self._requests[request_id] for request_id in ids]
        events: dict[int, list[Event]] = {request_id: [] for request_id in ids}
        while self.has_work:
            for event in self.step():
                events[event.request_id].append(event)
        return [_result(request, events[request.id]) for request in requests]

    def score(self, token_lists: Sequence[Iterable[int]]) -> list[npt.NDArray[np.float32]]:
        """Return f32[tokens - 1] per list: natural log probabilities of its tokens 1 and up.

        A log probability is NaN where the model gave NaN.

        Raises:
            ConfigError: A list is empty, too long, or holds an id outside the vocabulary.
            CapacityError: Unfinished requests hold all slots or pages.
            DeviceFault: A launch failed.
        """
        buckets = buckets_of(self._buckets, "score")
        options = RequestOptions(1, Sampling(), 0, frozenset())
        requests, limit = [], self.manifest.cache.max_context_tokens
        for index, tokens in enumerate(token_lists):
            where = f"list {index}"
            ids = check_tokens(tokens, self.manifest.model.vocab_size, where)
            if len(ids) > limit:
                raise ConfigError(f"{len(ids)} tokens exceed the planned {limit}", where)
            # Negative ids: these requests share the state with those of `add`.
            requests.append(Request(-1 - index, ids, options))
        return Scorer(buckets, self._state, self._run, self._max_chunk_tokens).score(requests)

    def _oldest_step(self) -> Step | None:
        """Return the oldest step under way that anyone waits for; start one when there is none."""
        while (step := self._runner.oldest) is not None:
            if any(request.id in self._requests for request, _ in step.chunks):
                return step
            self._runner.finish()
        step = self._scheduler.next_step()
        if step is not None:
            self._start(step)
        return step

    def _start(self, step: Step) -> None:
        """Start a step."""
        self._runner.start(step)

    def _run(self, step: Step) -> Mapping[str, npt.NDArray]:
        """Run a step that gives no tokens to the end, and return its output fields."""
        return self._runner.run(step)

    def _finish_row(self, request: Request, row: int, fields: Mapping[str, npt.NDArray]) -> Event:
        """Take a request's new token; end the request when it is the last one."""
        token, options = int(fields["tokens"][row]), request.options
        chance, likeliest = None, ()
        first = None if request.output else request.cached_tokens
        if options.chosen_on_host:
            token = choose(fields["logits"][row], request)
        if 0 <= token < self.manifest.model.vocab_size:
            if options.logprobs:
                chance = logprob(fields["logits"][row], token)
            if options.top_logprobs:
                likeliest = top_logprobs(fields["logits"][row], options.top_logprobs)
            request.output.append(token)
            reason = _finish_reason(request, token)
            if options.constraint is not None and token not in options.stop_ids:
                accepted = options.constraint.accept(token)
                assert accepted, f"token {token} is in the mask and is not accepted"
        else:
            # The kernel's -1: NaN in one row is that request's end, not its neighbours'.
            token, reason = None, "error"
        if reason is not None:
            self.cancel(request.id)
        return Event(request.id, token, reason, likeliest, chance, first)


def _finish_reason(request: Request, token: int) -> FinishReason | None:
    if token in request.options.stop_ids:
        return "stop"
    return "length" if len(request.output) == request.options.max_tokens else None


def _result(request: Request, events: list[Event]) -> Result:
    reason = events[-1].finish_reason
    assert reason is not None, f"request {request.id} ended without a reason"
    likeliest = tuple(e.top_logprobs for e in events if e.token_id is not None)
    prompt = tuple(int(token) for token in request.prompt)
    return Result(prompt, tuple(request.output), reason, likeliest)
