"""The ordered list of passes, and how each one is run, checked and recorded.

Per pass: check what it requires, run it, verify the module, check what it ensures, compare its
matches with what the module lets expect, record. Per bucket come select_kernels, schedule and
plan_memory, which make a plan and no module.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from k3c.errors import PassError
from k3c.ir.edit import Index
from k3c.ir.graph import Graph, Module
from k3c.ir.refusal import Refusal
from k3c.ir.rewrite import Refused, RewriteLog, Rule
from k3c.ir.text import show
from k3c.ir.verify import verify
from k3c.passes import (
    add_advance,
    canonicalize,
    fuse_attn_res,
    fuse_epilogue,
    fuse_forget_gate,
    fuse_kda,
    fuse_norm_linear,
    fuse_projections,
    fuse_route,
    layout_mxfp4,
    lower_mla,
    lower_moe,
    shard,
)
from k3c.passes.context import Condition, PassContext


class Pass(Protocol):
    """What a pass module holds.

    REQUIRED: fewer matches than expected are an error, not a line in a report.
    ANCHORS: ops of which none should be left; one that is left without a refusal gets one.
    """

    NAME: str
    REQUIRES: tuple[Condition, ...]
    ENSURES: tuple[Condition, ...]
    RULES: tuple[Rule, ...]
    REQUIRED: bool
    ANCHORS: tuple[str, ...]

    def expected(self, module: Module) -> int | None:
        """Return the number of matches that a module lets expect; None where it says nothing."""
        ...

    def run(self, module: Module, ctx: PassContext) -> Module:
        """Return the new module; matches and refusals go to `ctx.log`."""
        ...


PIPELINE: tuple[Pass, ...] = cast(
    "tuple[Pass, ...]",
    (
        canonicalize,
        shard,
        fuse_attn_res,
        fuse_projections,
        fuse_kda,
        fuse_forget_gate,
        lower_mla,
        lower_moe,
        fuse_route,
        fuse_epilogue,
        fuse_norm_linear,
        add_advance,
        layout_mxfp4,
    ),
)


@dataclass(frozen=True)
class PassRecord:
    """What one pass did. `ms` differs from run to run: keep it out of artifacts."""

    name: str
    ms: float
    nodes_before: int
    nodes_after: int
    expected: int | None
    matches: Mapping[str, int]
    refusals: tuple[Refused, ...]

    @property
    def total(self) -> int:
        """Number of matches of all rules."""
        return sum(self.matches.values())

    @property
    def dropped(self) -> int:
        """How many expected matches did not happen."""
        return max(0, (self.expected or 0) - self.total)

    def facts(self) -> dict[str, object]:
        """Return what `k3c inspect --passes` prints, reproducible: no times."""
        refusals = [
            {"graph": r.graph, "rule": r.rule, "value": r.value, "reason": str(r.refusal)}
            for r in self.refusals
        ]
        return {
            "name": self.name,
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "expected": self.expected,
            "matches": dict(sorted(self.matches.items())),
            "refusals": refusals,
        }


@dataclass(frozen=True)
class PipelineResult:
    """The module after the last pass, a record of each, and the IR after each by member name."""

    module: Module
    records: tuple[PassRecord, ...]
    texts: Mapping[str, str]


def run_pipeline(
    module: Module, ctx: PassContext, passes: Sequence[Pass] = PIPELINE
) -> PipelineResult:
    """Run passes in order.

    Args:
        module: A verified module of level model.
        ctx: Target and catalogue.
        passes: The whole pipeline, or its start.

    Raises:
        PassError: A pass broke a condition, or a required fusion did not happen everywhere.
        VerifyError: A module, the given one or a pass's, breaks a rule of the IR.
    """
    verify(module)
    records: list[PassRecord] = []
    texts: dict[str, str] = {}
    for number, step in enumerate(passes, 1):
        module, record = run_pass(step, module, ctx)
        records.append(record)
        texts[f"ir/{number:02}-{step.NAME}.k3"] = show(module)
    return PipelineResult(module, tuple(records), texts)


def run_pass(step: Pass, module: Module, ctx: PassContext) -> tuple[Module, PassRecord]:
    """Run one pass with every check around it.

    Raises:
        PassError: As for `run_pipeline`.
        VerifyError: The pass made a module that breaks a rule of the IR.
    """
    _check(step, "requires", step.REQUIRES, module)
    log = RewriteLog()
    start = time.perf_counter()
    after = step.run(module, replace(ctx, log=log))
    ms = 1000 * (time.perf_counter() - start)
    refusals = (*log.refused, *_silent_misses(step, after, log))
    counts = _nodes(module), _nodes(after)
    matches = dict(sorted(log.matches.items()))
    record = PassRecord(step.NAME, ms, *counts, step.expected(module), matches, refusals)
    if step.REQUIRED and record.dropped:
        raise _dropped(record)
    verify(after)
    _check(step, "ensures", step.ENSURES, after)
    return after, record


def _check(step: Pass, verb: str, conditions: tuple[Condition, ...], module: Module) -> None:
    for condition in conditions:
        problem = condition.check(module)
        if problem:
            what = f"pass {step.NAME} {verb} {condition.name}: {problem}"
            raise PassError(what, f"pass {step.NAME}", "see the IR of the pass before")


def _dropped(record: PassRecord) -> PassError:
    reasons = "; ".join(f"@{r.graph} %{r.value}: {r.refusal}" for r in record.refusals)
    what = f"pass {record.name} matched {record.total} of {record.expected} sites"
    return PassError(what, f"pass {record.name}", reasons or "no rule gave a reason")


def _silent_misses(step: Pass, module: Module, log: RewriteLog) -> list[Refused]:
    """Give every anchor that is left a refusal, so that no miss goes unseen."""
    missed: list[Refused] = []
    for graph in module.graphs:
        for node in graph.nodes:
            name = node.results[0].name
            if node.op in step.ANCHORS and not _explained(graph, name, log):
                refusal = Refusal(f"no pattern fits this {node.op}")
                missed.append(Refused(graph.name, "none", name, refusal))
    return missed


def _explained(graph: Graph, value: str, log: RewriteLog) -> bool:
    """Whether a refusal names the value or one computed from it."""
    index = Index(graph)
    below, queue = {value}, [value]
    while queue:
        for position in index.readers.get(queue.pop(), []):
            names = [v.name for v in graph.nodes[position].results]
            queue += [name for name in names if name not in below]
            below |= set(names)
    return any(r.graph == graph.name and r.value in below for r in log.refused)


def _nodes(module: Module) -> int:
    return sum(len(graph.nodes) for graph in module.graphs)
