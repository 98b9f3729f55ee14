"""The answer to a request that cannot fit, from closed forms alone: in well under two seconds.

It says what is missing, the largest legal numbers, and the nearest things that would work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from k3c import __version__
from k3c.planner import quick, search
from k3c.planner.answer import (
    FORMAT,
    Answer,
    Capacity,
    Change,
    Choice,
    MemoryLine,
    StageMemory,
)
from k3c.planner.describe import (
    SHOWN_CANDIDATES,
    candidate,
    deployment,
    expert_choice,
    gib,
    misfits,
    short_name,
    warnings,
)
from k3c.planner.graphs import reserve_bytes
from k3c.planner.limits import Legal, capacity
from k3c.planner.lines import draft_lines, kind_lines, spare_bytes, spare_lines, state_lines
from k3c.planner.problem import Problem, decode_size
from k3c.planner.quick import Load, Part
from k3c.planner.search import Quick
from k3c.targets.mesh import Mesh

# What the exact plan has beyond the lower bound and the padding of layouts: small io fields and
# alignment. A number is called legal only with this much to spare.
UNSEEN_BYTES = 2**20
# With few ranks, or narrow columns of experts, another layer than the experts' may need the most
# scratch: so many bytes more for each row of a prefill step.
ALONE_ROW_BYTES, OTHER_ROW_BYTES = 224 * 1024, 4 * 1024
FEW_RANKS, NARROW_FROM = 4, 16


def refuse(problem: Problem, meshes: Sequence[Mesh]) -> Answer:
    """Return why nothing fits, for the mesh that is nearest to fitting."""
    seen = [search.evaluate(problem, mesh) for mesh in meshes]
    best = max(seen, key=lambda q: (q.free_bytes, -q.mesh.ranks, str(q.mesh)))
    answer = _answer(problem, best.mesh, len(meshes))
    answer = replace(answer, candidates=misfits(seen))
    return replace(answer, verdict=verdict(answer))


def unplanned(problem: Problem, ranked: Sequence[Quick], reasons: Mapping[Mesh, str]) -> Answer:
    """Return what closed forms say of meshes that the compiler cannot lower, for the best one.

    Args:
        problem: What is asked.
        ranked: Meshes that may fit, best first.
        reasons: Why each of those that were tried cannot be lowered.
    """
    best = ranked[0]
    room = best.free_bytes - unseen_bytes(problem, best.mesh)
    answer = replace(_answer(problem, best.mesh, len(ranked)), fits=room >= 0)
    rows = [candidate(q, reasons.get(q.mesh, "not planned")) for q in ranked[:SHOWN_CANDIDATES]]
    reason = reasons[best.mesh]
    words = f"{gib(room)} a rank free at most" if room >= 0 else "a rank may be full"
    text = f"may fit on {answer.deployment.name} of {answer.request.target}, {words}"
    text += f"; by closed forms alone, the compiler cannot lower it: {reason}"
    return replace(answer, verdict=text, candidates=tuple(rows), changes=())


def _answer(problem: Problem, mesh: Mesh, count: int) -> Answer:
    """Return the answer of closed forms for a mesh; its verdict is left open."""
    part = _fullest(problem, mesh)
    parts = search.parts(problem.config, mesh, problem.options.spare_slots)
    limits = capacity(problem, part, legal_of(problem, mesh))
    return Answer(
        format=FORMAT,
        k3c_version=__version__,
        request=problem.request,
        fits=False,
        verdict="",
        source="quick",
        deployment=deployment(problem, mesh),
        choices=(
            Choice("mesh", short_name(mesh), _why(problem, count)),
            *expert_choice(problem, mesh),
        ),
        stages=tuple(_memory(problem, part) for part in parts),
        kinds=kind_lines(problem.asked, part, None),
        buckets=(),
        capacity=limits,
        speed=(),
        changes=changes(problem, mesh, limits),
        candidates=(),
        warnings=warnings(problem, mesh, 1.0),
    )


def verdict(answer: Answer) -> str:
    """Return the sentence of a plan that does not fit: both numbers, and the largest legal one."""
    full, asked, limits = answer.fullest, answer.request, answer.capacity
    least = "at least " if answer.source == "quick" else ""
    what = (
        f"does not fit: {asked.max_num_seqs:,} requests of {asked.max_model_len:,} tokens need "
        f"{least}{gib(full.total_bytes)} of {gib(full.device_bytes)} a rank on "
        f"{answer.deployment.name} of {asked.target}, {gib(-full.free_bytes)} too much"
    )
    if limits.max_num_seqs:
        return f"{what}; largest legal --max-num-seqs is {limits.max_num_seqs}"
    if limits.max_model_len:
        return f"{what}; largest legal --max-model-len is {limits.max_model_len}"
    works = [change.option for change in answer.changes if change.fits]
    nearest = f"; nearest that would: {works[0]}" if works else ""
    return f"{what}; weights and scratch alone do not fit{nearest}"


def _why(problem: Problem, count: int) -> str:
    if problem.mesh is not None:
        return "named by --mesh"
    return f"of {count} legal meshes the nearest to fitting"


def _fullest(problem: Problem, mesh: Mesh) -> Part:
    parts = search.parts(problem.config, mesh, problem.options.spare_slots)
    return max(parts, key=lambda part: (_total(problem, part), -part.stage))


def _load(problem: Problem) -> Load:
    asked = problem.asked
    size = decode_size(problem.machine.target, asked.requests)
    return asked.load(asked.requests, asked.context_tokens, size)


def _total(problem: Problem, part: Part) -> int:
    return search.total_lower_bytes(part, problem.asked, problem.machine, _load(problem))


def _memory(problem: Problem, part: Part) -> StageMemory:
    """Return the lower bounds of a rank's memory."""
    asked, load, mesh = problem.asked, _load(problem), part.mesh
    lines = [
        MemoryLine("weights", _weights(part), False, "without padding"),
        *spare_lines(part),
        MemoryLine("activations", quick.scratch_lower_bytes(part, load), False, "at least"),
        MemoryLine("io", quick.io_lower_bytes(part, load), False, "at least"),
        *state_lines(part, load),
        *draft_lines(asked, part, load),
        MemoryLine("driver", reserve_bytes(problem.machine.target), False, "with graphs"),
    ]
    total, device = sum(line.nbytes for line in lines), search.device_bytes(problem.machine)
    return StageMemory(
        part.stage, part.layers.start, part.layers.stop, mesh.ranks // mesh.pp, tuple(lines),
        total, device, device - total,
    )  # fmt: skip


