"""The answer to a request that may fit: meshes timed node by node, the best one planned exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from k3c.errors import CodegenError, PassError
from k3c.mesh_limits import problems
from k3c.planner import search
from k3c.planner.answer import Answer, Choice, Speed
from k3c.planner.capacity import StageLedger, open_ledger
from k3c.planner.describe import gib, ms
from k3c.planner.exact import make_planner
from k3c.planner.problem import Problem
from k3c.planner.refusing import unplanned
from k3c.planner.search import MESSAGE_US, SHORT_LIST, Quick
from k3c.planner.timing import Clock, Pace, Wants, pace, speed
from k3c.targets.mesh import Mesh

# Of two ways to share a part, the one that reads so much longer is not estimated node by node.
CLEARLY_SLOWER_US = 20 * MESSAGE_US
FAILURES = 2  # meshes of one way of sharing that are tried though none of it can be lowered
CHOICES = ("latent", "shared", "vocabulary")


@dataclass(frozen=True)
class Timed:
    """A mesh whose decode steps were estimated node by node."""

    quick: Quick
    pace: Pace

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.quick.mesh


@dataclass(frozen=True)
class Planned:
    """A mesh whose ranks were planned: the books of every stage."""

    timed: Timed
    ledgers: tuple[StageLedger, ...]

    @property
    def fullest(self) -> StageLedger:
        """The stage with the fewest free bytes."""
        return min(self.ledgers, key=lambda ledger: ledger.memory().free_bytes)

    @property
    def fits(self) -> bool:
        """Whether every stage fits."""
        return self.fullest.memory().free_bytes >= 0


@dataclass(frozen=True)
class Desk:
    """What planning one problem needs at hand, and why meshes could not be lowered."""

    problem: Problem
    clock: Clock
    refused: dict[Mesh, str] = field(default_factory=dict)

    @property
    def wants(self) -> Wants:
        """What times are given for."""
        request = self.problem.request
        return Wants(
            request.input_len, request.output_len, request.max_num_seqs,
            request.max_num_batched_tokens,
        )  # fmt: skip

    def time(self, found: Quick) -> Timed:
        """Estimate the steps of a mesh."""
        return Timed(found, pace(self.clock, found.mesh, self.wants))

    def speed(self, mesh: Mesh) -> Speed:
        """Return all times and rates of a mesh."""
        return speed(self.clock, mesh, self.wants)

    def time_mesh(self, mesh: Mesh) -> Timed:
        """Estimate the steps of a mesh that closed forms have not seen."""
        return self.time(search.evaluate(self.problem, mesh))

    def plan(self, timed: Timed, largest_only: bool = False) -> Planned:
        """Plan every stage of a mesh: all buckets, or the largest of each phase alone."""
        problem, planner = self.problem, self.clock.planner
        parts = search.parts(problem.config, timed.mesh, problem.options.spare_slots)
        books = (open_ledger(planner, p, problem.asked, largest_only) for p in parts)
        return Planned(timed, tuple(books))

    def score(self, timed: Timed) -> tuple[float, ...]:
        """Return what the goal makes smallest."""
        key, found = search.order(timed.mesh), timed.pace
        if self.problem.request.goal == "fit":
            return (timed.mesh.ranks, found.tpot_us.value, *key)
        if self.problem.request.goal == "throughput":
            return (-found.gpu_milli.value, *key)
        return (found.tpot_us.value, *key)


def plan_exactly(problem: Problem, ranked: Sequence[Quick]) -> Answer:
    """Return the answer with plans, times and changes.

    Args:
        problem: What is asked.
        ranked: Meshes that may fit, best first by closed forms.

    Raises:
        ExportError: The model uses something that the IR cannot express.
        PlanError: A plan breaks a rule of the checker.
    """
    from k3c.planner.assembling import assemble

    planner = make_planner(problem.config, problem.machine.target, problem.request.compute)
    desk = Desk(problem, Clock(planner, problem.machine))
    timed = sorted(_compiled(desk, ranked), key=desk.score)
    if not timed:
        return unplanned(problem, ranked, desk.refused)
    tried: list[Planned] = []
    for candidate in timed:
        best, choices = choose(desk, candidate)
        tried.append(desk.plan(best))
        if tried[-1].fits:
            return assemble(desk, tried[-1], choices, (timed, ranked))
    # Closed forms let something through that the plan does not: a few megabytes are missing.
    nearest = max(tried, key=lambda p: p.fullest.memory().free_bytes)
    return assemble(desk, nearest, (), (timed, ranked))


def _compiled(desk: Desk, ranked: Sequence[Quick]) -> list[Timed]:
    """Time the best meshes of those that the compiler can lower.

    A way of sharing that failed twice is not tried again.
    """
    found: list[Timed] = []
    failed = Counter[tuple[bool, ...]]()
    for candidate in ranked:
        mesh = candidate.mesh
        way = mesh.ep > 1, mesh.dp > 1, mesh.pp > 1
        if failed[way] == FAILURES:
            desk.refused[mesh] = "a mesh of its kind cannot be lowered"
            continue
        try:
            found.append(desk.time(candidate))
        except (PassError, CodegenError) as error:
            failed[way] += 1
            desk.refused[mesh] = error.what
        if len(found) == SHORT_LIST:
            break
    return found


def choose(desk: Desk, timed: Timed) -> tuple[Timed, tuple[Choice, ...]]:
    """Decide what is shared and what replicated, each by the cost of the other way."""
    best, choices = timed, list[Choice]()
    for name in CHOICES:
        if timed.mesh.tp == 1:
            continue
        said = getattr(desk.problem.options, name)
        if said != "auto":
            choices.append(Choice(name, said, "asked for"))
            continue
        best, choice = _toggle(desk, best, name)
        choices.append(choice)
    return best, tuple(choices)


def _toggle(desk: Desk, timed: Timed, name: str) -> tuple[Timed, Choice]:
    """Compare a mesh with its other way of one choice."""
    here = getattr(timed.mesh, name)
    there = "sharded" if here == "replicated" else "replicated"
    mesh = replace(timed.mesh, **{name: there})
    broken = problems(desk.problem.config, mesh)
    if broken:
        return timed, Choice(name, here, f"{there} is not possible: {broken[0]}")
    by_form = search.evaluate(desk.problem, mesh)
    memory = by_form.free_bytes - timed.quick.free_bytes
    slower_us = by_form.decode_us - timed.quick.decode_us
    if by_form.free_bytes < 0:
        return timed, Choice(name, here, f"{there} does not fit")
    if memory < 0 and slower_us > CLEARLY_SLOWER_US:
        # No message that it saves makes up for the bytes that it reads.
        why = f"{there} reads {ms(slower_us)} more a token and is {gib(-memory)} a rank larger"
        return timed, Choice(name, here, why)
    try:
        other = desk.time(by_form)
    except (PassError, CodegenError) as error:
        return timed, Choice(name, here, f"{there} is not possible: {error.what}")
    saved = timed.pace.tpot_us.value - other.pace.tpot_us.value
    better = desk.score(other) < desk.score(timed)
    taken, value, left = (other, there, here) if better else (timed, here, there)
    sign = 1 if better else -1
    pace = f"{ms(abs(saved))} a token {'faster' if sign * saved > 0 else 'slower'}"
    room = f"{gib(abs(memory))} a rank {'smaller' if sign * memory >= 0 else 'larger'}"
    return taken, Choice(name, value, f"{pace if saved else 'as fast'} and {room} than {left}")
