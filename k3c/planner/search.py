"""Meshes for a machine: which are legal, which can hold what is asked, which look best.

Closed forms only: a whole rack's meshes take milliseconds. What is left is few enough to plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from k3c.errors import PlacementError
from k3c.mesh_limits import problems
from k3c.model.config import TextConfig
from k3c.planner import quick
from k3c.planner.draft import draft_weight_bytes, record_bytes
from k3c.planner.graphs import reserve_bytes
from k3c.planner.problem import Asked, Problem, decode_size
from k3c.planner.quick import Load, Part
from k3c.targets.mesh import Mesh
from k3c.targets.topology import Topology

TP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
PP_SIZES = (1, 2, 3, 4)
# Of the meshes that closed forms allow, so many are estimated node by node.
SHORT_LIST = 4
# One message of a decode step between a few GPUs, microseconds: the best public rows of an
# all-reduce of one token, 2.6 us on two H200s to 4.2 us on four GB300s.
MESSAGE_US = 4.2


@dataclass(frozen=True)
class Quick:
    """A mesh by closed forms.

    Attributes:
        mesh: The mesh.
        free_bytes: Bytes free on the fullest rank at most; negative: it surely does not fit.
        decode_us: Floor of a decode step.
        gpu_rate: Output tokens per second and GPU of the machine at that floor.
        replicas: Replicas of the deployment in the machine.
    """

    mesh: Mesh
    free_bytes: int
    decode_us: float
    gpu_rate: float
    replicas: int


def parts(config: TextConfig, mesh: Mesh, spare_slots: int) -> tuple[Part, ...]:
    """Return what a rank of each pipeline stage holds."""
    return tuple(Part(config, mesh, stage, spare_slots) for stage in range(mesh.pp))


def total_lower_bytes(part: Part, asked: Asked, machine: Topology, load: Load) -> int:
    """Return a lower bound of all bytes of a rank, the driver's and the draft's included."""
    total = quick.total_lower_bytes(part, load) + reserve_bytes(machine.target)
    draft = asked.draft
    if draft is not None:
        records = record_bytes(
            part.config, part.mesh.tp, part.kda_layers, draft.width, load.act_bytes
        )
        total += (load.requests + 1) * records
        if part.is_last:
            total += draft_weight_bytes(draft, part.mesh.tp)
            total += load.pages * load.page_tokens * draft.token_bytes
    return total


def free_bytes(problem: Problem, mesh: Mesh, requests: int = 0, context_tokens: int = 0) -> int:
    """Return at most how many bytes are free on the fullest rank; negative: it does not fit.

    Args:
        problem: What is asked.
        mesh: The mesh.
        requests: Requests of a data-parallel rank; 0: as asked.
        context_tokens: Tokens of each; 0: as asked.
    """
    asked, target = problem.asked, problem.machine.target
    requests = requests or asked.requests
    load = asked.load(
        requests, context_tokens or asked.context_tokens, decode_size(target, requests)
    )
    totals = [
        total_lower_bytes(part, asked, problem.machine, load)
        for part in parts(problem.config, mesh, problem.options.spare_slots)
    ]
    return device_bytes(problem.machine) - max(totals)


def device_bytes(machine: Topology) -> int:
    """Return the memory of one device, with what is kept for the driver."""
    return machine.target.memory_bytes + reserve_bytes(machine.target)


def evaluate(problem: Problem, mesh: Mesh) -> Quick:
    """Return a mesh by closed forms."""
    ranks = problem.machine.ranks
    replicas = max(1, ranks // mesh.ranks)
    us = decode_floor_us(problem, mesh)
    tokens = problem.asked.requests * mesh.dp * replicas
    rate = tokens * 1e6 / us / max(ranks, mesh.ranks)
    return Quick(mesh, free_bytes(problem, mesh), us, rate, replicas)


def decode_floor_us(problem: Problem, mesh: Mesh) -> float:
    """Return the floor of a decode step: bytes of all stages, and two messages a layer.

    Distinct experts under even routing, as in the rank slices of performance.md 2.3.
    """
    asked, config, request = problem.asked, problem.config, problem.request
    context = request.input_len + request.output_len // 2
    total, share = 0.0, -(-asked.requests // mesh.pp)
    for part in parts(config, mesh, 0):
        weights = quick.weight_bytes(part)
        missed = (1 - config.num_experts_per_token / config.num_experts) ** (share * mesh.dp)
        read = sum(n for kind, n in weights.items() if kind not in ("experts", "embed"))
        read += round(weights["experts"] * (1 - missed))
        read += 2 * share * quick.slot_bytes(part, asked.act_bytes)
        read += share * context * quick.token_bytes(part, asked.act_bytes)
        total += read
    messages = 2 * config.num_hidden_layers * (mesh.tp > 1 or mesh.ep > 1)
    return total / (problem.machine.target.bandwidth_gbs * 1e3) + messages * MESSAGE_US


def legal(config: TextConfig, most_ranks: int, multi: bool) -> tuple[Mesh, ...]:
    """Return the meshes of at most so many ranks that the model divides over, few ranks first.

    Args:
        config: The model.
        most_ranks: Ranks at most.
        multi: The device can be one of many; else only the mesh of one rank is there.
    """
    if not multi:
        return (Mesh(),)
    found = {
        mesh
        for mesh in _shapes(most_ranks)
        if mesh.ranks <= most_ranks
        and mesh.pp <= config.num_hidden_layers
        and not problems(config, mesh)
    }
    return tuple(sorted(found, key=order))


def order(mesh: Mesh) -> tuple[int, ...]:
    """Return a key that sorts meshes: few ranks first, then simple ones."""
    return mesh.ranks, mesh.pp, mesh.dp, mesh.tp, mesh.ep


def _shapes(most_ranks: int) -> Iterator[Mesh]:
    for tp in TP_SIZES:
        for pp in PP_SIZES:
            room = most_ranks // (tp * pp)
            powers = {1 << n for n in range(room.bit_length()) if 1 << n <= room}
            # The whole machine, where it is not a power of two: 72 ranks.
            for dp in sorted(powers | ({room} if room else set())):
                shared = tp * dp
                yield Mesh(tp=tp, dp=dp, pp=pp, ep=shared)
                if dp == 1:
                    yield Mesh(tp=tp, pp=pp)


def rank_candidates(problem: Problem, meshes: tuple[Mesh, ...]) -> tuple[Quick, ...]:
    """Return the meshes that may fit, best for the goal first, by closed forms."""
    found = [q for q in (evaluate(problem, mesh) for mesh in meshes) if q.free_bytes >= 0]
    return tuple(sorted(found, key=lambda q: score(problem, q)))


def score(problem: Problem, found: Quick) -> tuple[float, ...]:
    """Return what the goal makes smallest, by closed forms."""
    key = order(found.mesh)
    if problem.request.goal == "fit":
        return (key[0], found.decode_us, *key)
    if problem.request.goal == "throughput":
        return (-found.gpu_rate, *key)
    return (found.decode_us, *key)


def smallest(problem: Problem, most_ranks: int = 1024) -> Mesh | None:
    """Return the mesh of fewest ranks that may hold what is asked; None: none does.

    It may have more ranks than the machine: then a larger machine is needed.
    """
    if problem.machine.target.kind == "cpu":
        return None
    for mesh in legal(problem.config, most_ranks, True):
        for variant in (mesh, replace(mesh, latent="sharded")):
            if not problems(problem.config, variant) and free_bytes(problem, variant) >= 0:
                return variant
    return None


def check_ranks(problem: Problem, mesh: Mesh) -> None:
    """Check that a machine has the ranks of a mesh.

    Raises:
        PlacementError: It has fewer; the hint names the nearest of its kind that it can run, and
            the fewest ranks that hold what is asked.
    """
    machine = problem.machine
    if mesh.ranks <= machine.ranks:
        return
    what = f"the mesh has {mesh.ranks} ranks, {machine.name} has {machine.ranks}"
    axes = mesh.ep > 1, mesh.dp > 1, mesh.pp > 1
    found = legal(problem.config, machine.ranks, True)
    kind = [m for m in found if (m.ep > 1, m.dp > 1, m.pp > 1) == axes]
    hint = f"the largest of its kind there is --mesh {kind[-1]}" if kind else "it runs one rank"
    least = smallest(problem)
    if least is not None and least.ranks > machine.ranks:
        hint += f", but the model needs {least.ranks} such devices"
    raise PlacementError(what, f"--mesh {mesh}", hint)
