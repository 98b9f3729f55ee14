"""How long a launch takes: fits of measured launches, by device, kernel family and phase.

On a device that we measured the fit is of our own launches. On another one it is the same fit, its
latency and its share changed as much as public kernels of the same kind change between the two
devices (`public.py`); where there are none, unchanged, with an error bar as wide as the largest
change that public kernels show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from k3c.planner.fit import Fit, Row, fit
from k3c.planner.measured import Step, event_cost, measured_steps
from k3c.planner.public import transfer
from k3c.planner.work import Phase, Work
from k3c.targets.target import Target, load_target

OURS = "h200"
# Of its bandwidth, a CPU's decode reached 0.65 to 0.75 (perf/README.md, mini configuration).
_CPU_SHARE = (0.70, 0.08)


@dataclass(frozen=True)
class Time:
    """The time of a launch with its error bar, microseconds, and what it rests on."""

    us: float
    low_us: float
    high_us: float
    source: str
    detail: str


@dataclass(frozen=True)
class Efficiency:
    """Fits of one device.

    Attributes:
        target: The device.
        left_out: Sources of measurements that no fit may use: names of steps, public sources.
    """

    target: Target
    left_out: frozenset[str] = frozenset()

    def time(self, work: Work) -> Time:
        """Return the time of one launch."""
        floor_us = work.floor_us(self.target)
        if self.target.kind == "cpu":
            share, spread = _CPU_SHARE
            return _time(floor_us / share, spread, "modelled", "share of the bandwidth, one kernel")
        found, what = _fit_of(self.left_out, work.family, work.phase, work.tuned)
        detail = f"{found.rows} launches of {what} on {OURS}"
        if self.target.name == OURS:
            return _time(found.us(floor_us), found.spread, f"measured on {OURS}", detail)
        change = transfer(OURS, self.target.name, work.family, work.phase, self.left_out)
        us = found.latency_us * change.latency + floor_us / (found.share * change.share)
        source = f"modelled: measured on {OURS}, moved to {self.target.name}"
        # The error of a fit and that of its change are independent: they add by squares.
        spread = (found.spread**2 + change.spread**2) ** 0.5
        return _time(us, spread, source, f"{detail}; {change.source}")


def _time(us: float, spread: float, source: str, detail: str) -> Time:
    return Time(us, us / (1 + spread), us * (1 + spread), source, detail)


def used_steps(left_out: frozenset[str]) -> tuple[str, ...]:
    """Return the measured steps that fits use, sorted."""
    return tuple(sorted({name for name, _, _ in _samples(left_out)}))


@cache
def _fit_of(left_out: frozenset[str], family: str, phase: Phase, tuned: bool) -> tuple[Fit, str]:
    """Return the fit of the nearest launches that were measured, and what they are."""
    near: tuple[tuple[str, Callable[[Work], bool]], ...] = (
        (
            f"{family} ({'tuned' if tuned else 'by rule'})",
            lambda w: (w.family, w.phase, w.tuned) == (family, phase, tuned),
        ),
        (family, lambda w: (w.family, w.phase) == (family, phase)),
        (f"{family} in any phase", lambda w: w.family == family),
    )
    pooled = _pooled(left_out, phase)
    for what, matches in near:
        rows = _rows(left_out, matches)
        if rows:
            return fit(rows, pooled), what
    return pooled, f"any {phase} kernel"


@cache
def _pooled(left_out: frozenset[str], phase: Phase) -> Fit:
    """Return the fit of all kernels of a phase."""
    return fit(_rows(left_out, lambda w: w.phase == phase and not w.family.startswith("local_")))


def _rows(left_out: frozenset[str], matches: Callable[[Work], bool]) -> list[Row]:
    target = load_target(OURS)
    return [
        Row(work.floor_us(target), us, name)
        for name, work, us in _samples(left_out)
        if matches(work)
    ]


@cache
def _samples(left_out: frozenset[str]) -> tuple[tuple[str, Work, float], ...]:
    """Return every measured node's step, work and time within the step."""
    steps: list[Step] = [s for s in measured_steps(OURS) if s.name not in left_out]
    cost = event_cost(steps)
    return tuple(
        (step.name, sample.work, cost.without(sample)) for step in steps for sample in step.samples
    )
