"""Memory of launch graphs: an estimate for each bucket, and which buckets a budget drops.

A graph holds no buffers of its own here: every byte that a kernel touches lies in a planned space.
What is left is the driver's: nodes, parameters, and the command buffers of an instantiated graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k3c.targets.target import Target

# A public log shows 24 to 28 MiB for each captured graph of a whole step
# (vllm-project/vllm pull request 22897, August 2025); taken as 28 MiB for 1,000 launches.
LAUNCH_BYTES = 28 * 1024
SOURCE = "estimate: 28 KiB a launch, from the log in vllm-project/vllm pull request 22897"
# What targets/*.toml take off a GPU's memory for the context, modules and graphs.
RESERVE_BYTES = 2 * 2**30
# Of it, what context and modules need whatever the graphs are.
CONTEXT_BYTES = 2**30


@dataclass(frozen=True)
class BucketCost:
    """What matters of a bucket for keeping it: its phase, its rows, its launches, its floor."""

    name: str
    phase: str
    rows: int
    launches: int
    floor_us: int


@dataclass(frozen=True)
class Kept:
    """The buckets of a plan.

    Attributes:
        names: Buckets that are kept, in their order.
        dropped: Why each other one is not, by name.
        graph_bytes: Estimated bytes of the kept ones' graphs.
    """

    names: tuple[str, ...]
    dropped: dict[str, str]
    graph_bytes: int


def has_graphs(target: Target) -> bool:
    """Whether a step is a graph: on a CPU it is a function."""
    return target.kind != "cpu"


def reserve_bytes(target: Target) -> int:
    """Return what a device's memory has beyond `memory_bytes`, kept for driver and graphs."""
    return RESERVE_BYTES if has_graphs(target) else 0


def driver_bytes(target: Target, graph_bytes: int) -> int:
    """Return what the driver keeps beside the graphs: the reserve's rest, at least the context."""
    return max(CONTEXT_BYTES, RESERVE_BYTES - graph_bytes) if has_graphs(target) else 0


def graph_bytes(target: Target, launches: int) -> int:
    """Return the estimated bytes of one bucket's graph."""
    return launches * LAUNCH_BYTES if has_graphs(target) else 0


def keep_buckets(buckets: Sequence[BucketCost], target: Target, budget_bytes: int) -> Kept:
    """Drop buckets until their graphs keep to a budget.

    The largest bucket of every phase stays: without it a request could not run. Of the others the
    one goes first whose steps lose least by running in the next larger bucket.

    Args:
        buckets: All buckets.
        target: The device.
        budget_bytes: Bytes that graphs may take; -1: half of the reserve.
    """
    budget = RESERVE_BYTES - CONTEXT_BYTES if budget_bytes < 0 else budget_bytes
    kept = list(buckets)
    dropped: dict[str, str] = {}
    while _total(kept, target) > budget:
        losses = [(_loss(b, kept), b.rows, b.name) for b in kept if _larger(b, kept)]
        if not losses:
            break
        loss, _, name = min(losses)
        gone = next(b for b in kept if b.name == name)
        larger = _larger(gone, kept)
        assert larger is not None, f"{name} has no larger bucket"
        kept.remove(gone)
        dropped[name] = f"graph budget: its steps run in {larger.name}, floor +{loss:.0%}"
    return Kept(tuple(b.name for b in kept), dropped, _total(kept, target))


def _total(buckets: Sequence[BucketCost], target: Target) -> int:
    return sum(graph_bytes(target, b.launches) for b in buckets)


def _larger(bucket: BucketCost, kept: Sequence[BucketCost]) -> BucketCost | None:
    above = [b for b in kept if b.phase == bucket.phase and b.rows > bucket.rows]
    return min(above, key=lambda b: b.rows, default=None)


def _loss(bucket: BucketCost, kept: Sequence[BucketCost]) -> float:
    larger = _larger(bucket, kept)
    assert larger is not None, f"{bucket.name} has no larger bucket"
    return larger.floor_us / max(bucket.floor_us, 1) - 1
