"""Which meshes a model goes over, from its configuration alone, and the smallest that fits.

Kernels take any number of heads from 1 to 96 a rank, so heads need only divide. Experts need not:
every rank then has as many physical experts as any, and replicas fill them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from k3c.errors import ConfigError, PassError
from k3c.ir.types import MX_BLOCK, MXFP4
from k3c.targets.mesh import Mesh

if TYPE_CHECKING:
    from k3c.ir.graph import Module
    from k3c.model.config import TextConfig
    from k3c.passes.context import PassContext

MAX_RANKS = 1024  # no cluster that this compiler plans for is larger
PADDING_LIMIT = 1.05  # of experts' bytes, padded over real: beyond it a mesh is worth a warning
EXPERT_TILE = (16, 128)  # rows and columns that GPU kernels of experts store as one tile
_SHOWN = 3  # other meshes of as many ranks in a message


def problems(config: TextConfig, mesh: Mesh, spare_slots: int = 0) -> list[str]:
    """Return what of a model does not go over a mesh, with both numbers.

    Args:
        config: The model.
        mesh: The ranks.
        spare_slots: Physical experts of a rank beyond those that the mesh needs.
    """
    found = [f"{n} {what} by tp={mesh.tp}" for what, n in _divided(config, mesh) if n % mesh.tp]
    if mesh.ep == 1 and config.moe_intermediate_size % (MX_BLOCK * mesh.tp):
        blocks = f"{config.moe_intermediate_size // MX_BLOCK} MXFP4 blocks of an expert's columns"
        found.append(f"{blocks} by tp={mesh.tp}")
    if mesh.vocabulary == "sharded" and _rows_of_last(config.vocab_size, mesh.tp) < 1:
        found.append(f"{config.vocab_size} tokens of the vocabulary by tp={mesh.tp}")
    if mesh.pp > config.num_hidden_layers:
        found.append(f"{config.num_hidden_layers} layers by pp={mesh.pp}")
    slots = physical_experts(config, mesh, spare_slots)
    if slots > config.num_experts:
        found.append(f"{config.num_experts} experts into {slots} slots of each rank")
    if mesh.ranks > MAX_RANKS:
        found.append(f"{mesh.ranks} ranks, at most {MAX_RANKS}")
    return found


def _divided(config: TextConfig, mesh: Mesh) -> Iterator[tuple[str, int]]:
    """Yield what tp divides into equal parts, and how many there are."""
    yield "KDA heads", config.kda_num_heads
    yield "MLA heads", config.num_attention_heads
    if config.first_k_dense_replace:
        yield "columns of the dense layers", config.intermediate_size
    if mesh.shared == "sharded":
        yield "columns of the shared experts", config.shared_width
    if mesh.latent_sharded:
        yield "latent columns", config.routed_expert_hidden_size


def _rows_of_last(rows: int, ranks: int) -> int:
    return rows - -(-rows // ranks) * (ranks - 1)


def physical_experts(config: TextConfig, mesh: Mesh, spare_slots: int = 0) -> int:
    """Return the physical experts of a rank in a layer; with ep=1 columns of all experts."""
    return -(-config.num_experts // mesh.ep) + (spare_slots if mesh.ep > 1 else 0)


@dataclass(frozen=True)
class ExpertBytes:
    """Bytes of a rank's routed experts in one layer.

    Attributes:
        real: Its even share of all logical experts.
        stored: What it stores: replicas, and tiles filled up.
    """

    real: float
    stored: float

    @property
    def ratio(self) -> float:
        """Stored over real bytes."""
        return self.stored / self.real


def expert_bytes(config: TextConfig, mesh: Mesh, spare_slots: int = 0) -> ExpertBytes:
    """Return what the routed experts of a layer take on a rank, in the layout of GPU kernels."""
    width, latent = config.moe_intermediate_size, config.routed_expert_hidden_size
    columns = width // mesh.tp if mesh.ep == 1 else width
    share = mesh.tp if mesh.ep == 1 else mesh.ep
    real = 3 * width * latent * config.num_experts / share
    rows, inner = EXPERT_TILE
    one = _up(2 * columns, rows) * _up(latent, inner) + _up(latent, rows) * _up(columns, inner)
    bytes_each = MXFP4.bits / 8
    slots = physical_experts(config, mesh, spare_slots)
    return ExpertBytes(real * bytes_each, slots * one * bytes_each)


def warnings(config: TextConfig, mesh: Mesh, spare_slots: int = 0) -> tuple[str, ...]:
    """Return what is legal and wasteful: experts that take much more than their real bytes."""
    found = expert_bytes(config, mesh, spare_slots)
    if found.ratio <= PADDING_LIMIT:
        return ()
    sizes = f"{found.stored / 1e9:.2f} GB a rank and layer for {found.real / 1e9:.2f} GB"
    if mesh.ep > 1:
        slots = physical_experts(config, mesh, spare_slots)
        why = f"{slots * mesh.ep - config.num_experts} replicas of {config.num_experts} experts"
    else:
        columns = config.moe_intermediate_size // mesh.tp
        why = f"{columns} columns of an expert are stored as {_up(columns, EXPERT_TILE[1])}"
    return (f"experts take {found.ratio:.2f} of their bytes, {sizes}: {why}",)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def legal_meshes(
    config: TextConfig, ranks: int, stages: Sequence[int] = (1,), kind: Mesh | None = None
) -> tuple[Mesh, ...]:
    """Return the meshes of exactly so many ranks that a model goes over.

    Args:
        config: The model.
        ranks: Ranks of all stages together.
        stages: Numbers of pipeline stages to try.
        kind: Names what is shared or replicated; None: the defaults.

    Returns:
        Few stages first, then many ranks that share heads; experts by rank before columns.
    """
    found: list[Mesh] = []
    for pp in sorted(pp for pp in stages if ranks % pp == 0):
        stage = ranks // pp
        for tp in sorted((n for n in range(1, stage + 1) if stage % n == 0), reverse=True):
            axes = {"tp": tp, "dp": stage // tp, "pp": pp}
            for ep in dict.fromkeys((stage, 1)):
                mesh = replace(kind or Mesh(), **axes, ep=ep)
                found += [] if problems(config, mesh) else [mesh]
    return tuple(found)


def check_mesh(config: TextConfig, mesh: Mesh, spare_slots: int = 0) -> None:
    """Check that every part of a model has the same size on every rank.

    Raises:
        ConfigError: Something does not divide; the hint names the nearest meshes that do, and
            others of as many ranks.
    """
    found = problems(config, mesh, spare_slots)
    if not found:
        return
    raise ConfigError(f"cannot divide {'; '.join(found)}", f"--mesh {mesh}", _nearest(config, mesh))


def _nearest(config: TextConfig, mesh: Mesh) -> str:
    """Name the nearest smaller and larger mesh of the same kind, and others of as many ranks."""
    stage = mesh.dp * mesh.pp
    kind = [_sized(mesh, tp) for tp in range(1, MAX_RANKS // stage + 1)]
    good = [m for m in kind if m.ranks > 1 and not problems(config, m)]
    nearest = [m for m in good if m.ranks < mesh.ranks][-1:] + [
        m for m in good if m.ranks > mesh.ranks
    ][:1]
    hints = [f"nearest: {' or '.join(map(str, nearest))}"] if nearest else []
    same = legal_meshes(config, min(mesh.ranks, MAX_RANKS), (mesh.pp,), mesh)
    if same and mesh.ranks <= MAX_RANKS:
        alike = [m for m in same if (m.ep > 1) == (mesh.ep > 1)] or same
        # Those that share heads most, and the one that shares none, if there is one.
        shown = dict.fromkeys([*alike[:_SHOWN], *(m for m in alike if m.tp == 1)])
        hints.append(f"with {mesh.ranks} ranks: {' or '.join(map(str, shown))}")
    return "; ".join(hints) or "no mesh of this kind fits"


def _sized(mesh: Mesh, tp: int) -> Mesh:
    return replace(mesh, tp=tp, ep=tp * mesh.dp if mesh.ep > 1 else 1)


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
    from k3c.passes import canonicalize, shard

    whole = canonicalize.run(module, ctx)
    layers = sum(config.is_moe(layer) for layer in range(config.num_hidden_layers))
    for ranks in range(2, MAX_RANKS + 1):
        for mesh in legal_meshes(config, ranks)[:1]:
            # Experts are most of a model: where they alone are too many, nothing else is counted.
            least = layers * expert_bytes(config, mesh).real + spare_bytes
            if least > ctx.target.memory_bytes:
                continue
            try:
                local = shard.run(whole, replace(ctx, mesh=mesh, placement=None))
            except PassError:
                return None
            if resident_bytes(local, dims) + spare_bytes <= ctx.target.memory_bytes:
                return mesh
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
