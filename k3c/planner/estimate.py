"""The time of one step of a rank: node by node, in all and by kind, each with an error bar.

A launch takes its latency and the slower of its bytes and its operations, at the share of the
device's best that measured launches like it reach (`efficiency.py`); a collective what
`k3c.targets.collectives` estimates for the ranks and links that it crosses. With expert parallelism
the busiest rank decides (`routing.py`). Low and high ends are sums of those of the parts: launches
of a kind err together, so nothing averages out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k3c.passes.select_kernels import Selected
from k3c.planner.efficiency import Efficiency
from k3c.planner.routing import Routing
from k3c.planner.work import Conditions, Message, Work, work_of
from k3c.targets.collectives import choose
from k3c.targets.mesh import Mesh
from k3c.targets.topology import Topology

EVEN = Routing()


@dataclass(frozen=True)
class KindEstimate:
    """All launches of a step that implement one op.

    Attributes:
        kind: The op.
        us: Expected time, microseconds.
        low_us: Low end of the error bar, microseconds.
        high_us: High end of the error bar, microseconds.
        floor_us: Bytes and operations at the target's best, microseconds; 0 for a collective.
        launches: Nodes of the step.
        source: Whether it is measured, modelled or of public figures, in a few words.
        detail: What the times of its nodes rest on.
    """

    kind: str
    us: float
    low_us: float
    high_us: float
    floor_us: float
    launches: int
    source: str
    detail: str = ""


@dataclass(frozen=True)
class StepEstimate:
    """The time of a step; the kinds' times sum to it.

    Attributes:
        us: Expected time, microseconds.
        low_us: Low end of the error bar, microseconds.
        high_us: High end of the error bar, microseconds.
        kinds: Its parts, longest first.
    """

    us: float
    low_us: float
    high_us: float
    kinds: tuple[KindEstimate, ...]


def estimate_step(
    selected: Selected,
    mesh: Mesh | None,
    topology: Topology,
    rank: int = 0,
    context_tokens: int | None = None,
    routing: Routing = EVEN,
) -> StepEstimate:
    """Estimate one step.

    Args:
        selected: The module bound to the step's bucket.
        mesh: The ranks that share the model; None: one.
        topology: What connects them.
        rank: The rank whose collectives are estimated.
        context_tokens: Tokens of context of each request, those of the step included; None: as
            many as the bucket has pages for.
        routing: What the router does; the default draws all experts alike, in contiguous ranges.
    """
    works, messages = work_of(selected, Conditions(context_tokens, routing))
    efficiency = Efficiency(selected.target)
    parts = [launch(efficiency, work) for work in works]
    parts += [_message(message, mesh or Mesh(), topology, rank) for message in messages]
    return total(parts)


def launch(efficiency: Efficiency, work: Work) -> KindEstimate:
    """Return the times of equal launches."""
    time, count = efficiency.time(work), work.count
    return KindEstimate(
        work.kind, time.us * count, time.low_us * count, time.high_us * count,
        work.floor_us(efficiency.target) * count, count, time.source, time.detail,
    )  # fmt: skip


def total(parts: Sequence[KindEstimate]) -> StepEstimate:
    """Return the step that some parts make, those of a kind summed up."""
    by_kind: dict[str, list[KindEstimate]] = {}
    for part in parts:
        by_kind.setdefault(part.kind, []).append(part)
    kinds = tuple(sorted(map(_merged, by_kind.values()), key=lambda k: (-k.us, k.kind)))
    us, low_us, high_us = (
        sum(values)
        for values in ([k.us for k in kinds], [k.low_us for k in kinds], [k.high_us for k in kinds])
    )
    return StepEstimate(us, low_us, high_us, kinds)


def group(mesh: Mesh, axis: str, rank: int) -> tuple[int, ...]:
    """Return the ranks that a collective of `rank` along a mesh axis runs over, ascending."""
    here = mesh.coordinates(rank)
    # Experts are shared by all ranks of a stage; any other axis leaves the rest of a place alone.
    free = {axis, "ep"} | ({"tp", "dp"} if axis == "ep" else set[str]())
    return tuple(
        other
        for other in range(mesh.ranks)
        if all(at == here[a] for a, at in mesh.coordinates(other).items() if a not in free)
    )


def _message(message: Message, mesh: Mesh, topology: Topology, rank: int) -> KindEstimate:
    taken = choose(message.kind, message.nbytes, group(mesh, message.axis, rank), topology)
    count = message.count
    return KindEstimate(
        message.op, taken.us * count, taken.low_us * count, taken.high_us * count, 0.0, count,
        "public measurements of collectives", f"{taken.implementation}: {taken.source}",
    )  # fmt: skip


def _merged(parts: Sequence[KindEstimate]) -> KindEstimate:
    return KindEstimate(
        parts[0].kind,
        sum(p.us for p in parts),
        sum(p.low_us for p in parts),
        sum(p.high_us for p in parts),
        sum(p.floor_us for p in parts),
        sum(p.launches for p in parts),
        "; ".join(dict.fromkeys(p.source for p in parts)),
        "; ".join(dict.fromkeys(p.detail for p in parts)),
    )
