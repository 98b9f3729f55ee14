"""What an artifact is compiled for: the device, the ranks, the experts that each of them holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from k3c.console import Console
from k3c.errors import ConfigError, PlanError
from k3c.mesh_limits import check_mesh, warnings
from k3c.model.config import TextConfig
from k3c.passes.place_experts import describe, place_experts
from k3c.passes.sharding_nodes import most_tokens
from k3c.placement.placement import Placement, placement_from_json
from k3c.targets.mesh import Mesh, Share, parse_mesh
from k3c.targets.target import Target
from k3c.targets.topology import load_topology

if TYPE_CHECKING:
    from k3c.compile import CompileOptions
    from k3c.ir.graph import Module

_PLACEMENT = "--placement"


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
    return machine.target, _mesh(config, options, machine.target, console)


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
    shares = {"latent": found.latent, "shared": found.shared, "vocabulary": found.vocabulary}
    return replace(options, mesh=found.mesh, **shares)


def _mesh(
    config: TextConfig, options: CompileOptions, target: Target, console: Console
) -> Mesh | None:
    """Return the mesh that the options name; every division is checked here.

    Raises:
        ConfigError: It is no mesh, the model does not divide, or there is no such rank.
    """
    mesh = parse_mesh(options.mesh, options.latent)
    shared = _share(options.shared, "--shared")
    vocabulary = _share(options.vocabulary, "--vocabulary")
    last = mesh.ranks - 1 if mesh else 0
    if not 0 <= (options.rank or 0) <= last:
        raise ConfigError(f"{options.rank} is out of range, expected 0..{last}", "--rank")
    if mesh is None:
        return None
    mesh = replace(mesh, shared=shared, vocabulary=vocabulary)
    if target.kind == "cpu":
        raise ConfigError(f"{target.name} runs one rank", f"--mesh {mesh}", "take a GPU target")
    if mesh.pp > 1:
        what = f"{mesh.pp} pipeline stages cannot be compiled yet"
        raise ConfigError(what, f"--mesh {mesh}", "use tp, ep and dp, as in tp=8,dp=2,ep=16")
    check_mesh(config, mesh)
    most = most_tokens(mesh.dp)
    if mesh.dp > 1 and mesh.ep > 1 and options.max_num_batched_tokens > most:
        rows = options.max_num_batched_tokens
        what = f"experts would see the {rows} rows of each of dp={mesh.dp} ranks"
        raise ConfigError(what, "--max-num-batched-tokens", f"at most {most} a rank go with it")
    for warning in warnings(config, mesh):
        console.line(f"warning: {warning}")
    return mesh


def _share(value: str, option: str) -> Share:
    if value not in ("replicated", "sharded"):
        raise ConfigError(f"found {value!r}", option, "replicated or sharded")
    return "sharded" if value == "sharded" else "replicated"


def chosen_placement(
    module: Module, mesh: Mesh | None, path: Path | None, console: Console
) -> Placement | None:
    """Return which experts every rank holds; None: each has the next ones, or columns of all.

    Args:
        module: The module, level model.
        mesh: The ranks that share it.
        path: The user's placement file.
        console: Where to say how many replicas there are.

    Raises:
        ConfigError: The file is missing, or the experts are not shared by rank.
        ParseError: It is no placement file.
        PlacementError: It is of another model or mesh.
    """
    found = place_experts(module, mesh, None if path is None else _read(path))
    if found is None or found.is_contiguous:
        return None
    console.line(describe(found))
    return found


def _read(path: Path) -> Placement:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read {path}: {exc}", _PLACEMENT, "make one: k3c place") from exc
    return placement_from_json(text, str(path))
