"""Progress of a long command: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console as RichConsole
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

LINE_EVERY_S = 5.0  # without a terminal, a phase that takes longer reports this often


class ByteCounter:
    """Counts the bytes of one phase and reports them."""

    def __init__(self, name: str, total_bytes: int, bars: Progress | None) -> None:
        """Start at zero; `bars` None means plain lines."""
        self._name = name
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._bars = bars
        self._start_s = self._last_s = time.monotonic()
        self._task = bars.add_task(name, total=total_bytes) if bars else None

    def add(self, nbytes: int) -> None:
        """Count `nbytes` more."""
        self._done_bytes += nbytes
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=self._done_bytes)
            return
        now_s = time.monotonic()
        if now_s - self._last_s >= LINE_EVERY_S:
            self._last_s = now_s
            rate = self._done_bytes / (now_s - self._start_s) / 1e6
            done, total = self._done_bytes / 1e6, self._total_bytes / 1e6
            print(f"{self._name}: {done:.1f} of {total:.1f} MB, {rate:.0f} MB/s", file=sys.stderr)


class Console:
    """Reports the phases of a command on standard error; a context manager."""

    def __init__(self) -> None:
        """Use bars when standard error is a terminal."""
        self._rich = RichConsole(stderr=True)
        self._bars: Progress | None = None
        if self._rich.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
            self._bars = Progress(
                *columns, TransferSpeedColumn(), console=self._rich, transient=True
            )

    def __enter__(self) -> Console:
        """Start the bars."""
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the bars."""
        if self._bars is not None:
            self._bars.stop()

    def line(self, text: str) -> None:
        """Print one line."""
        self._rich.print(text, highlight=False, markup=False)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; its name is printed when it starts and its seconds when it ends."""
        if self._bars is None:
            print(f"{name} ...", file=sys.stderr, flush=True)
        start_s = time.monotonic()
        yield
        self.line(f"{name}: {time.monotonic() - start_s:.1f} s")

    def count(self, name: str, total_bytes: int) -> ByteCounter:
        """Return a counter for a phase that moves bytes."""
        return ByteCounter(name, total_bytes, self._bars)
