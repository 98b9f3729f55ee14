"""What an artifact is compiled for: the device, and the ranks that share the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from k3c.console import Console
from k3c.errors import ConfigError, PlanError
from k3c.mesh_limits import check_mesh
from k3c.model.config import TextConfig
from k3c.targets.mesh import Mesh, parse_mesh
from k3c.targets.target import Target
from k3c.targets.topology import load_topology

if TYPE_CHECKING:
    from k3c.compile import CompileOptions


def target_and_mesh(
    model: Path, config: TextConfig, options: CompileOptions, console: Console
) -> tuple[Target, Mesh | None]:
    """Return the device, and the mesh that is named or, for several devices, searched.

    Raises:
        ConfigError: The target or the mesh is wrong, the model does not divide, or the rank is none
            of the mesh's.
        PlanError: No mesh of the machine holds the model with its requests.
    """
    machine = load_topology(options.target)
    if machine.ranks > 1 and not options.mesh:
        with console.phase("mesh"):
            options = _with_mesh(model, options)
    return machine.target, _mesh(config, options, machine.target)


def _with_mesh(model: Path, options: CompileOptions) -> CompileOptions:
    """Return the options with the mesh that `k3c plan` chooses for the machine.

    Raises:
        PlanError: No mesh of the machine holds the model with its requests.
    """
    from k3c.planner.planning import plan_model
    from k3c.planner.problem import PlanOptions

    asked = PlanOptions(
        options.target,
        compute=options.compute,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    answer = plan_model(model, asked)
    if not answer.fits:
        raise PlanError(answer.verdict, options.target, "see k3c plan with the same options")
    found = answer.deployment
    return replace(options, mesh=found.mesh, latent=found.latent)


def _mesh(config: TextConfig, options: CompileOptions, target: Target) -> Mesh | None:
    """Return the mesh that the options name; every division is checked here.

    Raises:
        ConfigError: It is no mesh, the model does not divide, or there is no such rank.
    """
    mesh = parse_mesh(options.mesh, options.latent)
    last = mesh.ranks - 1 if mesh else 0
    if not 0 <= (options.rank or 0) <= last:
        raise ConfigError(f"{options.rank} is out of range, expected 0..{last}", "--rank")
    if mesh is None:
        return None
    if target.kind == "cpu":
        raise ConfigError(f"{target.name} runs one rank", f"--mesh {mesh}", "take a GPU target")
    check_mesh(config, mesh)
    return mesh
