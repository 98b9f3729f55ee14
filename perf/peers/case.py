"""One row of the comparison, and how a peer's calls are timed: cold, in one CUDA graph."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

BANDWIDTH_BYTES_PER_US = 4.3e6  # H200, read and written
FLOPS_PER_US = 790e6  # H200, dense bf16
COLD_BYTES = 400e6  # more than six times the 60 MiB of L2
Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """What is measured: an op at a shape, and who does it.

    Attributes:
        op: Section, e.g. `moe`.
        shape: What the row is called; equal for all peers and for ours.
        peer: Who does it.
        calls: One call per set of buffers; the sets together are larger than L2.
        nbytes: Bytes that one call must read and write.
        flops: Operations of one call.
    """

    op: str
    shape: str
    peer: str
    calls: Sequence[Call]
    nbytes: float
    flops: float = 0.0

    @property
    def floor_us(self) -> float:
        """What the device cannot do a call faster than."""
        return max(self.nbytes / BANDWIDTH_BYTES_PER_US, self.flops / FLOPS_PER_US)


@dataclass(frozen=True)
class Row:
    """A measured case, microseconds of one call."""

    op: str
    shape: str
    peer: str
    floor_us: float
    median_us: float
    min_us: float
    max_us: float


def sets_for(nbytes: float, most: int = 400) -> int:
    """Return how many sets of buffers keep a call's data out of L2."""
    return max(2 if nbytes > COLD_BYTES / 2 else 8, min(most, math.ceil(COLD_BYTES / nbytes)))


def measure(case: Case, rounds: int = 7) -> Row:
    """Time a graph that makes every call of a case once.

    Raises:
        RuntimeError: The peer refuses the shape.
    """
    case.calls[0]()
    case.calls[-1]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in case.calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    taken = [_replay_us(graph) / len(case.calls) for _ in range(rounds)]
    middle = statistics.median(taken)
    return Row(case.op, case.shape, case.peer, case.floor_us, middle, min(taken), max(taken))


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    graph.replay()
    last.record()
    last.synchronize()
    return 1e3 * first.elapsed_time(last)


def random_bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Return bf16[shape] of normal numbers."""
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def random_f32(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Return f32[shape] of normal numbers."""
    return torch.randn(*shape, device="cuda") * scale
