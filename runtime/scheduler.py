"""Continuous batching: which requests run in the next step, and in which bucket.

The rule, first come first served throughout:

1. Waiting requests are admitted in order while a state slot and pages for their whole length are
   free, so an admitted request never has to give anything back.
2. Prefill and decode steps take turns when there is work for both.
3. A prefill step takes prompt chunks in order of arrival. The bucket is the smallest that holds all
   prompt tokens left, or the largest there is; a chunk is as long as fits.
4. A decode step takes all running requests in the smallest bucket that holds them. When the largest
   is too small, those that waited longest go first (round robin).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from k3c.artifact import Bucket, Phase
from k3c.errors import ArtifactError
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
        requests: Requests with prompt tokens left, in order of arrival; at least one.
        buckets: Buckets of one phase, fewest rows first.
        max_chunk_tokens: Tokens of one request in one step at most.
    """
    left = [(r, min(r.prompt_left, max_chunk_tokens)) for r in requests]
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
        self, buckets: Iterable[Bucket], state: State, max_chunk_tokens: int | None = None
    ) -> None:
        """Start empty.

        Args:
            buckets: All buckets of the artifact.
            state: Gives slots and pages to admitted requests; the scheduler allocates and frees.
            max_chunk_tokens: Longest prefill chunk of one request; None: as long as the bucket.

        Raises:
            ArtifactError: There is no decode or no prefill bucket.
        """
        buckets = tuple(buckets)
        self._decode = buckets_of(buckets, "decode")
        self._prefill = buckets_of(buckets, "prefill")
        self._max_chunk_tokens = max_chunk_tokens or self._prefill[-1].dims["T"]
        self._state = state
        self._waiting: deque[Request] = deque()
        self._prefilling: deque[Request] = deque()
        self._running: deque[Request] = deque()
        self._prefilled_last = False
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
        """Put a request at the end of the waiting queue."""
        self._waiting.append(request)
        self._repeated = None

    def next_step(self) -> Step | None:
        """Admit what fits and choose the next step; None when nothing can run."""
        self._admit()
        decode_turn = self._prefilled_last or not self._prefilling
        self._prefilled_last = False
        if self._running and decode_turn:
            return self._decode_step()
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
        if not fixed or (self._waiting and self._state.fits(self._waiting[0].state_tokens)):
            return -1
        pairs = zip(step.chunks, self._running, strict=True)
        if not all(chunk[0] is request for chunk, request in pairs):
            return -1
        return len(self._running[0].output) + min(map(self._tokens_to_come, self._running)) - 2

    def _tokens_to_come(self, request: Request) -> int:
        """Return how many tokens a request gives before it changes the batch or has to be read."""
        if request.options.top_logprobs:
            return 0
        room = self._state.room(request.id) - request.context_tokens
        return min(request.options.max_tokens - len(request.output), room)

    def advance(self, step: Step) -> None:
        """Count a step's tokens as state; requests whose prompt is through start to run."""
        if step.bucket.phase == "decode":
            for request, tokens in step.chunks:
                request.context_tokens += tokens
            return
        for request, tokens in step.chunks:
            request.context_tokens += tokens
            if request.prompt_left == 0:
                self._prefilling.remove(request)
                self._running.append(request)
                self._repeated = None

    def remove(self, request: Request) -> None:
        """Forget a request, finished or not; frees its slot and pages."""
        self._repeated = None
        if request in self._waiting:
            self._waiting.remove(request)
            return
        queue = self._running if request in self._running else self._prefilling
        queue.remove(request)
        self._state.free(request.id)

    def _admit(self) -> None:
        """Move waiting requests on while their slot and pages are free; none overtakes another."""
        while self._waiting and self._state.fits(self._waiting[0].state_tokens):
            request, self._repeated = self._waiting.popleft(), None
            self._state.alloc(request.id, request.state_tokens)
            self._prefilling.append(request)

    def _decode_step(self) -> Step:
        bucket = smallest_holding(self._decode, len(self._running))
        count = min(len(self._running), bucket.dims["B"])
        chosen = [self._running[i] for i in range(count)]
        if count < len(self._running):
            self._running.rotate(-count)
            self._repeated = None
        return Step(bucket, tuple((request, 1) for request in chosen))
