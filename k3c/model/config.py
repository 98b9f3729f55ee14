"""The text model's configuration, read from a Hugging Face `config.json`.

Every key that changes the network is required: a default for a missing key loads cleanly and
produces garbage. A key that is neither known nor one of Hugging Face's generic ones is an error,
so a new feature of a checkpoint is never ignored silently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from k3c.errors import ConfigError
from k3c.ir.types import MX_BLOCK
from k3c.model.json_keys import Keys, read_json

PAGE_TOKENS = 16  # positions of a page of the MLA cache, where nobody says otherwise
# Keys of transformers' PretrainedConfig and GenerationConfig: no meaning for the network.
_GENERIC = """
_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path add_cross_attention
architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens
chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
do_sample dtype early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
finetuning_task forced_bos_token_id forced_eos_token_id id2label is_decoder is_encoder_decoder
label2id length_penalty max_length max_new_tokens min_length min_new_tokens model_type
name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
output_attentions output_hidden_states output_scores prefix problem_type pruned_heads
remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p use_bfloat16
use_cache use_return_dict
"""
GENERIC_KEYS = frozenset(_GENERIC.split())
_TOP_KEYS = frozenset({"ignore_index", "image_placeholder", "media_placeholder_token_id"})
# Values of the architecture that k3c implements in one way only.
_FIXED: Mapping[str, object] = {
    "hidden_act": "situ",
    "topk_method": "noaux_tc",
    "moe_router_activation_func": "sigmoid",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "latent_moe_use_norm": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
_FIXED_LINEAR: Mapping[str, object] = {"use_full_rank_gate": True, "short_conv_kernel_size": 4}
_FIXED_QUANT: Mapping[str, object] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
}
_FIXED_QUANT_WEIGHTS: Mapping[str, object] = {
    "num_bits": 4,
    "group_size": MX_BLOCK,
    "type": "float",
    "symmetric": True,
    "strategy": "group",
}


@dataclass(frozen=True)
class TextConfig:
    """The text model; names are those of `config.json`, `linear_attn_config` flattened.

    `gate_lower_bound` None is the softplus gate, `activation_situ_linear_beta` None is no cap on
    the up branch. Layer lists count from 0.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    attn_res_block_size: int
    first_k_dense_replace: int
    moe_layer_freq: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    max_position_embeddings: int
    use_grouped_topk: bool
    moe_renormalize: bool
    rms_norm_eps: float
    routed_scaling_factor: float
    activation_situ_beta: float
    activation_situ_linear_beta: float | None
    initializer_range: float
    mla_lora_norm_eps: float
    kda_num_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float | None
    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]
    eos_token_ids: tuple[int, ...]

    @property
    def kda_width(self) -> int:
        """Columns of the KDA projections: heads times head dim."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Columns of one MLA query head: the nope part, then the pe part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_row(self) -> int:
        """Values that the MLA cache keeps of one token: latent, then pe part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_width(self) -> int:
        """Inner width of the merged shared experts."""
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def num_blocks(self) -> int:
        """Attention Residuals blocks, which is the number of bank rows at the final readout."""
        return -(-self.num_hidden_layers // self.attn_res_block_size)

    def is_kda(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) mixes tokens with KDA; otherwise with MLA."""
        return layer in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) has a latent mixture of experts; otherwise a dense MLP."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def kind(self, layer: int) -> str:
        """Return the block kind of a layer: `{kda|mla}_{moe|dense}`."""
        return (
            f"{'kda' if self.is_kda(layer) else 'mla'}_{'moe' if self.is_moe(layer) else 'dense'}"
        )

    def commit_row(self, layer: int) -> int:
        """Return the bank row that the layer's attention site writes, or -1."""
        block, inside = divmod(layer, self.attn_res_block_size)
        return -1 if inside else block

    def attn_rows(self, layer: int) -> int:
        """Return the bank rows that the layer's attention site reads."""
        return -(-layer // self.attn_res_block_size)

    def attn_restart(self, layer: int) -> int:
        """Return 1 where the attention site has no prefix yet (layer 0), else 0."""
        return int(layer == 0)

    def ffn_rows(self, layer: int) -> int:
        """Return the bank rows that the layer's feed-forward site reads."""
        return layer // self.attn_res_block_size + 1

    def ffn_restart(self, layer: int) -> int:
        """Return 1 where the prefix restarts with this layer's attention output, else 0."""
        return int(self.commit_row(layer) >= 0)

    def layer_attrs(self, layer: int) -> dict[str, int]:
        """Return the attributes that a call of a block graph supplies for this layer."""
        return {
            "attn_restart": self.attn_restart(layer),
            "attn_rows": self.attn_rows(layer),
            "commit_row": self.commit_row(layer),
            "ffn_restart": self.ffn_restart(layer),
            "ffn_rows": self.ffn_rows(layer),
        }


def load_config(path: str | Path) -> TextConfig:
    """Read the text configuration of a model.

    Args:
        path: A Hugging Face model directory, or its config.json.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: There is no config.json, it is not JSON, or a key is missing, unknown or has a
            value that k3c does not implement.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    return parse_config(read_json(file), str(file))


def parse_config(data: object, where: str = "config.json") -> TextConfig:
    """Check a parsed config.json and return its text part.

    Args:
        data: The JSON value.
        where: Its file, for messages.

    Raises:
        ConfigError: As for `load_config`.
    """
    top = Keys(data, where)
    text = Keys(top.get("text_config"), f"{where}: text_config")
    if "tie_word_embeddings" in top.data:
        top.fixed({"tie_word_embeddings": False})
    token_ids = {"bos_token_id", "eos_token_id", "pad_token_id"}
    eos = text.data.get("eos_token_id", top.data.get("eos_token_id"))
    # Vision is another graph; until it is compiled its settings change nothing here.
    top.reject_unknown({*GENERIC_KEYS, *_TOP_KEYS, *token_ids, "vision_config"})
    config = _parse_text(text, _token_ids(eos, where))
    text.reject_unknown({*GENERIC_KEYS, *token_ids})
    _check_limits(config, text)
    return config


def _parse_text(text: Keys, eos: tuple[int, ...]) -> TextConfig:
    linear = Keys(text.get("linear_attn_config"), f"{text.where}.linear_attn_config")
    text.fixed(_FIXED)
    linear.fixed(_FIXED_LINEAR)
    _check_quantization(Keys(text.get("quantization_config"), f"{text.where}.quantization_config"))
    values: dict[str, Any] = {
        "rms_norm_eps": text.positive("rms_norm_eps"),
        "routed_scaling_factor": text.positive("routed_scaling_factor"),
        "initializer_range": text.number("initializer_range"),
        "activation_situ_beta": text.positive("activation_situ_beta"),
        "activation_situ_linear_beta": _or_null(text, "activation_situ_linear_beta"),
        "mla_lora_norm_eps": text.positive(
            "mla_lora_norm_eps" if "mla_lora_norm_eps" in text.data else "rms_norm_eps"
        ),
        "first_k_dense_replace": text.integer("first_k_dense_replace", low=0),
        "kda_num_heads": linear.integer("num_heads"),
        "kda_head_dim": linear.integer("head_dim"),
        "short_conv_kernel_size": linear.integer("short_conv_kernel_size"),
        "gate_lower_bound": _or_null(linear, "gate_lower_bound"),
        "kda_layers": linear.layers("kda_layers"),
        "full_attn_layers": linear.layers("full_attn_layers"),
        "eos_token_ids": eos,
    }
    linear.reject_unknown()
    for field in fields(TextConfig):
        if field.name not in values:
            reader = text.boolean if field.type == "bool" else text.integer
            values[field.name] = reader(field.name)
    return TextConfig(**values)


def _or_null(keys: Keys, key: str) -> float | None:
    return None if keys.get(key) is None else keys.number(key)


def _check_quantization(quant: Keys) -> None:
    quant.fixed(_FIXED_QUANT)
    groups = Keys(quant.get("config_groups"), f"{quant.where}.config_groups")
    if len(groups.data) != 1:
        raise ConfigError(f"{len(groups.data)} quantization groups, expected 1", groups.where)
    name = next(iter(groups.data))
    group = Keys(groups.get(name), f"{groups.where}.{name}")
    weights = Keys(group.get("weights"), f"{group.where}.weights")
    weights.fixed(_FIXED_QUANT_WEIGHTS)
    if weights.data.get("scale_dtype", "torch.uint8") not in ("torch.uint8", "uint8"):
        raise weights.wrong("scale_dtype", '"torch.uint8" (e8m0 bytes)')
    for keys, key in (
        (group, "input_activations"),
        (group, "output_activations"),
        (quant, "kv_cache_scheme"),
    ):
        if keys.data.get(key) is not None:
            raise keys.wrong(key, "null: k3c quantizes weights only")


def _check_limits(config: TextConfig, text: Keys) -> None:
    listed = sorted(config.kda_layers + config.full_attn_layers)
    if listed != list(range(config.num_hidden_layers)):
        raise ConfigError(
            f"kda_layers and full_attn_layers name {len(listed)} layers, expected each of "
            f"1..{config.num_hidden_layers} exactly once",
            f"{text.where}.linear_attn_config",
        )
    for key in ("routed_expert_hidden_size", "moe_intermediate_size"):
        if getattr(config, key) % MX_BLOCK:
            raise text.wrong(key, f"a multiple of {MX_BLOCK}, the MXFP4 block")
    if config.num_key_value_heads != config.num_attention_heads:
        raise text.wrong("num_key_value_heads", f"num_attention_heads {config.num_attention_heads}")
    if config.num_experts_per_token > config.num_experts:
        raise text.wrong("num_experts_per_token", f"at most num_experts {config.num_experts}")
    if config.gate_lower_bound is not None and config.gate_lower_bound >= 0:
        bound = f"{config.gate_lower_bound}"
        raise ConfigError(f"gate_lower_bound is {bound}, expected a number < 0 or null", text.where)
    if config.activation_situ_linear_beta is not None and config.activation_situ_linear_beta <= 0:
        raise text.wrong("activation_situ_linear_beta", "a number > 0, or null for no cap")
    if any(not 0 <= i < config.vocab_size for i in config.eos_token_ids):
        raise ConfigError(
            f"eos_token_id {list(config.eos_token_ids)}, expected 0..{config.vocab_size - 1}",
            text.where,
        )


def stop_token_ids(directory: str | Path, config: TextConfig) -> tuple[int, ...]:
    """Return the ids that end a generation: generation_config.json's, else the config's.

    Args:
        directory: The model directory (or its config.json, which has no generation config).
        config: The model's configuration.

    Raises:
        ConfigError: generation_config.json is not JSON or an id is outside the vocabulary.
    """
    file = Path(directory) / "generation_config.json"
    if not file.is_file():
        return config.eos_token_ids
    keys = Keys(read_json(file), str(file))
    if keys.data.get("eos_token_id") is None:
        return config.eos_token_ids
    ids = _token_ids(keys.data["eos_token_id"], str(file))
    if any(not 0 <= i < config.vocab_size for i in ids):
        raise keys.wrong("eos_token_id", f"ids in 0..{config.vocab_size - 1}")
    return ids


def _token_ids(value: Any, where: str) -> tuple[int, ...]:
    ids: list[Any] = value if isinstance(value, list) else [value]
    if not ids or any(type(i) is not int for i in ids):
        found = json.dumps(value)
        raise ConfigError(f"eos_token_id is {found}, expected a token id or a list of ids", where)
    return tuple(ids)


def config_digest(config: TextConfig) -> str:
    """Return the sha256 of everything in a configuration that shapes the text model."""
    text = json.dumps(asdict(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
