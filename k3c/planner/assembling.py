"""From books and times to the answer that is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3c import __version__
from k3c.planner.answer import FORMAT, Answer, Candidate, Choice, Seen
from k3c.planner.capacity import bucket_lines
from k3c.planner.changes import largest_changes
from k3c.planner.describe import (
    SHOWN_CANDIDATES,
    candidate,
    deployment,
    expert_choice,
    gib,
    ms,
    short_name,
    warnings,
)
from k3c.planner.limits import Legal, capacity
from k3c.planner.lines import kind_lines
from k3c.planner.planned import Desk, Planned, Timed
from k3c.planner.refusing import verdict
from k3c.planner.search import Quick

Met = tuple[Sequence[Timed], Sequence[Quick]]


def assemble(desk: Desk, planned: Planned, choices: tuple[Choice, ...], seen: Met) -> Answer:
    """Return the answer.

    Args:
        desk: The problem, and what times it.
        planned: The mesh that was taken, or the one nearest to fitting.
        choices: What was decided for it.
        seen: Meshes that were timed, best first, and all that closed forms let through.
    """
    problem, full = desk.problem, planned.fullest
    weights, padding = full.base.weights.total_bytes, full.base.padding_bytes
    mesh = planned.timed.mesh
    limits = capacity(problem, full.part, legal_of(planned))
    answer = Answer(
        format=FORMAT,
        k3c_version=__version__,
        request=problem.request,
        fits=planned.fits,
        verdict="",
        source="exact",
        deployment=deployment(problem, mesh),
        choices=(
            Choice("mesh", short_name(mesh), _why(desk, planned, seen)),
            *choices,
            *expert_choice(problem, mesh),
        ),
        stages=tuple(ledger.memory() for ledger in planned.ledgers),
        kinds=kind_lines(problem.asked, full.part, weights),
        buckets=bucket_lines(full),
        capacity=limits,
        speed=(desk.speed(mesh),),
        changes=largest_changes(desk, planned, limits, seen[0]),
        candidates=_candidates(desk, seen, planned),
        warnings=warnings(problem, mesh, weights / (weights - padding)),
    )
    return replace(answer, verdict=_fits(answer) if answer.fits else verdict(answer))


def legal_of(planned: Planned) -> Legal:
    """Return what says whether so many requests of so many tokens fit every stage."""

    def legal(requests: int, tokens: int) -> bool:
        return all(ledger.fits(requests, tokens) for ledger in planned.ledgers)

    return legal


def _fits(answer: Answer) -> str:
    full, asked, used = answer.fullest, answer.request, answer.deployment
    total = asked.max_num_seqs * used.dp * max(used.replicas, 1)
    return (
        f"fits: {total:,} requests of {asked.max_model_len:,} tokens on {used.name} of "
        f"{asked.target}, {gib(full.free_bytes)} of {gib(full.device_bytes)} a rank free"
    )


def _why(desk: Desk, planned: Planned, seen: Met) -> str:
    """Say why this mesh."""
    if desk.problem.mesh is not None:
        return "named by --mesh"
    goal = desk.problem.request.goal
    others = [t for t in seen[0] if short_name(t.mesh) != short_name(planned.timed.mesh)]
    count = len(seen[1])
    if not others:
        return f"the only one of {count} that fits"
    here, best = planned.timed.pace, min(others, key=desk.score)
    next_name = short_name(best.mesh)
    if goal == "fit":
        return f"fewest ranks of {count} that may fit; next {next_name} on {best.mesh.ranks}"
    if goal == "throughput":
        rates = here.gpu_milli.value / 1e3, best.pace.gpu_milli.value / 1e3
        return f"{rates[0]:,.1f} tokens/s per GPU, next {next_name} {rates[1]:,.1f}; {count} fit"
    times = ms(here.tpot_us.value), ms(best.pace.tpot_us.value)
    return f"{times[0]} a token, next {next_name} {times[1]}; {count} meshes fit"


def _candidates(desk: Desk, seen: Met, planned: Planned) -> tuple[Candidate, ...]:
    """Return the taken mesh, then the timed ones, then the best of the rest by closed forms."""
    timed, ranked = seen
    taken = planned.timed
    rows = [_timed(taken, "taken" if planned.fits else "nearest to fitting", "exact")]
    mine = {short_name(taken.mesh)}
    for other in timed:
        if short_name(other.mesh) not in mine:
            rows.append(_timed(other, "timed node by node: worse for the goal", "timed"))
            mine.add(short_name(other.mesh))
    rest = [q for q in ranked if short_name(q.mesh) not in mine]
    worse = "worse for the goal by closed forms"
    rows += [candidate(q, desk.refused.get(q.mesh, worse)) for q in rest]
    return tuple(rows[:SHOWN_CANDIDATES])


def _timed(timed: Timed, why: str, source: Seen) -> Candidate:
    return replace(
        candidate(timed.quick, why),
        tpot_us=timed.pace.tpot_us.value,
        gpu_milli=timed.pace.gpu_milli.value,
        source=source,
    )