def _weights(part: Part) -> int:
    return sum(quick.weight_bytes(part).values()) - spare_bytes(part)


def legal_of(problem: Problem, mesh: Mesh) -> Legal:
    """Return what says whether so many requests of so many tokens surely fit."""

    def legal(requests: int, tokens: int) -> bool:
        return search.free_bytes(problem, mesh, requests, tokens) >= unseen_bytes(problem, mesh)

    return legal


def unseen_bytes(problem: Problem, mesh: Mesh) -> int:
    """Return how much more than its lower bound a rank may need."""
    parts = search.parts(problem.config, mesh, 0)
    padding = max(map(quick.layout_padding_bytes, parts))
    other = mesh.tp < FEW_RANKS or (mesh.ep == 1 and mesh.tp >= NARROW_FROM)
    row = ALONE_ROW_BYTES if mesh.tp == 1 else OTHER_ROW_BYTES * other
    # Rows of all data-parallel ranks may come to the experts of one: no token is dropped.
    config, act = problem.config, problem.asked.act_bytes
    width = config.routed_expert_hidden_size + config.moe_intermediate_size
    gathered = (mesh.dp - 1) * config.num_experts_per_token * width * act if mesh.ep > 1 else 0
    return padding + UNSEEN_BYTES + (row + gathered) * problem.asked.chunk_tokens


def changes(problem: Problem, mesh: Mesh, limits: Capacity) -> tuple[Change, ...]:
    """Return the nearest things that would work."""
    found: list[Change] = []
    if limits.max_num_seqs:
        found.append(_smaller(problem, mesh, "--max-num-seqs", limits.max_num_seqs))
    if limits.max_model_len:
        found.append(_smaller(problem, mesh, "--max-model-len", limits.max_model_len))
    sharded = replace(mesh, latent="sharded")
    free = search.free_bytes(problem, sharded)
    if mesh.latent != "sharded" and free >= unseen_bytes(problem, sharded):
        found.append(_change(problem, sharded, "--latent sharded", free))
    other = search.smallest(problem)
    if other is not None and other.ranks != mesh.ranks:
        name, free = short_name(other), search.free_bytes(problem, other)
        there = problem.machine.ranks
        where = f"the machine has {there}" if other.ranks > there else f"of {there}"
        option = f"--mesh {other}" if other.ranks <= there else f"{name} on a larger machine"
        found.append(_change(problem, other, option, free, f"{other.ranks} ranks, {where}"))
    return tuple(found[:3])


def _smaller(problem: Problem, mesh: Mesh, option: str, value: int) -> Change:
    seqs = value if option == "--max-num-seqs" else 0
    tokens = value if option == "--max-model-len" else 0
    free = search.free_bytes(problem, mesh, seqs, tokens)
    return _change(problem, mesh, f"{option} {value}", free)


def _change(problem: Problem, mesh: Mesh, option: str, free: int, more: str = "") -> Change:
    effect = f"fits with {gib(free)} free" + (f": {more}" if more else "")
    seqs = problem.asked.requests * mesh.dp
    return Change(option, effect, True, free, seqs, 0, 0)
