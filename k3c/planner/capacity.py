"""The memory of a rank, exactly: what the runtime allocates, and how much state still fits.

Weights, scratch, io and messages come from the plans of all buckets, which the independent checker
has accepted. State is laid out as the plan lays it out, so its size for another number of requests
or another context needs no new plan: only a wider decode bucket does, and is planned when asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from k3c.artifact import Bucket, CacheInfo, Plan, aligned
from k3c.buckets import make_buckets
from k3c.planner import quick
from k3c.planner.answer import BucketLine, MemoryLine, StageMemory
from k3c.planner.exact import Planner, StagePlans
from k3c.planner.graphs import (
    SOURCE,
    BucketCost,
    Kept,
    driver_bytes,
    graph_bytes,
    keep_buckets,
    reserve_bytes,
)
from k3c.planner.lines import draft_lines, spare_lines, state_lines
from k3c.planner.problem import Asked, decode_size
from k3c.planner.quick import Part


def cache_info(asked: Asked) -> CacheInfo:
    """Return the sizes of the hybrid state; page 0 and slot 0 are scratch."""
    load = asked.load(asked.requests, asked.context_tokens, 0)
    return CacheInfo(
        asked.requests, asked.context_tokens, asked.page_tokens, load.pages, load.slots
    )


@dataclass
class StageLedger:
    """The books of one pipeline stage's ranks.

    Attributes:
        planner: Plans buckets.
        part: What a rank of the stage holds.
        asked: What it is asked to hold.
        base: The plans of all buckets as asked.
        largest_only: They are those of the largest bucket of each phase alone; graphs are then
            taken to keep to the reserve.
    """

    planner: Planner
    part: Part
    asked: Asked
    base: StagePlans
    largest_only: bool = False
    _plans: dict[str, Plan] = field(default_factory=dict)

    def plan_of(self, bucket: Bucket) -> Plan:
        """Return a bucket's plan; its state has the sizes that were asked for."""
        if bucket.name not in self._plans:
            mesh, stage = self.part.mesh, self.part.stage
            plan = self.planner.plan_more(mesh, stage, bucket, self.base.weights)
            self._plans[bucket.name] = plan
        return self._plans[bucket.name]

    def plans(self, requests: int) -> tuple[Plan, ...]:
        """Return the plans of all buckets that `requests` requests need."""
        asked = self.asked
        cache = replace(cache_info(asked), max_requests=requests)
        buckets = make_buckets(cache, self.planner.target, asked.chunk_tokens)
        if self.largest_only:
            buckets = _largest_of_phases(buckets)
        return tuple(self.plan_of(bucket) for bucket in buckets)

    def kept(self, requests: int) -> Kept:
        """Return which buckets a graph budget leaves."""
        if self.largest_only:
            return Kept(tuple(plan.bucket.name for plan in self.plans(requests)), {}, 0)
        costs = [_cost(plan) for plan in self.plans(requests)]
        budget = self.asked.graph_budget_bytes
        return keep_buckets(costs, self.planner.target, budget)

    def lines(self, requests: int, context_tokens: int) -> tuple[MemoryLine, ...]:
        """Return where the bytes of a rank go for so many requests of so many tokens."""
        asked, part, target = self.asked, self.part, self.planner.target
        kept = self.kept(requests)
        plans = [p for p in self.plans(requests) if p.bucket.name in kept.names]
        load = asked.load(requests, context_tokens, decode_size(target, requests))
        names = f"{len(plans)} buckets share one arena"
        found = [
            MemoryLine("weights", self.base.weights.total_bytes, True, _weights_note(self)),
            MemoryLine("activations", _most(plans, "arena"), True, names),
            MemoryLine("io", _io_bytes(plans, load.request_pages), True, "step inputs, logits"),
            MemoryLine("communication", _most(plans, "comm"), True, "messages between ranks"),
            *spare_lines(part),
            *state_lines(part, load),
            *draft_lines(asked, part, load),
            MemoryLine("graphs", kept.graph_bytes, False, SOURCE),
            MemoryLine(
                "driver", driver_bytes(target, kept.graph_bytes), False, "context and modules"
            ),
        ]  # fmt: skip
        return tuple(found)

    def total_bytes(self, requests: int, context_tokens: int) -> int:
        """Return all bytes of a rank, the driver's included."""
        return sum(line.nbytes for line in self.lines(requests, context_tokens))

    @property
    def device_bytes(self) -> int:
        """Memory of the device, with what is kept for the driver."""
        return self.planner.target.memory_bytes + reserve_bytes(self.planner.target)

    def fits(self, requests: int, context_tokens: int) -> bool:
        """Whether so many requests of so many tokens fit a rank."""
        return self.total_bytes(requests, context_tokens) <= self.device_bytes

    def memory(self) -> StageMemory:
        """Return the memory of a rank as asked."""
        lines = self.lines(self.asked.requests, self.asked.context_tokens)
        layers, total = self.part.layers, sum(line.nbytes for line in lines)
        mesh = self.part.mesh
        return StageMemory(
            self.part.stage, layers.start, layers.stop, mesh.ranks // mesh.pp, lines, total,
            self.device_bytes, self.device_bytes - total,
        )  # fmt: skip


