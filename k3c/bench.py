"""`k3c bench`: start-up phases, and prefill and decode rates by bucket, on the real engine."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from k3c.artifact import Bucket, CacheInfo
from k3c.errors import ConfigError
from k3c.runtime.cache.prefix import PrefixOptions
from k3c.runtime.engine import Engine

WARM_UP_STEPS = 2
SEED = 0


@dataclass(frozen=True)
class BucketRate:
    """Time of one step of a bucket that is full of live rows."""

    name: str
    rows: int
    steps: int
    median_ms: float
    min_ms: float
    max_ms: float
    tokens_per_s: float


def bench_artifact(artifact: Path, repeat: int, as_json: bool) -> None:
    """Measure an artifact and print the result.

    Args:
        artifact: The artifact directory.
        repeat: Measured steps per bucket, after two that are not.
        as_json: Print JSON.

    Raises:
        ConfigError: `repeat` is below 1.
    """
    if repeat < 1:
        raise ConfigError(f"{repeat} steps, expected at least 1", "--repeat")
    start_s = time.perf_counter()
    # Equal prompts are measured again and again: nothing of one may serve the next.
    engine = Engine.open(artifact, prefix=PrefixOptions(on=False))
    open_s = time.perf_counter() - start_s
    buckets = [b for b in engine.manifest.buckets if _can_fill(b, engine.manifest.cache)]
    rates = [measure_bucket(engine, bucket, repeat) for bucket in buckets]
    phases = {**engine.timings["load_s"], "open": open_s}
    if as_json:
        report = {"startup_s": phases, "buckets": [asdict(r) for r in rates]}
        print(json.dumps(report, indent=1, sort_keys=True))
        return
    print("start-up  " + ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in phases.items()))
    print(f"{'bucket':<14}{'rows':>6}{'median ms':>11}{'min':>9}{'max':>9}{'tokens/s':>11}")
    for r in rates:
        print(
            f"{r.name:<14}{r.rows:>6}{r.median_ms:>11.3f}{r.min_ms:>9.3f}{r.max_ms:>9.3f}"
            f"{r.tokens_per_s:>11.1f}"
        )


def _can_fill(bucket: Bucket, cache: CacheInfo) -> bool:
    """Whether the planned state is large enough to make every row of a bucket live."""
    rows = bucket.dims["T"]
    if bucket.phase == "decode":
        return rows <= cache.max_requests
    return bucket.phase == "prefill" and rows < cache.max_context_tokens


def measure_bucket(engine: Engine, bucket: Bucket, repeat: int) -> BucketRate:
    """Run a bucket with all rows live and return the time of a step.

    Args:
        engine: An engine with no unfinished requests.
        bucket: A decode or prefill bucket of its artifact.
        repeat: Measured steps.
    """
    rows, steps = bucket.dims["T"], repeat + WARM_UP_STEPS
    run = _decode if bucket.phase == "decode" else _prefill
    seconds = run(engine, rows, steps)
    assert engine.timings["buckets"][bucket.name]["steps"] >= steps, f"{bucket.name} did not run"
    measured = seconds[WARM_UP_STEPS:]
    median_s = statistics.median(measured)
    spread = (median_s * 1e3, min(measured) * 1e3, max(measured) * 1e3)
    return BucketRate(bucket.name, rows, repeat, *spread, rows / median_s)


def _decode(engine: Engine, requests: int, steps: int) -> list[float]:
    """Return the seconds of steps that decode one token of each request."""
    for prompt in _prompts(engine, requests, 1):
        # One token comes from the prompt's own step, the others from decode steps.
        engine.add(prompt, steps + 1, stop_ids=())
    engine.step()
    return [_timed_step(engine) for _ in range(steps)]


def _prefill(engine: Engine, rows: int, steps: int) -> list[float]:
    """Return the seconds of steps that take one prompt of `rows` tokens."""
    seconds: list[float] = []
    for prompt in _prompts(engine, steps, rows):
        engine.add(prompt, 1, stop_ids=())
        seconds.append(_timed_step(engine))
    return seconds


def _prompts(engine: Engine, count: int, tokens: int) -> list[list[int]]:
    random = np.random.default_rng(SEED)
    return random.integers(0, engine.manifest.model.vocab_size, (count, tokens)).tolist()


def _timed_step(engine: Engine) -> float:
    start_s = time.perf_counter()
    engine.step()
    return time.perf_counter() - start_s
