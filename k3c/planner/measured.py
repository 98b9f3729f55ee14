"""Our own measured steps: each node's work and its time within a step.

A result file times every launch between two events, which costs time that a step does not have.
That cost, one for a kernel and one for an all-gather (whose copies to all ranks run side by side in
a step), is fitted so that the launches of each step sum to the step's own time.

Source: `tables/h200.json`, made by `perf/step_rows.py` from a file of `perf/results`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from k3c.planner.work import Work

FOLDER = Path(__file__).parent / "tables"
# The expert kernels were changed after some steps were measured: those rows are a family apart.
Experts = Literal["first", "whole_sectors"]
CURRENT: Experts = "whole_sectors"


@dataclass(frozen=True)
class Sample:
    """Equal launches of a measured step; `us` of one, its events included, microseconds."""

    work: Work
    launches: int
    us: float


@dataclass(frozen=True)
class Step:
    """A measured step.

    Attributes:
        name: Workload and bucket.
        experts: Which expert kernels it ran.
        us: Median time, microseconds.
        samples: Its launches.
    """

    name: str
    experts: Experts
    us: float
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class EventCost:
    """Time that the events around a launch add to it, microseconds."""

    kernel_us: float
    gather_us: float

    def without(self, sample: Sample) -> float:
        """Return the time of one node within a step, microseconds."""
        each = self.gather_us if sample.work.kind == "all_gather" else self.kernel_us
        return max(0.0, sample.us - each * sample.launches / sample.work.count)


@cache
def measured_steps(device: str) -> tuple[Step, ...]:
    """Return the measured steps of a device; none where it has no table."""
    path = FOLDER / f"{device}.json"
    if not path.is_file():
        return ()
    return tuple(_step(step) for step in json.loads(path.read_text("utf-8"))["steps"])


def event_cost(steps: Sequence[Step]) -> EventCost:
    """Fit what events cost, by least squares of the steps' relative errors."""
    rows: list[tuple[float, float, float]] = []
    for step in steps:
        gathers = sum(s.launches for s in step.samples if s.work.kind == "all_gather")
        kernels = sum(s.launches for s in step.samples) - gathers
        excess = sum(s.us * s.work.count for s in step.samples) - step.us
        rows.append((kernels / step.us, gathers / step.us, excess / step.us))
    kk, kg, gg = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    k, g = (sum(r[i] * r[2] for r in rows) for i in (0, 1))
    determinant = kk * gg - kg * kg
    assert determinant > 0, f"{len(steps)} steps say nothing of what events cost"
    return EventCost((k * gg - g * kg) / determinant, (g * kk - k * kg) / determinant)


def _step(data: dict[str, Any]) -> Step:
    samples = tuple(_sample(row, data["experts"]) for row in data["nodes"])
    return Step(data["step"], data["experts"], data["median_us"], samples)


def _sample(row: dict[str, Any], experts: Experts) -> Sample:
    family = row["family"]
    if family.startswith("grouped_gemm") and experts != CURRENT:
        family = f"{family}@{experts}"
    work = Work(
        row["kind"], family, row["phase"], row["tuned"], row["nbytes"], row["flops"], row["count"]
    )
    return Sample(work, row["launches"], row["us_with_events"] / row["count"])