def open_ledger(
    planner: Planner, part: Part, asked: Asked, largest_only: bool = False
) -> StageLedger:
    """Plan the buckets of a stage as asked.

    Args:
        planner: Plans them.
        part: What a rank of the stage holds.
        asked: What it is asked to hold.
        largest_only: Plan the largest bucket of each phase alone, the others when they are needed:
            it decides the sizes of the arena and of io.

    Raises:
        PlanError: A plan breaks a rule, or the state is larger than its symbols allow.
    """
    buckets = make_buckets(cache_info(asked), planner.target, asked.chunk_tokens)
    if largest_only:
        buckets = _largest_of_phases(buckets)
    base = planner.plan(part.mesh, part.stage, buckets)
    plans = {plan.bucket.name: plan for plan in base.plans}
    return StageLedger(planner, part, asked, base, largest_only, plans)


def _largest_of_phases(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Return the last bucket of each phase: they ascend."""
    return tuple({bucket.phase: bucket for bucket in buckets}.values())


def bucket_lines(ledger: StageLedger) -> tuple[BucketLine, ...]:
    """Return every bucket as asked, dropped ones with the reason."""
    kept, target = ledger.kept(ledger.asked.requests), ledger.planner.target
    return tuple(
        BucketLine(
            plan.bucket.name,
            plan.bucket.dims["T"],
            plan.bucket.dims["B"],
            plan.space_bytes["arena"],
            plan.arena_lower_bound_bytes,
            plan.estimates["launches"],
            graph_bytes(target, plan.estimates["launches"]),
            plan.bucket.name in kept.names,
            kept.dropped.get(plan.bucket.name, ""),
        )
        for plan in ledger.base.plans
    )


def _cost(plan: Plan) -> BucketCost:
    estimates: Mapping[str, int] = plan.estimates
    name, phase, rows = plan.bucket.name, plan.bucket.phase, plan.bucket.dims["T"]
    return BucketCost(name, phase, rows, estimates["launches"], estimates["floor_us"])


def _most(plans: Sequence[Plan], space: str) -> int:
    return max(plan.space_bytes.get(space, 0) for plan in plans)


def _io_bytes(plans: Sequence[Plan], request_pages: int) -> int:
    """Return the io bytes of all buckets with page tables of `request_pages` pages a request."""
    return max(_io_of(plan, request_pages) for plan in plans)


def _io_of(plan: Plan, request_pages: int) -> int:
    planned = plan.space_bytes["io"]
    if all(field_.name != "page_table" for field_ in plan.io):
        return planned
    requests, pages = plan.bucket.dims["B"], plan.bucket.dims["M"]
    table = [aligned(requests * n * quick.I32_BYTES) for n in (pages, request_pages)]
    return planned - table[0] + table[1]


def _weights_note(ledger: StageLedger) -> str:
    padding = ledger.base.padding_bytes
    total = ledger.base.weights.total_bytes
    return f"padding of layouts {padding / total:.2%}"
