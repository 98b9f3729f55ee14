"""Which meshes a model can be shared over, and the smallest one that fits a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from k3c.errors import ConfigError, PassError
from k3c.ir.graph import Module
from k3c.ir.types import MX_BLOCK
from k3c.model.config import TextConfig
from k3c.passes import canonicalize, shard
from k3c.passes.context import PassContext
from k3c.targets.mesh import Mesh

MAX_RANKS = 1024  # no cluster that this compiler plans for is larger


def problems(config: TextConfig, mesh: Mesh) -> list[str]:
    """Return what of a model does not divide by a mesh, with both numbers."""
    sizes = {
        "KDA heads": config.kda_num_heads,
        "MLA heads": config.num_attention_heads,
        "columns of the dense layers": config.intermediate_size,
        "columns of the shared experts": config.shared_width,
    }
    found = [f"{n} {what} by tp={mesh.tp}" for what, n in sizes.items() if n % mesh.tp]
    if mesh.latent_sharded and config.routed_expert_hidden_size % mesh.tp:
        found.append(f"{config.routed_expert_hidden_size} latent columns by tp={mesh.tp}")
    if mesh.ep > 1 and config.num_experts % mesh.ep:
        found.append(f"{config.num_experts} experts by ep={mesh.ep}")
    if mesh.ep == 1 and config.moe_intermediate_size % (MX_BLOCK * mesh.tp):
        blocks = f"{config.moe_intermediate_size // MX_BLOCK} MXFP4 blocks of an expert's columns"
        found.append(f"{blocks} by tp={mesh.tp}")
    return found


def check_mesh(config: TextConfig, mesh: Mesh) -> None:
    """Check that every part of a model has the same size on every rank.

    Raises:
        ConfigError: Something does not divide; the hint names the nearest meshes that do.
    """
    found = problems(config, mesh)
    if not found:
        return
    raise ConfigError(f"cannot divide {'; '.join(found)}", f"--mesh {mesh}", _nearest(config, mesh))


def _nearest(config: TextConfig, mesh: Mesh) -> str:
    """Name the nearest smaller and larger mesh of the same kind that divide."""
    kind = [_sized(mesh, ranks) for ranks in range(2, MAX_RANKS + 1)]
    good = [m for m in kind if not problems(config, m)]
    nearest = [m for m in good if m.ranks < mesh.ranks][-1:] + [
        m for m in good if m.ranks > mesh.ranks
    ][:1]
    return f"nearest: {' or '.join(map(str, nearest))}" if nearest else "no mesh of this kind fits"


def _sized(mesh: Mesh, ranks: int) -> Mesh:
    return replace(mesh, tp=ranks, ep=ranks if mesh.ep > 1 else 1)


def smallest_mesh(
    config: TextConfig, module: Module, dims: Mapping[str, int], ctx: PassContext, spare_bytes: int
) -> Mesh | None:
    """Return the mesh of fewest ranks on which weights and state fit a device; None: none does.

    Args:
        config: The model.
        module: The exported module, level model.
        dims: Slots and pages, `S` and `P`, of the hybrid state.
        ctx: The target.
        spare_bytes: What scratch and io may take; they shrink less than weights do.
    """
    whole = canonicalize.run(module, ctx)
    ranks = 2
    while ranks <= MAX_RANKS:
        mesh = Mesh(ranks, ranks)
        if not problems(config, mesh):
            try:
                local = shard.run(whole, replace(ctx, mesh=mesh))
            except PassError:
                return None
            if resident_bytes(local, dims) + spare_bytes <= ctx.target.memory_bytes:
                return mesh
        ranks *= 2
    return None


def resident_bytes(module: Module, dims: Mapping[str, int]) -> int:
    """Return the bytes of all weights and states of a rank, layouts' padding left out."""
    total = 0
    for call in module.schedule:
        graph = module.graph(call.graph)
        types = [w.value.type for w in graph.weights]
        types += [i.value.type.bind(dims) for i in graph.inputs if i.role == "state"]
        total += sum(kind.nbytes for kind in types)
    return total
