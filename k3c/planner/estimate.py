"""The time of one step of a rank: node by node, in all and by kind, each with an error bar.

A launch takes the slower of its bytes and its operations at the target's rates; a collective takes
what `k3c.targets.collectives` chooses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from k3c.ir.graph import Node
from k3c.ir.ops import COLLECTIVES
from k3c.passes.select_kernels import Selected
from k3c.targets.catalogue import Cost
from k3c.targets.collectives import choose
from k3c.targets.mesh import Mesh
from k3c.targets.target import Target
from k3c.targets.topology import Topology

GATHERS = ("all_gather", "dispatch")


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
        source: What the estimate rests on.
    """

    kind: str
    us: float
    low_us: float
    high_us: float
    floor_us: float
    launches: int
    source: str


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
) -> StepEstimate:
    """Estimate one step.

    Args:
        selected: The module bound to the step's bucket.
        mesh: The ranks that share the model; None: one.
        topology: What connects them.
        rank: The rank whose collectives are estimated.
        context_tokens: Tokens of context of each request; None: as long as the bucket allows.
    """
    calls = Counter(call.graph for call in selected.module.schedule)
    parts = [
        _times(_node(selected, node, graph_name, topology), calls[graph_name])
        for graph_name, node in _nodes(selected)
    ]
    kinds = tuple(sorted(map(_merged, _by_kind(parts)), key=lambda k: (-k.us, k.kind)))
    return StepEstimate(
        sum(k.us for k in kinds), sum(k.low_us for k in kinds), sum(k.high_us for k in kinds), kinds
    )


def floor_us(cost: Cost, target: Target) -> float:
    """Return the time that a launch cannot be faster than, microseconds."""
    # 1 GB/s moves 1,000 bytes a microsecond; 1 GFLOP/s computes 1,000 operations.
    moving = (cost.read_bytes + cost.write_bytes) / (target.bandwidth_gbs * 1e3)
    return max(moving, cost.flops / (target.peak_gflops * 1e3))


def _nodes(selected: Selected) -> list[tuple[str, Node]]:
    return [(graph.name, node) for graph in selected.module.graphs for node in graph.nodes]


def _node(selected: Selected, node: Node, graph_name: str, topology: Topology) -> KindEstimate:
    if node.op in COLLECTIVES:
        return _collective(node, dict(selected.module.mesh), topology)
    template = selected.choices[(graph_name, node.results[0].name)]
    us = floor_us(template.cost(node, selected.target), selected.target)
    return KindEstimate(node.op, us, us, us, us, 1, "roofline")


def _collective(node: Node, axes: dict[str, int], topology: Topology) -> KindEstimate:
    whole = node.results if node.op in GATHERS else node.operands
    nbytes = sum(value.type.nbytes for value in whole)
    ranks = range(axes[str(node.attrs["axis"])])
    taken = choose(node.op, nbytes, ranks, topology)  # type: ignore[arg-type]
    return KindEstimate(node.op, taken.us, taken.low_us, taken.high_us, 0.0, 1, taken.source)


def _times(one: KindEstimate, count: int) -> KindEstimate:
    return KindEstimate(
        one.kind, one.us * count, one.low_us * count, one.high_us * count,
        one.floor_us * count, one.launches * count, one.source,
    )  # fmt: skip


def _by_kind(parts: Sequence[KindEstimate]) -> list[list[KindEstimate]]:
    found: dict[str, list[KindEstimate]] = {}
    for part in parts:
        found.setdefault(part.kind, []).append(part)
    return list(found.values())


def _merged(parts: Sequence[KindEstimate]) -> KindEstimate:
    return KindEstimate(
        parts[0].kind,
        sum(p.us for p in parts),
        sum(p.low_us for p in parts),
        sum(p.high_us for p in parts),
        sum(p.floor_us for p in parts),
        sum(p.launches for p in parts),
        "; ".join(dict.fromkeys(p.source for p in parts)),
    )
