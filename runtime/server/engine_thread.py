"""The engine in a thread of its own, for servers and for anybody's serving loop.

Requests are checked where they are made and run in the thread; their events are handed to a
function of the caller. A step that hangs, or a device that failed, is seen from outside.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from k3c.errors import DeviceFault
from k3c.runtime.engine import Engine
from k3c.runtime.events import Event
from k3c.runtime.request import Request, RequestOptions

Deliver = Callable[[Event], None]
STUCK_S = 8.0  # a step that takes longer: the engine is not ready


@dataclass(frozen=True)
class _Cancel:
    request_id: int


class _Stop:
    """Ends the thread once nothing is left to do."""


class EngineThread:
    """Steps an engine while it has work; every method but `run` may be called from any thread."""

    def __init__(self, engine: Engine, stuck_s: float = STUCK_S) -> None:
        """Take over an engine; nobody else may use it until `stop`.

        Args:
            engine: Without requests.
            stuck_s: How long a step may take before `problem` says so.
        """
        self.engine, self._stuck_s = engine, stuck_s
        self._commands: queue.SimpleQueue[Request | _Cancel | _Stop] = queue.SimpleQueue()
        self._deliver: dict[int, Deliver] = {}
        self._step_since_s: float | None = None
        self._failure: BaseException | None = None
        self._draining = False
        self._thread = threading.Thread(target=self._run, name="k3c engine", daemon=True)

    def start(self) -> EngineThread:
        """Start the thread."""
        self._thread.start()
        return self

    def submit(
        self, prompt_token_ids: Iterable[int], options: RequestOptions, deliver: Deliver
    ) -> int:
        """Queue a request.

        Args:
            prompt_token_ids: The prompt.
            options: What is asked for.
            deliver: Called in the engine's thread with every event; it must not block.

        Returns:
            The request's id.

        Raises:
            ConfigError: The request can never be served.
            DeviceFault: The engine takes no requests: it drains, or failed.
        """
        if self._draining:
            raise DeviceFault("the engine drains", hint="ask another server")
        if self._failure is not None:
            raise DeviceFault(f"the engine failed: {self._failure}", hint="start it again")
        request = self.engine.prepare(prompt_token_ids, options)
        self._deliver[request.id] = deliver
        self._commands.put(request)
        return request.id

    def abort(self, request_id: int) -> None:
        """Drop a request within a step; no effect when it has ended."""
        if self._deliver.pop(request_id, None) is not None:
            self._commands.put(_Cancel(request_id))

    def stop(self, timeout_s: float | None = None) -> bool:
        """Take no more requests, finish those there are, and end the thread.

        Returns:
            Whether it ended in time.
        """
        self._draining = True
        self._commands.put(_Stop())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def problem(self) -> str:
        """Why no request should be sent here now; empty: there is no reason."""
        since_s = self._step_since_s
        if self._failure is not None:
            return f"the engine failed: {self._failure}"
        if self._draining:
            return "the server is draining"
        if since_s is not None and (waited_s := time.monotonic() - since_s) > self._stuck_s:
            return f"a step has taken {waited_s:.0f} s"
        return "" if self._thread.is_alive() else "the engine's thread is not running"

    def _run(self) -> None:
        stopping = False
        while not (stopping and not self.engine.has_work):
            try:
                stopping |= self._take_commands(wait=not self.engine.has_work and not stopping)
                if self.engine.has_work:
                    self._step()
            except BaseException as failure:
                self._fail(failure)
                return

    def _take_commands(self, wait: bool) -> bool:
        """Carry out what was asked for; return whether to stop."""
        stop = False
        try:
            while True:
                command = self._commands.get(block=wait)
                wait = False
                if isinstance(command, Request):
                    # An abort may have overtaken it.
                    if command.id in self._deliver:
                        self.engine.enqueue(command)
                elif isinstance(command, _Cancel):
                    self.engine.cancel(command.request_id)
                else:
                    stop = True
        except queue.Empty:
            return stop

    def _step(self) -> None:
        self._step_since_s = time.monotonic()
        events = self.engine.step()
        self._step_since_s = None
        for event in events:
            deliver = self._deliver.get(event.request_id)
            if event.finish_reason is not None:
                self._deliver.pop(event.request_id, None)
            if deliver is not None:
                deliver(event)

    def _fail(self, failure: BaseException) -> None:
        """End every request with an error; none may wait for ever."""
        self._failure, self._step_since_s = failure, None
        while self._deliver:
            request_id, deliver = self._deliver.popitem()
            deliver(Event(request_id, None, "error"))


async def stream(
    thread: EngineThread, prompt_token_ids: Iterable[int], options: RequestOptions
) -> AsyncIterator[Event]:
    """Yield the events of one request; leaving early drops it.

    Raises:
        ConfigError: The request can never be served.
        DeviceFault: The engine takes no requests.
    """
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def deliver(event: Event) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    request_id = thread.submit(prompt_token_ids, options, deliver)
    try:
        while True:
            event = await events.get()
            yield event
            if event.finish_reason is not None:
                return
    finally:
        thread.abort(request_id)
