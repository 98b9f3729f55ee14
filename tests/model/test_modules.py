"""The modules: names, parameter counts at full size, and the traps of wiring."""

from pathlib import Path

import pytest
import torch

from k3c.model.block import KdaBlock, MlaBlock, make_block
from k3c.model.config import load_config
from k3c.model.kda import KimiDeltaAttention
from k3c.model.latent_moe import LatentMoE
from k3c.model.layers import retype_weights
from k3c.model.mla import MultiHeadLatentAttention
from k3c.model.mlp import MLP
from k3c.model.mxfp4 import dequantize, quantize
from k3c.model.options import ModelOptions
from k3c.model.text import TextModel
from tests.model.conftest import TINY
from tests.support.closeness import relative_error

FULL = Path(__file__).resolve().parents[1] / "data/configs/kimi-k3-config.json"
F64 = ModelOptions(torch.float64, torch.float64)


@pytest.fixture(scope="module")
def full_model():
    with torch.device("meta"):
        return TextModel(load_config(FULL), ModelOptions())


@pytest.fixture(scope="module")
def config():
    return load_config(TINY)


def elements(module):
    """Model parameters: two codes a packed byte, scales not counted."""
    named = module.named_parameters()
    counted = ((n, p) for n, p in named if not n.endswith("weight_scale"))
    return sum(p.numel() * (2 if n.endswith("weight_packed") else 1) for n, p in counted)


def randomised(module, seed=0):
    """Fill a module's parameters: norms near 1, matrices of unit gain, experts as MXFP4."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        if p.dtype == torch.uint8:
            continue
        noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        matrix = p.dim() == 2 and "conv" not in name
        p.data = noise / p.shape[-1] ** 0.5 if matrix else 1 + 0.25 * noise
    for child in module.modules():
        if hasattr(child, "weight_packed"):
            shape = (*child.weight_packed.shape[:-1], 2 * child.weight_packed.shape[-1])
            values = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            child.weight_packed.data, child.weight_scale.data = quantize(values)
    return module


def test_full_size_has_the_parameters_of_the_released_text_model(full_model):
    # The total, less vision, less 32 padding entries of A_log in each of 69 layers.
    want = 2_779_931_837_184 - 401_214_464 - 46_144_512 - 69 * 32
    assert elements(full_model) == want


def test_routed_experts_have_latent_width_and_the_shared_width_counts_once(full_model):
    moe = full_model.model.layers[1].block_sparse_moe
    assert moe.experts.w1.weight_packed.shape == (896, 3072, 3584 // 2)
    assert moe.experts.w2.weight_packed.shape == (896, 3584, 3072 // 2)
    assert moe.shared_experts.gate_proj.weight.shape == (6144, 7168)
    assert elements(moe.experts) == 29_595_009_024
    assert elements(moe.shared_experts) == 132_120_576


def test_the_last_two_layers_are_both_mla_and_lists_count_from_one(full_model):
    mla = [i for i, block in enumerate(full_model.model.layers) if isinstance(block, MlaBlock)]
    assert mla == [*range(3, 92, 4), 92]
    assert not full_model.model.layers[0].moe
    assert all(block.moe for block in full_model.model.layers[1:])


def test_parameter_names_are_those_of_the_checkpoint(full_model):
    names = set(full_model.state_dict())
    assert {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.A_log",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.92.block_sparse_moe.gate.e_score_correction_bias",
        "model.layers.92.self_attention_res_proj.weight",
        "model.output_attn_res_norm.weight",
        "model.norm.weight",
        "lm_head.weight",
    } <= names


@pytest.mark.parametrize("kind", ["kda_dense", "kda_moe", "mla_dense", "mla_moe"])
def test_every_block_kind_can_be_built(config, kind):
    block = make_block(config, kind, ModelOptions())
    assert isinstance(block, KdaBlock if kind.startswith("kda") else MlaBlock)
    assert block.moe == kind.endswith("moe")


def test_a_weight_can_keep_its_stored_float32(config):
    block = make_block(config, "kda_moe", ModelOptions())
    wide = {"block_sparse_moe.gate.weight"}
    retype_weights(block, lambda name: torch.float32 if name in wide else torch.bfloat16)
    dtypes = {n: p.dtype for n, p in block.named_parameters()}
    assert dtypes["block_sparse_moe.gate.weight"] == torch.float32
    assert dtypes["self_attn.q_proj.weight"] == torch.bfloat16
    assert dtypes["self_attn.o_norm.weight"] == torch.float32


def rms(x, weight, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def situ(gate, up):
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)


def latent_moe_by_hand(moe, y):
    """Section by section: router, latent, experts, sum, norm, up, shared; one token at a time."""
    experts = [dequantize(m.weight_packed, m.weight_scale, torch.float64) for m in (
        moe.experts.w1, moe.experts.w3, moe.experts.w2)]  # fmt: skip
    rows = []
    for token in y:
        p = torch.sigmoid(moe.gate.weight @ token)
        chosen = (p + moe.gate.e_score_correction_bias).topk(4).indices
        latent = moe.routed_expert_down_proj.weight @ token
        outs = [p[e] / p[chosen].sum() * (experts[2][e] @ situ(
            experts[0][e] @ latent, experts[1][e] @ latent)) for e in chosen]  # fmt: skip
        rows.append(rms(sum(outs), moe.routed_expert_norm.weight))
    routed = torch.stack(rows) @ moe.routed_expert_up_proj.weight.T
    s = moe.shared_experts
    shared = situ(y @ s.gate_proj.weight.T, y @ s.up_proj.weight.T) @ s.down_proj.weight.T
    return routed + shared


def test_the_latent_norm_follows_the_expert_sum(config):
    moe = randomised(LatentMoE(config, F64))
    y = torch.randn(9, config.hidden_size, generator=torch.Generator().manual_seed(5)).double()
    assert relative_error(moe(y), latent_moe_by_hand(moe, y)) < 1e-12


def test_the_mlp_is_down_of_situ_of_gate_and_up(config):
    mlp = randomised(MLP(config, 48, F64))
    x = 9 * torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(5)).double()
    want = situ(x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T) @ mlp.down_proj.weight.T
    assert relative_error(mlp(x), want) < 1e-12


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def lora_norm_output(config, eps):
    """Run MLA on a tiny input, where the LoRA norms' epsilon matters."""
    changed = object.__new__(type(config))
    for name, value in vars(config).items():
        object.__setattr__(changed, name, eps if name == "mla_lora_norm_eps" else value)
    mla = randomised(MultiHeadLatentAttention(changed, F64))
    y = 1e-3 * torch.randn(4, config.hidden_size, generator=torch.Generator().manual_seed(5))
    cache = torch.zeros(2, 16, config.kv_row, dtype=torch.float64)
    where = (i32(0), i32(4), i32(0), i32(1).view(1, 1))
    return mla, y.double(), mla(y.double(), cache, where)


