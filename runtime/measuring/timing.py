"""Times a step on a GPU: as one graph, and each of its launches where it stands in the step.

Launches are timed between events on a stream that is kept busy until all of them are enqueued, so
that the device runs one after the other as in a graph. Every launch finds the data that its layer
left, and weights and states that no launch just before it touched: cold, as in a real step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from k3c.runtime.binding import Bound
from k3c.runtime.driver.gpu import GpuDriver
from k3c.runtime.driver.gpu_steps import CommandStep

_BUSY_BYTES = 1 << 30
# Filling that many bytes takes about this long; a launch with its event costs the host this much.
_BUSY_US, _HOST_US = 250.0, 20.0


@dataclass(frozen=True)
class Timing:
    """Microseconds of a repeated measurement."""

    median_us: float
    min_us: float
    max_us: float

    @staticmethod
    def of(taken: Sequence[float]) -> Timing:
        """Return the statistics of some microseconds."""
        return Timing(statistics.median(taken), min(taken), max(taken))


def time_graph(driver: GpuDriver, commands: Sequence[Bound], rounds: int, runs: int = 3) -> Timing:
    """Run commands as one graph.

    Args:
        driver: The device.
        commands: All commands of a step, or some that do not depend on others.
        rounds: Measurements.
        runs: Graphs launched one after another in a measurement.

    Raises:
        DeviceFault: The device refuses the graph or fails.
    """
    gpu, step = driver.gpu, driver.graph(commands)
    first, last = gpu.new_timer("measure"), gpu.new_timer("measure")
    step.run()
    gpu.wait("warm-up")
    taken: list[float] = []
    for _ in range(rounds):
        gpu.record(first)
        for _ in range(runs):
            step.run()
        gpu.record(last)
        taken.append(1e3 * gpu.elapsed_ms(first, last) / runs)
    step.close()
    return Timing.of(taken)


def time_launches(driver: GpuDriver, commands: Sequence[Bound], rounds: int) -> list[float]:
    """Return the microseconds of every command of a step, the median of some rounds.

    An event costs about a microsecond, which is in every figure.

    Raises:
        DeviceFault: The device fails.
    """
    gpu = driver.gpu
    steps = [CommandStep(driver.api, [bound], driver.functions, gpu.stream) for bound in commands]
    timers = [gpu.new_timer("measure") for _ in range(len(steps) + 1)]
    busy = driver.api.created("memory_alloc", _BUSY_BYTES, where="measure")
    fills = int(len(steps) * _HOST_US / _BUSY_US) + 1
    taken: list[list[float]] = []
    for _ in range(rounds):
        for _ in range(fills):
            driver.api.call("memory_set", busy, 0, _BUSY_BYTES, gpu.stream, where="measure")
        gpu.record(timers[0])
        for step, timer in zip(steps, timers[1:], strict=True):
            step.run()
            gpu.record(timer)
        gpu.wait("measure")
        taken.append([1e3 * gpu.elapsed_ms(a, b) for a, b in pairwise(timers)])
    driver.api.call("memory_free", busy, where="measure")
    return [statistics.median(column) for column in zip(*taken, strict=True)]
