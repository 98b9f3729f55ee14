"""What both kinds of answer say in the same words: how a machine is used, which meshes exist."""

from __future__ import annotations

from collections.abc import Sequence

from k3c.planner import quick
from k3c.planner.answer import Candidate, Choice, Deployment
from k3c.planner.problem import Problem
from k3c.planner.quick import Part
from k3c.planner.search import Quick
from k3c.targets.mesh import Mesh

SHOWN_CANDIDATES = 8
PADDING_LIMIT = 1.05  # bytes of a layout over bytes of its tensor: above it the layout is suspect


def gib(nbytes: int) -> str:
    """Return bytes in GiB, with one decimal; below a tenth in MiB."""
    if abs(nbytes) < 2**30 / 10:
        return f"{nbytes / 2**20:.1f} MiB"
    return f"{nbytes / 2**30:,.1f} GiB"


def ms(us: float) -> str:
    """Return microseconds as milliseconds or seconds, with three digits."""
    if us >= 1e6:
        return f"{us / 1e6:,.3g} s" if us < 1e9 else f"{us / 1e6:,.0f} s"
    return f"{us / 1e3:.3g} ms"


def short_name(mesh: Mesh) -> str:
    """Return the field's short name of a mesh: TP8, TEP16, DEP64, TP8xPP2, TP8xDP9xEP72."""
    shared = mesh.ep > 1
    if mesh.dp == 1:
        parts = [f"{'TEP' if shared else 'TP'}{mesh.tp}"]
    elif mesh.tp == 1:
        parts = [f"{'DEP' if shared else 'DP'}{mesh.dp}"]
    else:
        parts = [f"TP{mesh.tp}", f"DP{mesh.dp}", *([f"EP{mesh.ep}"] if shared else [])]
    parts += [f"PP{mesh.pp}"] if mesh.pp > 1 else []
    return "x".join(parts)


def deployment(problem: Problem, mesh: Mesh) -> Deployment:
    """Return how the machine is used with a mesh."""
    ranks, config = problem.machine.ranks, problem.config
    replicas = ranks // mesh.ranks
    physical = Part(config, mesh, 0, problem.options.spare_slots).physical_experts
    extra = physical * mesh.ep - config.num_experts if mesh.ep > 1 else 0
    return Deployment(
        mesh=str(mesh),
        name=short_name(mesh),
        tp=mesh.tp,
        ep=mesh.ep,
        dp=mesh.dp,
        pp=mesh.pp,
        latent=mesh.latent,
        shared=mesh.shared,
        vocabulary=mesh.vocabulary,
        ranks=mesh.ranks,
        replicas=replicas,
        spare_ranks=ranks - replicas * mesh.ranks if replicas else 0,
        physical_experts=physical,
        expert_replicas=extra,
    )


def expert_choice(problem: Problem, mesh: Mesh) -> tuple[Choice, ...]:
    """Return how many physical experts a rank has, and what replicas cost, where there are any."""
    used, config = deployment(problem, mesh), problem.config
    if not used.expert_replicas:
        return ()
    layers = sum(map(config.is_moe, range(config.num_hidden_layers)))
    each = quick.expert_bytes(config, mesh)
    why = (
        f"{config.num_experts} on {mesh.ep} ranks leave {used.expert_replicas} replicas x "
        f"{gib(each)} x {layers} layers, {gib(each * layers)} for each slot of a rank"
    )
    return (Choice("experts", f"{used.physical_experts} a rank", why),)


def candidate(found: Quick, why: str) -> Candidate:
    """Return a mesh that closed forms alone judged."""
    mesh, fits = found.mesh, found.free_bytes >= 0
    return Candidate(
        short_name(mesh), str(mesh), mesh.ranks, found.replicas, fits, found.free_bytes,
        round(found.decode_us), round(found.gpu_rate * 1000), why, "quick",
    )  # fmt: skip


def misfits(found: Sequence[Quick]) -> tuple[Candidate, ...]:
    """Return meshes that do not fit, the nearest to fitting first."""
    near = sorted(found, key=lambda q: (-q.free_bytes, str(q.mesh)))[:SHOWN_CANDIDATES]
    return tuple(candidate(q, f"{gib(-q.free_bytes)} too little on a rank") for q in near)


def warnings(problem: Problem, mesh: Mesh, padded: float) -> tuple[str, ...]:
    """Return what to look at: the machine's warnings, padding, ranks that nothing uses.

    Args:
        problem: What is asked.
        mesh: The mesh.
        padded: Bytes of the packed weights over bytes of their tensors; 1 where it is not known.
    """
    found = list(problem.machine.warnings)
    if padded > PADDING_LIMIT:
        limit = f"{PADDING_LIMIT - 1:.0%}"
        found.append(f"layouts add {padded - 1:.1%} to the weights, more than {limit}")
    used = deployment(problem, mesh)
    if used.replicas and used.spare_ranks:
        found.append(f"{used.spare_ranks} of {problem.machine.ranks} ranks are spare")
    return tuple(found)
