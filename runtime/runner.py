"""Starts and finishes steps. Two may be under way: the second is started before the first is read.

A decode bucket whose plan has an `advance` command leaves on the device what its next step needs:
the new token as input, one more token of context. A step that has the same requests in the same
rows needs no input from the host, and can start before the tokens of the one before are known.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy.typing as npt

from k3c.errors import DeviceFault
from k3c.runtime.cache.state import State
from k3c.runtime.loader import Loaded, LoadedBucket
from k3c.runtime.scheduler import Step

Fields = Mapping[str, npt.NDArray]


@dataclass(frozen=True)
class _Started:
    """A step that is under way."""

    step: Step
    bucket: LoadedBucket
    start_s: float


class Runner:
    """The steps of an engine on its device."""

    def __init__(self, loaded: Loaded, state: State) -> None:
        """Start with no step under way.

        Args:
            loaded: The artifact.
            state: Where requests have their slots and pages; not changed.
        """
        self._loaded, self._state = loaded, state
        self._under_way: deque[_Started] = deque()
        # What the device holds: the last step that was started, and the page tables of then.
        self._last: Step | None = None
        self._last_changes = 0
        self._finished_s = 0.0
        self._fault: DeviceFault | None = None
        self.times = {name: {"steps": 0, "tokens": 0, "seconds": 0.0} for name in loaded.buckets}

    @property
    def oldest(self) -> Step | None:
        """The step under way that was started first; None when there is none."""
        return self._under_way[0].step if self._under_way else None

    @property
    def can_run_ahead(self) -> bool:
        """Whether exactly one step is under way, and its next needs no input from the host."""
        return len(self._under_way) == 1 and self._continues(self._under_way[0].step)

    def start(self, step: Step) -> None:
        """Start a step; its input is filled and sent unless the device has it already.

        Raises:
            DeviceFault: A launch failed, now or earlier.
        """
        self._under_way.append(self._start(step))

    def finish(self) -> Fields:
        """Wait for the oldest step and return its output fields.

        Raises:
            DeviceFault: The device failed.
        """
        return self._finish(self._under_way.popleft())

    def run(self, step: Step) -> Fields:
        """Run a step to its end, after those under way, which stay to be finished.

        Raises:
            DeviceFault: A launch failed, now or earlier.
        """
        return self._finish(self._start(step))

    def _start(self, step: Step) -> _Started:
        if self._fault is not None:
            raise DeviceFault(f"stopped by an earlier fault: {self._fault}", hint="load again")
        bucket = self._loaded.buckets[step.bucket.name]
        started = _Started(step, bucket, time.perf_counter())
        upload = not self._continues(step)
        if upload:
            bucket.io.fill(step, self._state)
        self._last = None
        try:
            bucket.executor.start(upload)
        except DeviceFault as fault:
            self._fault = fault
            raise
        self._last, self._last_changes = step, self._state.changes
        return started

    def _finish(self, started: _Started) -> Fields:
        try:
            fields = started.bucket.executor.finish()
        except DeviceFault as fault:
            self._fault = fault
            raise
        now_s, times = time.perf_counter(), self.times[started.step.bucket.name]
        times["steps"] += 1
        times["tokens"] += sum(tokens for _, tokens in started.step.chunks)
        # Two steps overlap: the second counts from the end of the first.
        times["seconds"] += now_s - max(started.start_s, self._finished_s)
        self._finished_s = now_s
        return fields

    def _continues(self, step: Step) -> bool:
        """Whether the device holds the input of a step: the last one had the same rows."""
        last = self._last
        if last is None or not self._loaded.runs_ahead or last.bucket.name != step.bucket.name:
            return False
        if self._last_changes != self._state.changes:
            return False
        return self._loaded.buckets[step.bucket.name].io.advances and last.chunks == step.chunks
