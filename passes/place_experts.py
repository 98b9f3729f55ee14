"""Decide which placement of the routed experts a module is compiled for.

Runs before the pipeline, once the mesh is known: what it returns goes into the passes' context, and
`shard` gives every rank its slots. A placement without replicas, by number, keeps the arithmetic
of `first_expert`; any other goes through an expert map (`k3c/placement/expert_map.py`).
Saves nothing by itself: a placement for the load that is there lowers the busiest rank's rows.
"""

from __future__ import annotations

from k3c.errors import ConfigError, PlacementError
from k3c.ir.graph import Module
from k3c.placement.placement import Placement, contiguous
from k3c.targets.mesh import Mesh

NAME = "place_experts"
_WHERE = "--placement"


def place_experts(
    module: Module, mesh: Mesh | None, given: Placement | None = None, spare: int = 0
) -> Placement | None:
    """Return the placement to compile for; None where every rank has columns of all experts.

    Args:
        module: The module, level model; it says which layers have routed experts, and how many.
        mesh: How ranks share the model; None: one rank.
        given: The user's placement; None: by number, with as many replicas as fill all slots.
        spare: Slots of a rank beyond the fewest, where none is given.

    Raises:
        ConfigError: A placement is given, but the mesh or the model does not share experts.
        PlacementError: It is of another model or of another number of ranks, or a rank would hold
            an expert twice.
    """
    layers = moe_layers(module)
    if mesh is None or mesh.ep == 1 or not layers:
        if given is not None or spare:
            what = f"a placement on {given.num_ranks} ranks" if given else f"{spare} spare slots"
            why = "the model has no routed experts" if not layers else "experts lie on ep=1 rank"
            raise ConfigError(f"{what}, but {why}", _WHERE, "use a mesh with ep, as tp=16,ep=16")
        return None
    experts = min(layers.values())
    if given is None:
        return contiguous(experts, mesh.ep, layers, spare)
    _check(given, layers, experts, mesh)
    return given


def moe_layers(module: Module) -> dict[int, int]:
    """Return the logical experts of every layer that routes tokens, layers ascending."""
    routed: dict[str, int] = {}
    for graph in module.graphs:
        sizes = [n.operands[1].type.sizes[0] for n in graph.nodes if n.op == "route_topk"]
        if sizes:
            routed[graph.name] = sizes[0]
    calls = [call for call in module.schedule if call.graph in routed]
    return {call.layer: routed[call.graph] for call in sorted(calls, key=lambda c: c.layer)}


def describe(placement: Placement) -> str:
    """Say on one line what was chosen: for the console, the plan and the report."""
    way = "by number" if placement.is_contiguous else f"placed, sha256 {placement.hash()[:12]}"
    return (
        f"{placement.num_experts} experts on {placement.num_ranks} ranks: "
        f"{placement.slots_per_rank} physical experts a rank, {placement.num_replicas} replicas "
        f"a layer ({way})"
    )


def _check(given: Placement, layers: dict[int, int], experts: int, mesh: Mesh) -> None:
    hint = "make one with k3c place"
    for what, have, want in (
        ("experts a layer", given.num_experts, experts), ("ranks", given.num_ranks, mesh.ep),
    ):  # fmt: skip
        if have != want:
            raise PlacementError(f"the placement has {have} {what}, expected {want}", _WHERE, hint)
    odd = sorted(set(layers) ^ set(given.layers))
    if odd:
        side = "placement" if odd[0] in given.layers else "model"
        what = f"{len(given.layers)} layers placed, the model routes in {len(layers)}"
        raise PlacementError(f"{what}; layer {odd[0]} is only in the {side}", _WHERE, hint)