def test_both_lora_norms_use_their_own_epsilon(config):
    mla, y, (_, cache) = lora_norm_output(config, 1e-6)
    kv = y @ mla.kv_a_proj_with_mqa.weight.T
    latent = rms(kv[:, : config.kv_lora_rank], mla.kv_a_layernorm.weight, 1e-6)
    assert relative_error(cache[1, :4, : config.kv_lora_rank], latent) < 1e-12
    assert torch.equal(cache[1, :4, config.kv_lora_rank :], kv[:, config.kv_lora_rank :])
    assert (mla.q_a_layernorm.eps, mla.eps) == (1e-6, 1e-6)
    other = lora_norm_output(config, 1e-5)[2][1]
    assert relative_error(other, cache) > 0.1


def kda_where(tokens):
    return (i32(0), i32(tokens), i32(1), i32(0))


def test_kda_normalises_with_epsilon_1e_6_and_scales_the_query_only(config):
    kda = randomised(KimiDeltaAttention(config, F64))
    heads, dim, width = config.kda_num_heads, config.kda_head_dim, config.kda_width
    # Small inputs make the epsilon visible; one token makes the state a single outer product.
    y = (
        1e-3
        * torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(5)).double()
    )
    conv = torch.zeros(2, 3, 3 * width, dtype=torch.float64)
    state = torch.zeros(2, heads, dim, dim, dtype=torch.float64)
    _, rows, after = kda(y, conv, state, kda_where(1))
    taps = [c.weight[:, 3] for c in (kda.q_conv1d, kda.k_conv1d, kda.v_conv1d)]
    raw = [y[0] @ p.weight.T for p in (kda.q_proj, kda.k_proj, kda.v_proj)]
    _, k, v = (
        torch.nn.functional.silu(t * r).view(heads, dim) for t, r in zip(taps, raw, strict=True)
    )
    k_hat = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    beta = torch.sigmoid(kda.b_proj.weight @ y[0])[:, None]
    want = k_hat[..., None] * (beta * v)[:, None, :]
    assert relative_error(after[1], want) < 1e-12
    assert torch.allclose(rows[1, 2], torch.cat(raw), rtol=1e-12)
    assert (rows[1, :2] == 0).all()


def test_the_kda_output_gate_is_a_sigmoid_after_the_norm(config):
    kda = randomised(KimiDeltaAttention(config, F64))
    width, heads, dim = config.kda_width, config.kda_num_heads, config.kda_head_dim
    y = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(5)).double()
    conv = torch.zeros(2, 3, 3 * width, dtype=torch.float64)
    state = torch.zeros(2, heads, dim, dim, dtype=torch.float64)
    open_gate = kda(y, conv, state, kda_where(3))[0]
    kda.g_proj.weight.data = torch.zeros_like(kda.g_proj.weight)
    half = kda(y, conv, state, kda_where(3))[0]
    assert relative_error(open_gate, half) > 0.1
    # sigmoid(0) is one half where SiLU(0) would be nothing.
    assert float(half.abs().max()) > 0.01
