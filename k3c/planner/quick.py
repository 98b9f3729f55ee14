"""Bytes of a rank in closed form, from a configuration, a mesh and a device: no torch, no IR.

Weights by kind of part and state by request and token are what the exact plan has, less the padding
of layouts and alignments, which only it knows. Scratch and io are lower bounds: the largest buffers
that are surely live together. So `quick` proves that something does not fit, never that it does.

Sources of shapes and types: k3c/model/tensor_names.py, and what k3c/export makes of them (vectors,
convolutions and queries of the residual attention in f32, matrices in bf16, experts in MXFP4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3c.artifact import aligned
from k3c.ir.types import MX_BLOCK

if TYPE_CHECKING:
    from k3c.model.config import TextConfig
    from k3c.targets.mesh import Mesh

F32_BYTES = 4
BF16_BYTES = 2
I32_BYTES = 4
ACT_BYTES: Mapping[str, int] = {"bfloat16": 2, "float32": 4}
TILE_ROWS, TILE_COLUMNS = 16, 128  # of a packed matrix on a GPU; columns count for experts
KINDS = (
    "kda", "mla", "router", "latent", "shared", "experts", "dense", "embed", "head", "norms",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What one rank holds: a stage's layers on one rank of a mesh.

    Attributes:
        config: The model.
        mesh: How ranks share it.
        stage: Pipeline stage of the rank.
        spare_slots: Physical experts of a rank and layer beyond those that the mesh needs.
    """

    config: TextConfig
    mesh: Mesh
    stage: int = 0
    spare_slots: int = 0

    @property
    def layers(self) -> range:
        """Layers of the stage."""
        return stage_layers(self.config.num_hidden_layers, self.mesh.pp)[self.stage]

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the head."""
        return self.stage == self.mesh.pp - 1

    @property
    def kda_layers(self) -> int:
        """KDA layers of the stage."""
        return sum(self.config.is_kda(layer) for layer in self.layers)

    @property
    def mla_layers(self) -> int:
        """MLA layers of the stage."""
        return len(self.layers) - self.kda_layers

    @property
    def moe_layers(self) -> int:
        """Layers of the stage with routed experts."""
        return sum(self.config.is_moe(layer) for layer in self.layers)

    @property
    def physical_experts(self) -> int:
        """Physical experts of a rank in each layer; with ep=1 columns of all experts."""
        ranks = self.mesh.ep
        return -(-self.config.num_experts // ranks) + (self.spare_slots if ranks > 1 else 0)


def stage_layers(layers: int, stages: int) -> tuple[range, ...]:
    """Return the layers of each pipeline stage: as even as they divide, the first ones longer."""
    size, longer = divmod(layers, stages)
    starts = [stage * size + min(stage, longer) for stage in range(stages + 1)]
    return tuple(range(starts[i], starts[i + 1]) for i in range(stages))


def kind_layers(part: Part) -> dict[str, int]:
    """Return how many layers of the stage have each kind of part; 0: it is not of a layer."""
    dense, moe = len(part.layers) - part.moe_layers, part.moe_layers
    found = {"kda": part.kda_layers, "mla": part.mla_layers, "dense": dense}
    found |= dict.fromkeys(("router", "latent", "shared", "experts"), moe)
    return {kind: found.get(kind, 0) for kind in KINDS}


def weight_bytes(part: Part) -> dict[str, int]:
    """Return the bytes of a rank's weights by kind, padding left out; they sum to all of them."""
    config, mesh, layers = part.config, part.mesh, kind_layers(part)
    one = {
        "kda": _kda(config, mesh.tp),
        "mla": _mla(config, mesh.tp),
        "router": _router(config) + _expert_map(part),
        "latent": _latent(config, mesh),
        "shared": _mlp(config, config.shared_width, mesh.tp if mesh.shared == "sharded" else 1),
        "experts": expert_bytes(config, mesh) * part.physical_experts,
        "dense": _mlp(config, config.intermediate_size, mesh.tp),
    }
    found = {kind: nbytes * layers[kind] for kind, nbytes in one.items()}
    rows = config.vocab_size
    if mesh.vocabulary == "sharded":
        rows = -(-rows // mesh.tp)
    table = rows * config.hidden_size * BF16_BYTES
    found["embed"] = table if part.is_first else 0
    found["head"] = table if part.is_last else 0
    # Two norms a layer, and two sites of the residual attention with a norm and a query each.
    vectors = 6 * len(part.layers) + (3 if part.is_last else 0)
    found["norms"] = vectors * config.hidden_size * F32_BYTES
    return found


def _kda(config: TextConfig, tp: int) -> int:
    hidden, dim = config.hidden_size, config.kda_head_dim
    width, heads = config.kda_width // tp, config.kda_num_heads // tp
    matrices = hidden * (5 * width + dim + heads) + width * dim
    vectors = 3 * width * config.short_conv_kernel_size + width + heads + dim
    return matrices * BF16_BYTES + vectors * F32_BYTES


def _mla(config: TextConfig, tp: int) -> int:
    hidden, heads = config.hidden_size, config.num_attention_heads // tp
    out = heads * config.v_head_dim
    queries = (hidden + heads * config.qk_head_dim) * config.q_lora_rank
    latent = hidden * config.kv_row
    keys = heads * (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank
    vectors = config.q_lora_rank + config.kv_lora_rank
    return (queries + latent + keys + 2 * hidden * out) * BF16_BYTES + vectors * F32_BYTES


def _router(config: TextConfig) -> int:
    return config.num_experts * (config.hidden_size * BF16_BYTES + F32_BYTES)


def _expert_map(part: Part) -> int:
    """Return the bytes of a layer's table of replicas: none where experts lie in ranges."""
    experts, ranks = part.config.num_experts, part.mesh.ep
    extra = part.physical_experts * ranks - experts
    if ranks == 1 or not extra:
        return 0
    # How many replicas an expert has, and the slot of each that any placement could give it.
    return experts * (1 + min(ranks, extra + 1)) * I32_BYTES


def _latent(config: TextConfig, mesh: Mesh) -> int:
    split = mesh.tp if mesh.latent == "sharded" else 1
    columns = config.routed_expert_hidden_size // split
    return (
        2 * config.hidden_size * columns * BF16_BYTES + config.routed_expert_hidden_size * F32_BYTES
    )


def _mlp(config: TextConfig, inner: int, split: int) -> int:
    return 3 * config.hidden_size * (inner // split) * BF16_BYTES


def expert_bytes(config: TextConfig, mesh: Mesh) -> int:
    """Return the bytes that one physical expert of one layer takes on a rank.

    Elements of 4 bits, and a scale of a byte for each block of 32. With ep=1 a rank has a part of
    the columns of every expert.
    """
    inner = config.moe_intermediate_size // (mesh.tp if mesh.ep == 1 else 1)
    elements = 3 * config.routed_expert_hidden_size * inner
    return elements // 2 + elements // MX_BLOCK


def slot_bytes(part: Part, act_bytes: int) -> int:
    """Return the bytes of a request's KDA state on a rank: f32 states and the convolution's tail.

    Source: 6,512,640 bytes a layer on one rank of one, k3_model 3.7.
    """
    return part.kda_layers * sum(_slot(part, act_bytes))


def _slot(part: Part, act_bytes: int) -> tuple[int, int]:
    """Return the bytes of one layer's state and of its convolution's tail."""
    config, width = part.config, part.config.kda_width // part.mesh.tp
    state = width * config.kda_head_dim * F32_BYTES
    return state, (config.short_conv_kernel_size - 1) * 3 * width * act_bytes


def token_bytes(part: Part, act_bytes: int) -> int:
    """Return the bytes that a token of context adds on a rank: MLA rows hold no heads to share."""
    return part.mla_layers * part.config.kv_row * act_bytes


def layout_padding_bytes(part: Part) -> int:
    """Return what GPU layouts add to the weights: matrices fill whole tiles.

    Projections that read the same rows are one matrix, whose rows are rounded up; the experts'
    matrices are rounded up along both dimensions.
    """
    config, mesh = part.config, part.mesh
    width, heads = config.kda_width // mesh.tp, config.kda_num_heads // mesh.tp
    out = config.num_attention_heads // mesh.tp * config.v_head_dim
    latent = config.routed_expert_hidden_size // (mesh.tp if mesh.latent == "sharded" else 1)
    shared = config.shared_width // (mesh.tp if mesh.shared == "sharded" else 1)
    rows = {
        "kda": 4 * width + config.kda_head_dim + heads,
        "mla": config.q_lora_rank + config.kv_row + out,
        "router": config.num_experts + latent + 2 * shared,
        "dense": 2 * (config.intermediate_size // mesh.tp),
    }
    layers = kind_layers(part)
    added = sum(-count % TILE_ROWS * layers[kind] for kind, count in rows.items())
    experts = _expert_padding(config, mesh) * part.physical_experts * layers["experts"]
    return added * config.hidden_size * BF16_BYTES + experts


def _expert_padding(config: TextConfig, mesh: Mesh) -> int:
    """Return what the tiles of one expert's two matrices add on a rank."""
    inner = config.moe_intermediate_size // (mesh.tp if mesh.ep == 1 else 1)
    latent = config.routed_expert_hidden_size
    shapes = ((2 * inner, latent), (latent, inner))
    elements = sum(
        (rows + -rows % TILE_ROWS) * (columns + -columns % TILE_COLUMNS) - rows * columns
        for rows, columns in shapes
    )
    return elements // 2 + elements // MX_BLOCK


@dataclass(frozen=True)
class Load:
    """What a data-parallel rank is asked to hold and to run at once.

    Attributes:
        requests: Requests held at the same time.
        context_tokens: Tokens of each.
        chunk_tokens: Rows of the largest prefill bucket.
        decode_requests: Requests of the largest decode bucket.
        page_tokens: Tokens of a page.
        snapshots: Kept states beside those of requests.
        act_bytes: Bytes of an activation.
        packed_requests: Requests whose chunks a prefill step may pack.
    """

    requests: int
    context_tokens: int
    chunk_tokens: int
    decode_requests: int
    page_tokens: int
    snapshots: int = 0
    act_bytes: int = 2
    packed_requests: int = 8

    @property
    def request_pages(self) -> int:
        """Pages of a request."""
        return -(-self.context_tokens // self.page_tokens)

    @property
    def pages(self) -> int:
        """Pages of all requests, and page 0, which is scratch."""
        return self.requests * self.request_pages + 1

    @property
    def slots(self) -> int:
        """State slots of all requests and snapshots, and slot 0, which is scratch."""
        return self.requests + self.snapshots + 1


def page_bytes(part: Part, load: Load) -> int:
    """Return the bytes of all MLA pages on a rank, as the plan lays them out."""
    row = part.config.kv_row * load.act_bytes
    return part.mla_layers * aligned(load.pages * load.page_tokens * row)


def state_bytes(part: Part, load: Load) -> int:
    """Return the bytes of all KDA state slots on a rank, as the plan lays them out."""
    state, tail = _slot(part, load.act_bytes)
    return part.kda_layers * (aligned(load.slots * state) + aligned(load.slots * tail))


def scratch_lower_bytes(part: Part, load: Load) -> int:
    """Return the least arena bytes that any plan of the largest buckets needs.

    Carries (residual stream, its pending part, one row for each block of the residual attention)
    live through a step; above them lies what the experts' down projections read and write, each
    row's place and expert, and the activations of the shared experts.
    """
    rows, act = max(load.chunk_tokens, load.decode_requests), load.act_bytes
    config = part.config
    carry = (config.num_blocks + 2) * config.hidden_size * act
    routed = 0
    if part.moe_layers:
        inner = config.moe_intermediate_size // (part.mesh.tp if part.mesh.ep == 1 else 1)
        shared = config.shared_width // (part.mesh.tp if part.mesh.shared == "sharded" else 1)
        each = (config.routed_expert_hidden_size + inner) * act + 2 * I32_BYTES
        routed = config.num_experts_per_token * each + shared * act
    return rows * (carry + routed)


def io_lower_bytes(part: Part, load: Load) -> int:
    """Return the least io bytes of the widest bucket: logits in f32, and a page table."""
    logits = part.config.vocab_size * F32_BYTES if part.is_last else 0
    requests = max(load.decode_requests, load.packed_requests)
    return requests * (logits + load.request_pages * I32_BYTES)


def total_lower_bytes(part: Part, load: Load) -> int:
    """Return a lower bound of all bytes of a rank."""
    return (
        sum(weight_bytes(part).values())
        + page_bytes(part, load)
        + state_bytes(part, load)
        + scratch_lower_bytes(part, load)
        + io_lower_bytes(part, load)
    )
