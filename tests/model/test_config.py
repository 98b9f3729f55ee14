"""What config.json must say, and what happens when it does not."""

import copy
import json
from pathlib import Path

import pytest

from k3c.errors import ConfigError
from k3c.model.config import load_config, parse_config, stop_token_ids

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests/data/k3-tiny"
K3 = ROOT / "tests/data/configs/kimi-k3-config.json"
# Table 1.2 of the specification without the keys that every Hugging Face config has.
REQUIRED = """
vocab_size hidden_size num_hidden_layers intermediate_size hidden_act activation_situ_beta
activation_situ_linear_beta rms_norm_eps first_k_dense_replace moe_layer_freq num_experts
num_experts_per_token num_shared_experts moe_intermediate_size routed_expert_hidden_size
latent_moe_use_norm moe_router_activation_func topk_method use_grouped_topk num_expert_group
topk_group moe_renormalize routed_scaling_factor num_attention_heads num_key_value_heads
q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim mla_use_nope
mla_use_output_gate attn_res_block_size max_position_embeddings num_nextn_predict_layers
tie_word_embeddings initializer_range linear_attn_config quantization_config
"""
REQUIRED_LINEAR = """
num_heads head_dim short_conv_kernel_size gate_lower_bound use_full_rank_gate kda_layers
full_attn_layers
"""


@pytest.fixture
def data():
    return json.loads((TINY / "config.json").read_text())


def text_with(data, path, value):
    """The config with one key below text_config changed."""
    changed = copy.deepcopy(data)
    *parents, key = path.split(".")
    target = changed["text_config"]
    for parent in parents:
        target = target[parent]
    target[key] = value
    return changed


def test_released_config_gives_the_released_schedule():
    config = load_config(K3)
    assert (config.num_hidden_layers, config.num_blocks) == (93, 8)
    mla = [i for i in range(93) if not config.is_kda(i)]
    assert mla == [*range(3, 92, 4), 92]
    assert [config.kind(i) for i in (0, 1, 3, 91, 92)] == [
        "kda_dense", "kda_moe", "mla_moe", "mla_moe", "mla_moe",
    ]  # fmt: skip
    assert [i for i in range(93) if config.commit_row(i) >= 0] == list(range(0, 93, 12))
    assert (config.kda_width, config.qk_head_dim, config.kv_row) == (12288, 192, 576)
    assert config.shared_width == 6144


def test_residual_attributes_follow_the_worked_example(data):
    # Block size 3 and 7 layers, specification 2.2.
    changed = text_with(data, "num_hidden_layers", 7)
    linear = changed["text_config"]["linear_attn_config"]
    linear["kda_layers"], linear["full_attn_layers"] = [1, 2, 3, 5, 6], [4, 7]
    config = parse_config(changed)
    attrs = [config.layer_attrs(i) for i in range(7)]
    assert [a["attn_rows"] for a in attrs] == [0, 1, 1, 1, 2, 2, 2]
    assert [a["ffn_rows"] for a in attrs] == [1, 1, 1, 2, 2, 2, 3]
    assert [a["commit_row"] for a in attrs] == [0, -1, -1, 1, -1, -1, 2]
    assert [a["attn_restart"] for a in attrs] == [1, 0, 0, 0, 0, 0, 0]
    assert [a["ffn_restart"] for a in attrs] == [1, 0, 0, 1, 0, 0, 1]
    assert config.num_blocks == 3


@pytest.mark.parametrize("key", REQUIRED.split())
def test_every_key_of_the_network_is_required(data, key):
    del data["text_config"][key]
    with pytest.raises(ConfigError, match=f"missing key '{key}'") as caught:
        parse_config(data, "some/config.json")
    assert caught.value.where == "some/config.json: text_config"
    assert caught.value.hint


@pytest.mark.parametrize("key", REQUIRED_LINEAR.split())
def test_every_key_of_the_linear_attention_is_required(data, key):
    del data["text_config"]["linear_attn_config"][key]
    with pytest.raises(ConfigError, match=f"missing key '{key}'"):
        parse_config(data)


def test_an_explicit_null_selects_softplus_or_no_cap(data):
    assert parse_config(data).gate_lower_bound == -5.0
    config = parse_config(text_with(data, "linear_attn_config.gate_lower_bound", None))
    assert config.gate_lower_bound is None
    config = parse_config(text_with(data, "activation_situ_linear_beta", None))
    assert config.activation_situ_linear_beta is None


def test_lora_norm_eps_is_a_setting_that_defaults_to_the_norms(data):
    config = parse_config(text_with(data, "mla_lora_norm_eps", 1e-6))
    assert (config.mla_lora_norm_eps, config.rms_norm_eps) == (1e-6, 1e-5)
    changed = text_with(data, "rms_norm_eps", 2e-5)
    del changed["text_config"]["mla_lora_norm_eps"]
    assert parse_config(changed).mla_lora_norm_eps == 2e-5


