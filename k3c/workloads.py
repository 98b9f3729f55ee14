"""`k3c bench --workload`: a rank's steps on synthetic weights, in all and by kind of node."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from k3c.artifact import Bucket
from k3c.errors import ConfigError
from k3c.runtime.binding import Bound
from k3c.runtime.measuring.standalone import Standalone
from k3c.runtime.measuring.timing import Timing, time_graph, time_launches
from k3c.runtime.measuring.workload import WORKLOADS, Workload, fill_inputs

LAUNCH_ROUNDS = 3


@dataclass(frozen=True)
class NodeKind:
    """All launches of one step that implement one op with one name of result.

    Attributes:
        label: Op and result.
        launches: Commands.
        us: Their time, each between two events, microseconds.
        floor_us: Bytes and operations at the target's best, microseconds.
    """

    label: str
    launches: int
    us: float
    floor_us: float


@dataclass(frozen=True)
class StepReport:
    """One step of a workload."""

    bucket: str
    context_tokens: int
    launches: int
    step: Timing
    floor_us: float
    kinds: tuple[NodeKind, ...]


def bench_workload(artifact: Path, name: str, repeat: int, as_json: bool) -> None:
    """Measure a workload and print the report.

    Args:
        artifact: A rank's artifact, with or without weights.
        name: The workload.
        repeat: Measurements of each step.
        as_json: Print JSON.

    Raises:
        ConfigError: The workload is unknown, or the artifact has no buckets for it.
        ArtifactError: The artifact is damaged or foreign.
        DeviceFault: The device is missing or fails.
    """
    if name not in WORKLOADS:
        known = ", ".join(WORKLOADS)
        raise ConfigError(f"unknown workload {name!r}", "--workload", f"known: {known}")
    if repeat < 1:
        raise ConfigError(f"{repeat} measurements, expected at least 1", "--repeat")
    workload = WORKLOADS[name]
    with Standalone.open(artifact, _say) as rank:
        buckets = workload.buckets(rank.manifest)
        reports = [_measure(rank, workload, bucket, repeat) for bucket in buckets]
    if as_json:
        print(json.dumps([asdict(r) for r in reports], indent=1, sort_keys=True))
        return
    for report in reports:
        _print(name, report)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _measure(rank: Standalone, workload: Workload, bucket: Bucket, repeat: int) -> StepReport:
    plan, context = rank.plan(bucket.name), workload.context(bucket)
    commands = rank.prepare(plan, lambda io: fill_inputs(io, bucket, context, rank.manifest))
    step = time_graph(rank.driver, commands, repeat)
    each = time_launches(rank.driver, commands, LAUNCH_ROUNDS)
    kinds = _kinds(commands, each)
    floor_us = sum(kind.floor_us for kind in kinds)
    return StepReport(bucket.name, context, len(commands), step, floor_us, kinds)


def _kinds(commands: Sequence[Bound], taken: Sequence[float]) -> tuple[NodeKind, ...]:
    """Sum up by op and result, in the order of the first launch."""
    sums: dict[str, list[float]] = {}
    for bound, us in zip(commands, taken, strict=True):
        row = sums.setdefault(bound.command.label, [0, 0.0, 0.0])
        row[0] += 1
        row[1] += us
        row[2] += bound.command.floor_ns / 1e3
    return tuple(NodeKind(label, int(n), us, floor) for label, (n, us, floor) in sums.items())


def _print(name: str, report: StepReport) -> None:
    step = report.step
    print(
        f"{name} {report.bucket} context {report.context_tokens}: {step.median_us / 1e3:.3f} ms"
        f" ({step.min_us / 1e3:.3f} to {step.max_us / 1e3:.3f}), floor {report.floor_us / 1e3:.3f}"
        f" ms, ratio {step.median_us / report.floor_us:.2f}, {report.launches} launches"
    )
    print(f"  {'node':<44}{'launches':>9}{'us':>11}{'us each':>9}{'floor us':>10}{'ratio':>7}")
    for kind in sorted(report.kinds, key=lambda k: -k.us):
        ratio = f"{kind.us / kind.floor_us:.2f}" if kind.floor_us else "-"
        print(
            f"  {kind.label:<44}{kind.launches:>9}{kind.us:>11.1f}"
            f"{kind.us / kind.launches:>9.2f}{kind.floor_us:>10.1f}{ratio:>7}"
        )
    print(f"  {'sum, with an event after each launch':<44}{sum(k.us for k in report.kinds):>20.1f}")
