"""The machine's read bandwidth: the floor under a decode step, which reads its weights once.

`python perf/floor.py [THREADS]` prints one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

BYTES = 768 << 20  # far more than any cache
REPEATS = 7


_VECTOR = torch.ones(4096)


def reductions(data: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Return ways to read all of f32[n] once; which one is fastest depends on the machine."""
    halves = data.view(2, -1)
    return {
        "sum": data.sum,
        "max": data.max,
        "dot": lambda: torch.dot(halves[0], halves[1]),
        "gemv": lambda: torch.mv(data.view(-1, 4096), _VECTOR),
    }


def read_bandwidth(threads: int, nbytes: int = BYTES) -> dict[str, object]:
    """Measure.

    Args:
        threads: Threads that read.
        nbytes: Bytes to read in one go.

    Returns:
        `gbs`: the best reduction's median in GB/s; `spread_gbs`: its slowest and fastest run;
        `by_reduction`: all medians.
    """
    torch.set_num_threads(threads)
    data = torch.ones(nbytes // 4)
    rates = {name: _rates(read, nbytes) for name, read in reductions(data).items()}
    medians = {name: statistics.median(found) for name, found in rates.items()}
    best = max(medians, key=lambda name: medians[name])
    return {
        "gbs": round(medians[best], 2),
        "spread_gbs": [round(min(rates[best]), 2), round(max(rates[best]), 2)],
        "reduction": best,
        "by_reduction": {name: round(rate, 2) for name, rate in medians.items()},
        "threads": threads,
        "bytes": nbytes,
    }


def _rates(read: Callable[[], torch.Tensor], nbytes: int) -> list[float]:
    read()
    rates = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        read()
        rates.append(nbytes / (time.perf_counter() - start_s) / 1e9)
    return rates


if __name__ == "__main__":
    print(json.dumps(read_bandwidth(int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