@pytest.mark.parametrize("path", ["rope_theta", "linear_attn_config.use_beta"])
def test_an_unknown_key_is_an_error_with_its_name(data, path):
    with pytest.raises(ConfigError, match=f"unknown key '{path.split('.')[-1]}'"):
        parse_config(text_with(data, path, 1))


def test_an_unknown_key_at_the_top_is_an_error_with_its_name(data):
    data["draft_config"] = {}
    with pytest.raises(ConfigError, match="unknown key 'draft_config'"):
        parse_config(data)


def test_generic_keys_and_vision_are_ignored_by_name(data):
    for key in ("use_cache", "temperature", "id2label", "torch_dtype"):
        data["text_config"][key] = "anything"
    data["vision_config"] = "not read yet"
    assert parse_config(data).hidden_size == 256


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("hidden_act", "silu"),
        ("topk_method", "greedy"),
        ("moe_router_activation_func", "softmax"),
        ("mla_use_nope", False),
        ("mla_use_output_gate", False),
        ("latent_moe_use_norm", False),
        ("num_expert_group", 8),
        ("topk_group", 4),
        ("tie_word_embeddings", True),
        ("num_nextn_predict_layers", 1),
        ("linear_attn_config.use_full_rank_gate", False),
        ("linear_attn_config.short_conv_kernel_size", 3),
        ("quantization_config.format", "nvfp4-pack-quantized"),
        ("quantization_config.quant_method", "fp8"),
        ("quantization_config.kv_cache_scheme", {"num_bits": 8}),
        ("quantization_config.config_groups.group_0.weights.group_size", 16),
        ("quantization_config.config_groups.group_0.weights.num_bits", 8),
        ("quantization_config.config_groups.group_0.weights.symmetric", False),
        ("quantization_config.config_groups.group_0.input_activations", {"num_bits": 8}),
        ("quantization_config.config_groups", {}),
        ("num_key_value_heads", 2),
        ("num_experts_per_token", 33),
        ("moe_intermediate_size", 100),
        ("routed_expert_hidden_size", 48),
        ("hidden_size", 0),
        ("hidden_size", 256.0),
        ("hidden_size", True),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", float("nan")),
        ("moe_renormalize", 1),
        ("activation_situ_linear_beta", 0),
        ("linear_attn_config.gate_lower_bound", 5.0),
        ("eos_token_id", 2048),
        ("eos_token_id", None),
        ("eos_token_id", []),
        ("linear_attn_config", []),
    ],
)
def test_a_value_that_is_not_implemented_is_an_error_with_found_and_expected(data, path, value):
    with pytest.raises(ConfigError, match=r"expected") as caught:
        parse_config(text_with(data, path, value))
    assert "config.json" in caught.value.where
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("kda", "full"),
    [
        ([1, 2, 3, 5, 6, 7], [4, 8]),
        ([1, 2, 3, 5, 6, 7], [4, 8, 8]),
        ([0, 1, 2, 4, 5, 6], [3, 7, 8]),
        ([1, 2, 3, 4, 5, 6, 7], [4, 8, 9]),
    ],
    ids=["missing", "twice", "counted from 0", "in both"],
)
def test_layer_lists_must_name_every_layer_once(data, kda, full):
    linear = data["text_config"]["linear_attn_config"]
    linear["kda_layers"], linear["full_attn_layers"] = kda, full
    with pytest.raises(ConfigError, match=r"each of 1\.\.9 exactly once"):
        parse_config(data)


def test_no_config_or_no_json_says_what_to_pass(tmp_path):
    with pytest.raises(ConfigError, match="no such file") as caught:
        load_config(tmp_path)
    assert caught.value.where == str(tmp_path / "config.json")
    assert "model directory" in caught.value.hint
    (tmp_path / "config.json").write_text('{"text_config": ')
    with pytest.raises(ConfigError, match="not JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object, found list"):
        load_config(tmp_path)


def test_stop_ids_come_from_the_generation_config_first(tmp_path):
    demo = ROOT / "models/k3-demo"
    assert stop_token_ids(demo, load_config(demo)) == (3842, 3841)
    config = load_config(TINY)
    assert stop_token_ids(TINY, config) == (2002,)
    file = tmp_path / "generation_config.json"
    for text, ids in (
        ('{"eos_token_id": 7}', (7,)),
        ("{}", (2002,)),
        ('{"eos_token_id": [1, 2]}', (1, 2)),
    ):
        file.write_text(text)
        assert stop_token_ids(tmp_path, config) == ids
    file.write_text('{"eos_token_id": 4096}')
    with pytest.raises(ConfigError, match=r"expected ids in 0\.\.2047"):
        stop_token_ids(tmp_path, config)
