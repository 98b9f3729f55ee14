"""What a rank reads of each checkpoint tensor: one rule a name, no name without a rule."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from k3c.errors import PassError
from k3c.ir.graph import Shard, Weight
from k3c.targets.mesh import Mesh

Rule = Literal[
    "rows", "columns", "vocabulary", "expert_rows", "expert_columns", "shared_rows",
    "shared_columns", "latent_rows", "latent_columns", "all",
]  # fmt: skip

# The first pattern that a source's name ends with. Heads lie in rows, so rows by head are rows.
_RULES: tuple[tuple[str, Rule], ...] = (
    (r"self_attn\.([qkvg]|f_b|b|q_b|kv_b)_proj\.weight", "rows"),
    (r"self_attn\.([qkv]_conv1d\.weight|A_log|dt_bias)", "rows"),
    (r"self_attn\.o_proj\.weight", "columns"),
    (r"self_attn\.(f_a_proj|q_a_proj|kv_a_proj_with_mqa)\.weight", "all"),
    (r"self_attn\.(o_norm|q_a_layernorm|kv_a_layernorm)\.weight", "all"),
    (r"mlp\.(gate|up)_proj\.weight", "rows"),
    (r"mlp\.down_proj\.weight", "columns"),
    (r"shared_experts\.(gate|up)_proj\.weight", "shared_rows"),
    (r"shared_experts\.down_proj\.weight", "shared_columns"),
    (r"experts\.\*\.w[13]", "expert_rows"),
    (r"experts\.\*\.w2", "expert_columns"),
    (r"routed_expert_down_proj\.weight", "latent_rows"),
    (r"routed_expert_up_proj\.weight", "latent_columns"),
    (r"routed_expert_norm\.weight", "all"),
    (r"block_sparse_moe\.gate\.(weight|e_score_correction_bias)", "all"),
    (r"(input|post_attention)_layernorm\.weight", "all"),
    (r"(self_attention|mlp|output_attn)_res_(norm|proj)\.weight", "all"),
    (r"norm\.weight", "all"),
    (r"(embed_tokens|lm_head)\.weight", "vocabulary"),
)
_COMPILED: tuple[tuple[re.Pattern[str], Rule], ...] = tuple(
    (re.compile(rf"(?:^|\.){pattern}$"), rule) for pattern, rule in _RULES
)


def rule_of(weight: Weight) -> Rule:
    """Return the rule of a weight of one source.

    Raises:
        PassError: No rule knows the name.
    """
    assert len(weight.sources) == 1, f"%{weight.value.name} is fused already"
    name = weight.sources[0]
    for pattern, rule in _COMPILED:
        if pattern.search(name):
            return rule
    hint = "add a rule to passes/sharding_rules.py"
    raise PassError(f"no sharding rule for {name}", f"%{weight.value.name}", hint)


@dataclass(frozen=True)
class Slots:
    """The physical experts of a rank in one layer.

    Attributes:
        count: How many.
        mapped: Whether a map says which logical experts they are; else they are the next ones.
        most_replicas: Replicas that an expert can have at most, whatever the placement.
    """

    count: int
    mapped: bool
    most_replicas: int


def slots_of(experts: int, mesh: Mesh, wanted: int = 0) -> Slots:
    """Return how a rank holds experts that ep shares.

    Args:
        experts: Logical experts of a layer.
        mesh: The ranks.
        wanted: Physical experts a rank, with a map; 0: as few as hold all.

    Raises:
        PassError: So many hold fewer than all.
    """
    count = wanted or -(-experts // mesh.ep)
    spare = count * mesh.ep - experts
    if spare < 0:
        what = f"{count} physical experts on each of {mesh.ep} ranks hold {experts} experts"
        raise PassError(what, "physical experts", f"{-(-experts // mesh.ep)} a rank at least")
    return Slots(count, bool(wanted or spare), min(mesh.ep, spare + 1))


def shard_of(weight: Weight, mesh: Mesh, expert_slots: int = 0) -> Shard | None:
    """Return what a rank reads of a weight of one source; None: all of it.

    Args:
        weight: The whole weight.
        mesh: The ranks.
        expert_slots: As in `slots_of`.

    Raises:
        PassError: No rule knows the name, or the dimension does not divide.
    """
    rule = rule_of(weight)
    experts = rule in ("expert_rows", "expert_columns")
    if experts and mesh.ep > 1:
        slots = slots_of(weight.value.type.sizes[0], mesh, expert_slots)
        return Shard("ep", 0, slots.count, slots.mapped)
    if mesh.tp == 1 or rule == "all" or _replicated(rule, mesh):
        return None
    dim = len(weight.value.type.shape) - 1 if rule.endswith("columns") else int(experts)
    if rule == "vocabulary":
        # The last rank's part is filled up with zero rows.
        return Shard("tp", 0, -(-weight.value.type.sizes[0] // mesh.tp))
    return _part(weight, "tp", dim, mesh.tp)


def _replicated(rule: Rule, mesh: Mesh) -> bool:
    """Whether the mesh keeps what a rule names whole on every rank."""
    share = {"latent": mesh.latent, "shared": mesh.shared, "vocabulary": mesh.vocabulary}
    return share.get(rule.partition("_")[0]) == "replicated"


def _part(weight: Weight, axis: str, dim: int, ranks: int) -> Shard:
    size = weight.value.type.sizes[dim]
    if size % ranks:
        what = f"dimension {dim} of {weight.value.type} does not divide by {axis}={ranks}"
        raise PassError(what, f"{weight.sources[0]}", "take another mesh")
    return Shard(axis, dim, size // ranks)
