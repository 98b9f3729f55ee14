"""The tensors that a checkpoint must hold, and the spellings that are accepted for them.

Canonical names and shapes are those of the released checkpoint, with A_log narrowed to its heads
and short convolutions of rank 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from k3c.ir.types import MX_BLOCK
from k3c.model.config import TextConfig

MODEL = "language_model.model."
LM_HEAD = "language_model.lm_head.weight"
_SKIPPED = ("vision_tower.", "mm_projector.")
_LAYER = re.compile(r"language_model\.model\.layers\.(\d+)\.")
_MOE_AS_MLP = re.compile(r"\.mlp\.(?=gate\.|experts\.|shared_experts\.|routed_expert_)")
_OLD_RESIDUAL = re.compile(r"(self_attention_res|mlp_res|output_attn_res)\.(proj|norm)_weight$")


@dataclass(frozen=True)
class Expected:
    """What a tensor must be: its canonical shape, the stored shapes accepted, byte or float."""

    shape: tuple[int, ...]
    stored: tuple[tuple[int, ...], ...]
    is_bytes: bool = False

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether a stored shape holds this tensor."""
        if shape in self.stored:
            return True
        # Some writers keep scales with two trailing dimensions of size 1.
        return self.is_bytes and len(shape) == 4 and _squeeze(shape) == _squeeze(self.shape)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The safetensors dtypes accepted."""
        return ("U8",) if self.is_bytes else ("BF16", "F32")


def _squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(d for d in shape if d != 1)


def canonical(name: str) -> str:
    """Return the canonical spelling of a stored name."""
    if name.startswith("language_model.") and not name.startswith((MODEL, "language_model.lm_")):
        name = MODEL + name.removeprefix("language_model.")
    name = _MOE_AS_MLP.sub(".block_sparse_moe.", name)
    return _OLD_RESIDUAL.sub(r"\1_\2.weight", name)


def is_skipped(name: str, config: TextConfig) -> bool:
    """Whether a tensor is left out by name: vision, and layers past the last."""
    layer = _LAYER.match(name)
    if layer is None:
        return name.startswith(_SKIPPED)
    return int(layer[1]) >= config.num_hidden_layers


def expected_tensors(config: TextConfig) -> dict[str, Expected]:
    """Return every tensor of the text model by its canonical name."""
    hidden = config.hidden_size
    names = {
        f"{MODEL}embed_tokens.weight": _matrix(config.vocab_size, hidden),
        f"{MODEL}norm.weight": _vector(hidden),
        LM_HEAD: _matrix(config.vocab_size, hidden),
    }
    names |= _residual(f"{MODEL}output_attn_res", hidden)
    for layer in range(config.num_hidden_layers):
        names.update(_layer(f"{MODEL}layers.{layer}.", layer, config))
    return names


def _matrix(rows: int, columns: int) -> Expected:
    return Expected((rows, columns), ((rows, columns),))


def _vector(size: int) -> Expected:
    return Expected((size,), ((size,),))


def _residual(stem: str, hidden: int) -> dict[str, Expected]:
    proj = Expected((1, hidden), ((1, hidden), (hidden,)))
    return {f"{stem}_norm.weight": _vector(hidden), f"{stem}_proj.weight": proj}


def _layer(stem: str, layer: int, config: TextConfig) -> Iterator[tuple[str, Expected]]:
    hidden = config.hidden_size
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{stem}{norm}.weight", _vector(hidden)
    for site in ("self_attention_res", "mlp_res"):
        yield from _residual(stem + site, hidden).items()
    attention = _kda(config) if config.is_kda(layer) else _mla(config)
    for name, expected in attention.items():
        yield f"{stem}self_attn.{name}", expected
    if config.is_moe(layer):
        yield from _moe(f"{stem}block_sparse_moe.", config)
    else:
        yield from _mlp(f"{stem}mlp.", hidden, config.intermediate_size)


def _kda(config: TextConfig) -> dict[str, Expected]:
    hidden, width, heads = config.hidden_size, config.kda_width, config.kda_num_heads
    dim, taps = config.kda_head_dim, config.short_conv_kernel_size
    conv = Expected((width, taps), ((width, 1, taps), (width, taps)))
    # A_log is allocated with head_dim entries; the values of the heads come first.
    a_log = ((heads,), (1, 1, heads, 1)) + (((dim,),) if dim > heads else ())
    return {
        **{f"{p}_proj.weight": _matrix(width, hidden) for p in "qkvg"},
        **{f"{p}_conv1d.weight": conv for p in "qkv"},
        "f_a_proj.weight": _matrix(dim, hidden),
        "f_b_proj.weight": _matrix(width, dim),
        "b_proj.weight": _matrix(heads, hidden),
        "A_log": Expected((heads,), a_log),
        "dt_bias": _vector(width),
        "o_norm.weight": _vector(dim),
        "o_proj.weight": _matrix(hidden, width),
    }


def _mla(config: TextConfig) -> dict[str, Expected]:
    hidden, heads, q_rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
    out = heads * config.v_head_dim
    key_value = heads * (config.qk_nope_head_dim + config.v_head_dim)
    return {
        "q_a_proj.weight": _matrix(q_rank, hidden),
        "q_a_layernorm.weight": _vector(q_rank),
        "q_b_proj.weight": _matrix(heads * config.qk_head_dim, q_rank),
        "kv_a_proj_with_mqa.weight": _matrix(config.kv_row, hidden),
        "kv_a_layernorm.weight": _vector(config.kv_lora_rank),
        "kv_b_proj.weight": _matrix(key_value, config.kv_lora_rank),
        "g_proj.weight": _matrix(out, hidden),
        "o_proj.weight": _matrix(hidden, out),
    }


def _mlp(stem: str, hidden: int, inner: int) -> Iterator[tuple[str, Expected]]:
    yield f"{stem}gate_proj.weight", _matrix(inner, hidden)
    yield f"{stem}up_proj.weight", _matrix(inner, hidden)
    yield f"{stem}down_proj.weight", _matrix(hidden, inner)


def _moe(stem: str, config: TextConfig) -> Iterator[tuple[str, Expected]]:
    hidden, latent = config.hidden_size, config.routed_expert_hidden_size
    yield f"{stem}gate.weight", _matrix(config.num_experts, hidden)
    yield f"{stem}gate.e_score_correction_bias", _vector(config.num_experts)
    yield f"{stem}routed_expert_down_proj.weight", _matrix(latent, hidden)
    yield f"{stem}routed_expert_norm.weight", _vector(latent)
    yield f"{stem}routed_expert_up_proj.weight", _matrix(hidden, latent)
    yield from _mlp(f"{stem}shared_experts.", hidden, config.shared_width)
    inner = config.moe_intermediate_size
    shapes = {"w1": (inner, latent), "w2": (latent, inner), "w3": (inner, latent)}
    pairs = {m: _mxfp4(*shape) for m, shape in shapes.items()}
    for expert in range(config.num_experts):
        for matrix, (packed, scale) in pairs.items():
            yield f"{stem}experts.{expert}.{matrix}.weight_packed", packed
            yield f"{stem}experts.{expert}.{matrix}.weight_scale", scale


def _mxfp4(rows: int, columns: int) -> tuple[Expected, Expected]:
    packed, scale = (rows, columns // 2), (rows, columns // MX_BLOCK)
    return Expected(packed, (packed,), True), Expected(scale, (scale,), True)
