"""The whole story of `k3c plan` on one page: what is asked, meshes, memory, speed, an answer."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

from k3c.mesh_limits import check_mesh, problems
from k3c.planner import refusing, search
from k3c.planner.answer import Answer
from k3c.planner.problem import PlanOptions, Problem, read_problem
from k3c.targets.mesh import Mesh


def plan_model(model: Path, options: PlanOptions) -> Answer:
    """Answer whether a model fits a machine, how, and how fast it will be.

    Args:
        model: The model's folder, or its config.json; no weight is read.
        options: What the user chose.

    Raises:
        ConfigError: An option is wrong, or the model does not divide over the mesh.
        ExportError: The model uses something that the IR cannot express.
    """
    problem = read_problem(model, options)
    meshes = meshes_of(problem)
    ranked = search.rank_candidates(problem, meshes)
    if not ranked:
        return refusing.refuse(problem, meshes)
    # Importing the compiler takes seconds: not for a request that cannot fit.
    from k3c.planner.planned import plan_exactly

    return plan_exactly(problem, ranked)


def meshes_of(problem: Problem) -> tuple[Mesh, ...]:
    """Return the meshes to consider: the one that was named, or all legal ones of the machine.

    What is shared or replicated is as the user said; where that is left open, as little memory as
    a mesh allows only where it does not fit otherwise.

    Raises:
        ConfigError: The named mesh does not divide the model, or has too many ranks.
    """
    machine, config = problem.machine, problem.config
    if problem.mesh is not None:
        named = (problem.mesh,)
        check_mesh(config, _as_said(problem, problem.mesh))
        search.check_ranks(problem, problem.mesh)
    else:
        named = search.legal(config, machine.ranks, machine.target.kind != "cpu")
    said = [_as_said(problem, mesh) for mesh in named]
    legal = [mesh for mesh in said if not problems(config, mesh)]
    return tuple(_that_fits(problem, mesh) for mesh in legal)


def _as_said(problem: Problem, mesh: Mesh) -> Mesh:
    """Return the mesh with what the user said of latent, shared and vocabulary."""
    options = problem.options
    said = {
        name: value
        for name, value in (
            ("latent", options.latent),
            ("shared", options.shared),
            ("vocabulary", options.vocabulary),
        )
        if value != "auto"
    }
    return replace(mesh, **said)


def _that_fits(problem: Problem, mesh: Mesh) -> Mesh:
    """Return the mesh, or the first variant of what was left open that may fit, or the smallest."""
    free = {m: search.free_bytes(problem, m) for m in variants(problem, mesh)}
    return next((m for m, left in free.items() if left >= 0), max(free, key=lambda m: free[m]))


def variants(problem: Problem, mesh: Mesh) -> tuple[Mesh, ...]:
    """Return a mesh with every choice of what the user left open, the mesh itself first."""
    options = problem.options
    said = {"latent": options.latent, "shared": options.shared, "vocabulary": options.vocabulary}
    if mesh.tp == 1:
        return (mesh,)
    values = [
        (getattr(mesh, name),)
        if value != "auto"
        else (getattr(mesh, name), _other(getattr(mesh, name)))
        for name, value in said.items()
    ]
    found = [replace(mesh, **dict(zip(said, chosen, strict=True))) for chosen in product(*values)]
    return tuple(m for m in found if not problems(problem.config, m))


def _other(value: str) -> str:
    return "sharded" if value == "replicated" else "replicated"
