"""What one step of a rank does: its launches with their bytes and operations, and its messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from k3c.codegen.tuning import is_tuned, table
from k3c.ir.graph import Graph, Node
from k3c.ir.ops import COLLECTIVES
from k3c.passes.select_kernels import Selected
from k3c.planner.routing import Routing
from k3c.targets.collectives import CollectiveKind
from k3c.targets.target import Target

Phase = Literal["decode", "prefill"]
# What the collectives of the IR are called where they are estimated.
_KINDS: Mapping[str, CollectiveKind] = {
    "dispatch_tokens": "dispatch",
    "combine_tokens": "combine",
}
# Operands of a grouped GEMM, by index: its weights, and the experts that the tokens chose.
_WEIGHTS, _CHOSEN = 1, 3


@dataclass(frozen=True)
class Work:
    """Equal launches of a step.

    Attributes:
        kind: The op.
        family: Name of the template.
        phase: Of the bucket.
        tuned: Its configuration was measured on the device; else a rule chose it.
        nbytes: Bytes that one reads and writes.
        flops: Operations of one.
        count: How often a step launches it.
    """

    kind: str
    family: str
    phase: Phase
    tuned: bool
    nbytes: float
    flops: float
    count: int

    def floor_us(self, target: Target) -> float:
        """Return the time that one cannot be faster than, microseconds."""
        # 1 GB/s moves 1,000 bytes a microsecond; 1 GFLOP/s computes 1,000 operations.
        moving = self.nbytes / (target.bandwidth_gbs * 1e3)
        return max(moving, self.flops / (target.peak_gflops * 1e3))


@dataclass(frozen=True)
class Message:
    """Equal collectives of a step.

    Attributes:
        op: The op.
        kind: What `k3c.targets.collectives` calls it.
        axis: The mesh axis that it runs along.
        nbytes: Bytes of the whole tensor, as `k3c.targets.collectives` counts them.
        count: How often a step does it.
    """

    op: str
    kind: CollectiveKind
    axis: str
    nbytes: int
    count: int


@dataclass(frozen=True)
class Conditions:
    """What the shapes of a bucket do not say.

    Attributes:
        context_tokens: Tokens of each request, those of the step included; None: as many as the
            bucket has pages for.
        routing: What the router does.
    """

    context_tokens: int | None = None
    routing: Routing = field(default_factory=Routing)


def work_of(selected: Selected, conditions: Conditions) -> tuple[list[Work], list[Message]]:
    """Return the launches and the messages of a step."""
    calls = Counter(call.graph for call in selected.module.schedule)
    works: list[Work] = []
    messages: list[Message] = []
    for graph in selected.module.graphs:
        for node in graph.nodes:
            if node.op in COLLECTIVES:
                messages.append(_message(node, calls[graph.name]))
            else:
                works.append(node_work(selected, graph, node, conditions, calls[graph.name]))
    return works, messages


def node_work(
    selected: Selected, graph: Graph, node: Node, conditions: Conditions, count: int
) -> Work:
    """Return what one node does."""
    template, target = selected.template(graph, node), selected.target
    cost = template.cost(node, target)
    phase: Phase = "decode" if selected.bucket.phase == "decode" else "prefill"
    # A device without a table is taken to be tuned before it serves, as the how-to says.
    tuned = not table(target.name) or is_tuned(
        target.name, template.name, template.tuning_key(node)
    )
    nbytes = cost.read_bytes + cost.write_bytes
    work = Work(node.op, template.name, phase, tuned, nbytes, cost.flops, count)
    if node.op == "grouped_gemm":
        return _routed(work, node, conditions.routing)
    if node.op == "mla_attend" and conditions.context_tokens is not None:
        share = _visible(selected.bucket.dims, node, phase, conditions.context_tokens)
        return replace(work, nbytes=work.nbytes * share, flops=work.flops * share)
    return work


def _routed(work: Work, node: Node, routing: Routing) -> Work:
    """Count the experts that are needed and the rows, instead of the most and the mean."""
    weight, chosen = node.operands[_WEIGHTS].type, node.operands[_CHOSEN].type
    local, rows, inner = weight.sizes
    total = cast("int", node.attrs.get("total_experts", local))
    top_k = chosen.sizes[-1]
    tokens = chosen.elements // top_k
    counted = min(local, max(1, chosen.elements * local // total))
    needed = min(float(local), routing.experts(tokens, top_k, total, local))
    weights = weight.nbytes * (needed - counted) / local
    flops = 2 * routing.rows(tokens, top_k, total, local) * rows * inner
    return replace(work, nbytes=work.nbytes + weights, flops=flops)


def _visible(dims: Mapping[str, int], node: Node, phase: Phase, context_tokens: int) -> float:
    """Return the share of a bucket's positions that a row sees in the mean."""
    page_tokens = max(v.type.sizes[1] for v in node.operands if v.type.sizes[0] == dims["P"])
    rows_before = dims["T"] / 2 if phase == "prefill" else 0
    return max(1.0, context_tokens - rows_before) / (dims["M"] * page_tokens)


def _message(node: Node, count: int) -> Message:
    # Operands or results hold the whole tensor, the others a rank's part of it.
    nbytes = max(sum(value.type.nbytes for value in side) for side in (node.operands, node.results))
    kind = _KINDS.get(node.op) or cast("CollectiveKind", node.op)
    return Message(node.op, kind, str(node.attrs["axis"]), nbytes, count)
