"""Real artifacts: made by the command line in a process of its own, opened in the test's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from k3c.runtime.cache.prefix import PrefixOptions
from k3c.runtime.driver.cpu_executor import CpuExecutor
from k3c.runtime.engine import Engine
from k3c.runtime.loader import Loaded, LoadOptions, load_artifact

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models/k3-demo"
TINY = ROOT / "tests/data/k3-tiny"
POISON = 0xFF  # four of these bytes are a NaN in f32, two are one in bf16, and -1 as an integer
LIMIT_S = 900


def k3c(
    *args: object, check: bool = True, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `k3c` in a process of its own.

    Args:
        args: The command line after `k3c`.
        check: Fail when the exit code is not 0.
        env: Variables to set.
    """
    command = [sys.executable, "-m", "k3c", *map(str, args)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert not check or done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return done


def compile_artifact(model: Path, output: Path, *options: str) -> Path:
    """Compile for this machine's CPU; kernels come from the run's cache where they are there."""
    k3c("compile", model, "--target", "cpu", "-o", output, *options)
    return output


def demo_golden() -> dict[str, Any]:
    """The demo's prompts with their greedy continuations, and its texts with their loss."""
    return json.loads((DEMO / "golden.json").read_text())


class WatchedEngine(Engine):
    """An engine that keeps the logits of every token, and can be told which tokens to take.

    Attributes:
        logits: f32[V] of each generated token, by request.
        forced: Tokens that a request continues with, whatever the model says.
        before_step: Called with the step's bucket before its input is filled.
    """

    def __init__(
        self,
        loaded: Loaded,
        max_chunk_tokens: int | None = None,
        prefix: PrefixOptions = PrefixOptions(on=False),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__(loaded, max_chunk_tokens, prefix)
        self.logits: dict[int, list[np.ndarray]] = {}
        self.forced: dict[int, list[int]] = {}
        self.before_step: list[Any] = []

    def force(self, prompt: Sequence[int], continuation: Sequence[int]) -> int:
        """Add a request that is fed `continuation` after its prompt; one logits row for each."""
        request = self.add(prompt, len(continuation) + 1, stop_ids=())
        self.forced[request] = list(continuation)
        return request

    def finish(self) -> None:
        """Run until nothing is left to do."""
        while self.has_work:
            self.step()

    def _start(self, step):
        for call in self.before_step:
            call(step)
        super()._start(step)

    def _run(self, step):
        for call in self.before_step:
            call(step)
        return super()._run(step)

    def _finish_row(self, request, row, fields):
        self.logits.setdefault(request.id, []).append(fields["logits"][row].copy())
        if self.forced.get(request.id):
            fields["tokens"][row] = self.forced[request.id].pop(0)
        return super()._finish_row(request, row, fields)


def open_loaded(artifact: Path, executor: str = "whole") -> Loaded:
    """Load an artifact."""
    return load_artifact(artifact, LoadOptions(executor=executor))  # type: ignore[arg-type]


def poison(loaded: Loaded, *spaces: str) -> None:
    """Fill spaces with NaN."""
    for space in spaces:
        loaded.memory[space].array[:] = POISON


def libraries_of(loaded: Loaded) -> Any:
    """The kernel libraries that a loaded artifact runs on."""
    executor = next(iter(loaded.buckets.values())).executor
    assert isinstance(executor, CpuExecutor)
    return executor.run.__self__.calls[0].libraries  # type: ignore[attr-defined]
