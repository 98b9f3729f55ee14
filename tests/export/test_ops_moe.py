"""The router, products with MXFP4 experts, the weighted sum, and the small activations."""

import pytest
import torch

from k3c.export.ops import (
    combine,
    dispatch,
    gated_rms_norm,
    grouped_gemm,
    grouped_linear,
    rms_norm,
    route_topk,
    sigmoid_mul,
    situ,
)
from k3c.model.mxfp4 import dequantize, quantize
from tests.support.closeness import relative_error


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_all_896_experts_can_win():
    logits = randn(7, 896, seed=1, dtype=torch.float32)
    winners = torch.arange(880, 896)
    logits[:, winners] = 5 + torch.rand(7, 16, generator=torch.Generator().manual_seed(2))
    weights, experts = route_topk(logits, torch.zeros(896), 16, True, 1.0)
    assert (experts.sort(-1).values == winners).all()
    want = torch.sigmoid(logits).gather(-1, experts.long())
    assert torch.allclose(weights, want / want.sum(-1, keepdim=True))


def test_the_bias_chooses_but_never_weighs():
    logits, bias = randn(20, 32, seed=1), 2 * randn(32, seed=2)
    weights, experts = route_topk(logits, bias, 4, True, 1.0)
    choice = torch.sigmoid(logits) + bias
    assert torch.equal(experts.long(), choice.topk(4).indices)
    scores = torch.sigmoid(logits).gather(-1, experts.long())
    assert torch.allclose(weights, scores / scores.sum(-1, keepdim=True))


def test_the_bias_is_not_rounded_to_bf16():
    # Two experts whose biases differ by less than a bf16 step at 8.
    bias = torch.tensor([8.0, 8.01, 8.02, 0.0])
    assert len(bias.bfloat16().unique()) < 4
    _, experts = route_topk(torch.zeros(1, 4), bias, 2, True, 1.0)
    assert experts.tolist() == [[2, 1]]


def test_ties_go_to_the_lower_expert():
    _, experts = route_topk(torch.zeros(2, 40), torch.zeros(40), 5, True, 1.0)
    assert experts.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_a_nan_is_chosen_last_and_weighs_nan():
    logits = torch.tensor([[torch.nan, 1.0, torch.nan, 2.0, -torch.inf]])
    weights, experts = route_topk(logits, torch.zeros(5), 4, False, 1.0)
    assert experts.tolist() == [[3, 1, 4, 0]]
    assert weights.isnan().tolist() == [[False, False, False, True]]
    _, experts = route_topk(torch.full((1, 5), torch.nan), torch.zeros(5), 3, True, 1.0)
    assert experts.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(("renormalize", "scale"), [(True, 1.0), (True, 2.5), (False, 0.5)])
def test_weights_are_renormalised_to_the_scaling_factor(renormalize, scale):
    logits = randn(9, 16, seed=1) - 3
    weights, experts = route_topk(logits, torch.zeros(16), 4, renormalize, scale)
    scores = torch.sigmoid(logits).gather(-1, experts.long())
    total = scores.sum(-1) if not renormalize else torch.ones(9)
    assert torch.allclose(weights.sum(-1), scale * total.double())


def experts_problem(act, inner=48, latent=64, tokens=13, count=6, k=3):
    matrices = [quantize(randn(count, inner, latent, seed=s).float()) for s in (1, 2)]
    chosen = torch.rand(tokens, count, generator=torch.Generator().manual_seed(3)).argsort(-1)
    return randn(tokens, latent, seed=4).to(act), matrices, chosen[:, :k].to(torch.int32)


@pytest.mark.parametrize("act", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_each_row_meets_the_matrix_of_its_expert(act):
    x, (pair, _), experts = experts_problem(act)
    got = grouped_linear(x, *pair, experts)
    weight = dequantize(*pair, torch.float64)
    want = torch.einsum("tk,tjnk->tjn", x.double(), weight[experts.long()])
    bound = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8}[act]
    assert relative_error(got, want) < bound
    rows = got.new_tensor(1.0) * x[:, None].expand(-1, 3, -1)
    assert torch.equal(grouped_linear(rows.contiguous(), *pair, experts), got)


def test_dispatch_sorts_rows_by_expert_and_keeps_their_order():
    experts = torch.tensor([[3, 0], [0, 3], [5, 3]], dtype=torch.int32)
    offsets, order = dispatch(experts, num_experts=6)
    assert offsets.tolist() == [0, 2, 2, 2, 5, 5, 6]
    assert order.flatten().tolist() == [1, 2, 0, 3, 5, 4]
    assert offsets.dtype == order.dtype == torch.int32


def test_the_fused_gemm_with_situ_rounds_like_the_chain():
    x, (gate, up), experts = experts_problem(torch.bfloat16)
    both = tuple(torch.cat(parts, 1) for parts in zip(gate, up, strict=True))
    plan = dispatch(experts, num_experts=6)
    caps = {"beta": 4.0, "linear_beta": 25.0}
    got = grouped_gemm(x, both, *plan, epilogue="situ", **caps)
    chain = situ(grouped_linear(x, *gate, experts), grouped_linear(x, *up, experts), 4.0, 25.0)
    assert torch.equal(got, chain)


def test_combine_accumulates_wide_and_rounds_once():
    rows, weights = randn(9, 16, 32, seed=1).bfloat16(), torch.rand(9, 16)
    want = (rows.double() * weights.double()[..., None]).sum(1)
    got = combine(rows, weights)
    # One bf16 rounding is at most 2^-8 of each value, beside float32's.
    assert ((got.double() - want).abs() <= 2**-8 * want.abs() + 1e-6).all()


def test_combine_does_not_read_rows_of_weight_zero():
    rows, weights = randn(5, 4, 8, seed=1).float(), torch.rand(5, 4)
    weights[:, 1] = weights[2, 3] = 0.0
    want = combine(rows, weights)
    rows[weights == 0] = torch.nan
    assert torch.equal(combine(rows, weights), want)


@pytest.mark.parametrize("cap", [25.0, None, "none"])
def test_situ_caps_both_branches_but_not_the_gates_sigmoid(cap):
    gate, up = 10 * randn(7, 5, seed=1), 100 * randn(7, 5, seed=2)
    capped = up if cap != 25.0 else 25 * torch.tanh(up / 25)
    want = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * capped
    assert torch.allclose(situ(gate, up, 4.0, cap), want, rtol=1e-12)


def test_sigmoid_mul_rounds_the_sigmoid_before_the_product():
    a, z = randn(9, 50, seed=1).bfloat16(), randn(9, 50, seed=2).bfloat16()
    want = (a.float() * torch.sigmoid(z.float()).bfloat16().float()).bfloat16()
    assert torch.equal(sigmoid_mul(a, z), want)
    once = (a.float() * torch.sigmoid(z.float())).bfloat16()
    assert not torch.equal(sigmoid_mul(a, z), once)


def test_norms_keep_the_weight_wide_and_round_once():
    x, weight = randn(9, 64, seed=1).bfloat16(), 1 + 0.25 * randn(64, seed=2).float()
    z = randn(9, 64, seed=3).bfloat16()
    wide = x.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert ((rms_norm(x, weight, 1e-5).double() - want).abs() <= 2**-8 * want.abs()).all()
    heads = wide.view(9, 4, 16)
    normed = heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    gated = (normed * weight[:16].double()).flatten(1) * torch.sigmoid(z.double())
    got = gated_rms_norm(x, weight[:16], z, 4, 1e-5).double()
    assert ((got - gated).abs() <= 2**-8 * gated.abs()).all()
