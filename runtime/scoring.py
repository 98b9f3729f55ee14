"""Scoring: the log probability of every token of a list, given the tokens before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from k3c.artifact import Bucket
from k3c.errors import CapacityError
from k3c.runtime.cache.state import State
from k3c.runtime.request import Request
from k3c.runtime.scheduler import Step, pack_chunks

RunStep = Callable[[Step], Mapping[str, npt.NDArray]]  # runs a step and returns its io fields


class Scorer:
    """Sends lists through the score buckets, several at a time, in chunks."""

    def __init__(
        self, buckets: Sequence[Bucket], state: State, run: RunStep, max_chunk_tokens: int | None
    ) -> None:
        """Start empty.

        Args:
            buckets: The score buckets, fewest rows first.
            state: Gives slots and pages while a list is under way; all are free again at the end.
            run: Runs one step.
            max_chunk_tokens: Longest chunk of one list; None: as long as the bucket.
        """
        self._buckets, self._state, self._run = buckets, state, run
        self._max_chunk_tokens = max_chunk_tokens or buckets[-1].dims["T"]
        self._logprobs: dict[int, npt.NDArray[np.float32]] = {}
        self._active: deque[Request] = deque()

    def score(self, requests: Sequence[Request]) -> list[npt.NDArray[np.float32]]:
        """Return f32[tokens - 1] per request: natural log probabilities of its tokens 1 and up.

        Raises:
            CapacityError: Other requests hold all slots or pages.
        """
        waiting = deque(requests)
        try:
            while waiting or self._active:
                self._admit(waiting)
                self._step()
        finally:
            for request in self._active:
                self._state.free(request.id)
            self._active.clear()
        return [self._logprobs.pop(request.id)[:-1] for request in requests]

    def _admit(self, waiting: deque[Request]) -> None:
        while waiting and self._state.fits(len(waiting[0].prompt)):
            request = waiting.popleft()
            self._state.alloc(request.id, len(request.prompt))
            self._logprobs[request.id] = np.empty(len(request.prompt), np.float32)
            self._active.append(request)
        if not self._active:
            what = "running requests hold all slots or pages"
            raise CapacityError(what, "score", "finish them first")

    def _step(self) -> None:
        step = pack_chunks(self._active, self._buckets, self._max_chunk_tokens)
        logprobs, row = self._run(step)["logprobs"], 0
        for request, tokens in step.chunks:
            first = request.context_tokens
            self._logprobs[request.id][first : first + tokens] = logprobs[row : row + tokens]
            request.context_tokens += tokens
            row += tokens
            if request.pending_tokens == 0:
                self._active.remove(request)
                self._state.free(request.id)
