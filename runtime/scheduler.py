"""Continuous batching: which requests run in the next step, and in which bucket.

The rule:

1. Waiting requests are admitted in order (priority, then arrival) while a state slot and pages for
   their tokens are free, with a few pages to spare for those that run. What is there of a prompt is
   used again; see `cache/state.py`.
2. Prefill and decode steps take turns when there is work for both.
3. A prefill step takes prompt chunks in order. The bucket is the smallest that holds all tokens
   left, or the largest there is; a chunk is as long as fits, and ends where a snapshot is planned.
4. A decode step takes all running requests in the smallest bucket that holds them. When the largest
   is too small, those that waited longest go first (round robin).
5. A running request that needs a page when none is free takes those of the request that goes last:
   that one waits, and starts again with what is still there of its tokens, generated ones too.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from k3c.artifact import Bucket, Phase
from k3c.errors import ArtifactError
from k3c.runtime.cache.prefix import PrefixCache
from k3c.runtime.cache.state import State
from k3c.runtime.request import Request


@dataclass(frozen=True)
class Step:
    """One run of one bucket: each request with how many of its tokens go through the model."""

    bucket: Bucket
    chunks: tuple[tuple[Request, int], ...]


def buckets_of(buckets: Iterable[Bucket], phase: Phase) -> list[Bucket]:
    """Return the buckets of a phase, fewest rows first.

    Raises:
        ArtifactError: There is none.
    """
    found = sorted((b for b in buckets if b.phase == phase), key=lambda b: b.dims["T"])
    if not found:
        raise ArtifactError(f"the artifact has no {phase} bucket", hint="compile again")
    return found


def smallest_holding(buckets: Sequence[Bucket], rows: int) -> Bucket:
    """Return the first bucket with at least `rows` rows, or the largest."""
    return next((b for b in buckets if b.dims["T"] >= rows), buckets[-1])


def pack_chunks(
    requests: Iterable[Request], buckets: Sequence[Bucket], max_chunk_tokens: int
) -> Step:
    """Fill one bucket with prompt chunks.

    Args:
        requests: Requests with pending tokens, in order; at least one.
        buckets: Buckets of one phase, fewest rows first.
        max_chunk_tokens: Tokens of one request in one step at most.
    """
    left = [(r, min(r.chunk_tokens, max_chunk_tokens)) for r in requests]
    bucket = smallest_holding(buckets, sum(tokens for _, tokens in left))
    room, chunks = bucket.dims["T"], []
    for request, tokens in left[: bucket.dims["B"]]:
        if room == 0:
            break
        chunks.append((request, min(tokens, room)))
        room -= chunks[-1][1]
    return Step(bucket, tuple(chunks))


class Scheduler:
    """Holds the requests in three queues: waiting, prefilling, running."""

    def __init__(
        self,
        buckets: Iterable[Bucket],
        state: State,
        prefix: PrefixCache,
        max_chunk_tokens: int | None = None,
    ) -> None:
        """Start empty.

        Args:
            buckets: All buckets of the artifact.
            state: Gives slots and pages to admitted requests; the scheduler allocates and frees.
            prefix: Finds and keeps what can be used again.
            max_chunk_tokens: Longest prefill chunk of one request; None: as long as the bucket.

        Raises:
            ArtifactError: There is no decode or no prefill bucket.
        """
        buckets = tuple(buckets)
        self._decode = buckets_of(buckets, "decode")
        self._prefill = buckets_of(buckets, "prefill")
        self._max_chunk_tokens = max_chunk_tokens or self._prefill[-1].dims["T"]
        self._state, self._prefix = state, prefix
        self._waiting: list[Request] = []
        self._prefilling: list[Request] = []
        self._running: deque[Request] = deque()
        self._prefilled_last = False
        self.preemptions = 0
        # The step that may repeat, found once while no queue changes, and until when.
        self._repeated: Step | None = None
        self._repeat_until = -1

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._waiting or self._prefilling or self._running)

    def counts(self) -> dict[str, int]:
        """Return how many requests are waiting, prefilling and running."""
        queues = (self._waiting, self._prefilling, self._running)
        return dict(zip(("waiting", "prefilling", "running"), map(len, queues), strict=True))

    def submit(self, request: Request) -> None:
        """Put a request among the waiting ones."""
        bisect.insort(self._waiting, request, key=lambda r: r.order)
        self._repeated = None

    def next_step(self) -> Step | None:
        """Admit what fits and choose the next step; None when nothing can run."""
        self._admit()
        decode_turn = self._prefilled_last or not self._prefilling
        self._prefilled_last = False
        if self._running and decode_turn:
            step = self._decode_step()
            if step is not None:
                return step
        if not self._prefilling:
            return None
        self._prefilled_last = True
        return pack_chunks(self._prefilling, self._prefill, self._max_chunk_tokens)

    def repeats(self, step: Step) -> bool:
        """Whether the next step has the same requests in the same rows, whatever this one gives.

        A stop token cannot be foreseen: it wastes the step after it.

        Args:
            step: A step that is under way, not counted by `advance` yet.
        """
        if step.bucket.phase != "decode":
            return False
        if step is not self._repeated:
            self._repeated, self._repeat_until = step, self._last_repeat(step)
        # All its requests have given equally many tokens since, so one of them tells.
        return len(step.chunks[0][0].output) <= self._repeat_until

    def _last_repeat(self, step: Step) -> int:
        """Return how many tokens the step's first request has when it repeats for the last time."""
        fixed = not self._prefilling and len(step.chunks) == len(self._running)
        if not fixed or (self._waiting and self._fits(self._waiting[0])):
            return -1
        pairs = zip(step.chunks, self._running, strict=True)
        if not all(chunk[0] is request for chunk, request in pairs):
            return -1
        return len(self._running[0].output) + min(map(self._tokens_to_come, self._running)) - 2

    def _tokens_to_come(self, request: Request) -> int:
        """Return how many tokens a request gives before it changes the batch or has to be read."""
        if request.options.needs_logits:
            return 0
        room = self._state.room(request.id) - request.context_tokens
        return min(request.options.max_tokens - len(request.output), room)

    def advance(self, step: Step) -> None:
        """Count a step's tokens as state; requests whose tokens are all through start to run."""
        decodes = step.bucket.phase == "decode"
        for request, tokens in step.chunks:
            if not self._state.owns(request.id):
                continue  # it was removed while the step was under way
            request.context_tokens += tokens
            if decodes:
                if self._prefix.fills_unit(request):
                    self._prefix.written(request)
                continue
            self._prefix.written(request)
            if request.pending_tokens == 0:
                self._prefilling.remove(request)
                self._running.append(request)
                self._extend_ahead(request)
                self._repeated = None

    def remove(self, request: Request) -> None:
        """Forget a request, finished or not; frees its slot and pages."""
        self._repeated = None
        if request in self._waiting:
            self._waiting.remove(request)
            return
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """Take slot and pages from a request that has them."""
        if request in self._running:
            self._running.remove(request)
        else:
            self._prefilling.remove(request)
        self._state.free(request.id)

    def _admit(self) -> None:
        """Move waiting requests on while slots and pages are free; none overtakes another."""
        while self._waiting and self._ready(self._waiting[0]):
            request, self._repeated = self._waiting.pop(0), None
            self._prefix.start(request)
            bisect.insort(self._prefilling, request, key=lambda r: r.order)

    def _ready(self, request: Request) -> bool:
        """Whether a request's state fits, and the one whose prompt it shares is through."""
        after = request.options.after
        held = after is not None and any(
            r.id == after and r.pending_tokens for r in (*self._waiting, *self._prefilling)
        )
        return not held and self._fits(request)

    def _fits(self, request: Request) -> bool:
        # Those that run need a page each, sooner or later; without any, all pages are for this one.
        spare = len(self._running) if self._running or self._prefilling else 0
        return self._prefix.fits(request, spare)

    def _decode_step(self) -> Step | None:
        """Choose a decode step; None where every running request had to give its pages away."""
        while self._running:
            bucket = smallest_holding(self._decode, len(self._running))
            count = min(len(self._running), bucket.dims["B"])
            chosen = [self._running[i] for i in range(count)]
            if not all(self._has_room(request) for request in chosen):
                continue
            if count < len(self._running):
                self._running.rotate(-count)
                self._repeated = None
            return Step(bucket, tuple((request, 1) for request in chosen))
        return None

    def _has_room(self, request: Request) -> bool:
        """Give a running request a page for its next token; False: another one had to leave."""
        if request.context_tokens < self._state.room(request.id):
            return True
        if self._state.free_pages:
            self._state.extend(request.id, request.context_tokens + 1)
            self._extend_ahead(request)
            return True
        last = max((*self._running, *self._prefilling), key=lambda r: r.order)
        self._preempt(last)
        return False

    def _extend_ahead(self, request: Request) -> None:
        """Give a running request pages for many tokens while nobody else needs them."""
        if self._state.has_pages(request.id, request.tokens_ahead, len(self._running)):
            self._state.extend(request.id, request.tokens_ahead)

    def _preempt(self, request: Request) -> None:
        """Send a request back to wait; it keeps its tokens and loses its state."""
        self._leave(request)
        request.context_tokens = 0
        self.preemptions += 1
        self.submit(request)
