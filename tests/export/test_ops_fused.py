"""Kernel-level references equal the chain of model-level ops that they replace, bit for bit."""

import pytest
import torch

from k3c.export.ops import REFERENCE
from k3c.export.ops import registry as ops

ACTS = pytest.mark.parametrize("act", [torch.float32, torch.bfloat16], ids=str)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def randn():
    generator = torch.Generator().manual_seed(1)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(dtype)

    return draw


def call(name, *operands, **attrs):
    results = REFERENCE[name](*operands, **attrs)
    return results[0] if len(results) == 1 else results


@ACTS
@pytest.mark.parametrize(("restart", "rows", "commit"), [(1, 0, 0), (0, 2, -1), (0, 1, 1)])
def test_attn_res_norm_is_join_mix_norm_and_commit(randn, act, restart, rows, commit):
    prefix, delta, bank = randn(7, 16, dtype=act), randn(7, 16, dtype=act), randn(3, 7, 16)
    bank = bank.to(act)
    res_norm, res_proj, norm = randn(16), randn(1, 16), randn(16)
    vectors = (res_norm, res_proj)
    attrs = {"restart": restart, "rows": rows, "commit_row": commit, "res_eps": 1e-5, "eps": 1e-6}
    got = call("attn_res_norm", prefix, delta, bank, *vectors, norm, **attrs)
    joined = call("residual_join", prefix, delta, restart=restart)
    mixed = call("attn_res", joined, bank, *vectors, rows=rows, eps=1e-5)
    committed = call("bank_commit", bank, joined, row=commit)
    want = (joined, call("rms_norm", mixed, norm, eps=1e-6), committed)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@ACTS
def test_one_gemm_gives_the_results_of_several_linears(randn, act):
    x, weights = randn(7, 16, dtype=act), [randn(n, 16, dtype=act) for n in (5, 6, 6, 4)]
    kinds, dtypes = ("none", "situ", "none"), [act, act, "f32"]
    got = REFERENCE["linear"](
        x, torch.cat(weights), widths=[5, 6, 4], result_dtypes=dtypes, epilogues=kinds,
        beta=4.0, linear_beta=25.0,
    )  # fmt: skip
    plain, gate, up = (call("linear", x, w) for w in weights[:3])
    wide = call("linear", x, weights[3], result_dtypes=["f32"])
    want = (plain, call("situ", gate, up, beta=4.0, linear_beta=25.0), wide)
    # A wider GEMM may sum in another order; that moves a bf16 rounding by one step at most.
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert torch.allclose(a.float(), b.float(), rtol=2**-7 if act != torch.float32 else 1e-4)


@ACTS
def test_an_addend_is_added_after_the_products_rounding(randn, act):
    x, w, addend = randn(7, 16, dtype=act), randn(5, 16, dtype=act), randn(7, 5, dtype=act)
    got = call("linear", x, w, addend)
    assert torch.equal(got, call("add", call("linear", x, w), addend))


@ACTS
@pytest.mark.parametrize("bound", [-5.0, "none"])
def test_kda_is_conv_norms_gate_recurrence_and_gated_norm(randn, act, bound):
    q, k, v, z, f = (randn(6, 8, dtype=act) for _ in range(5))
    b, convs = randn(6, 2, dtype=act), [randn(8, 4) for _ in range(3)]
    a_log, bias, o_norm = randn(2), randn(8), randn(4)
    conv, state = randn(3, 3, 24, dtype=act), randn(3, 2, 4, 4)
    where = (i32(0, 1), i32(1, 4), i32(1, 2), i32(9, 0))
    attrs = {"heads": 2, "lower_bound": bound, "scale": 0.5, "l2_eps": 1e-6, "eps": 1e-5}
    got = call(
        "kda", q, k, v, z, f, b, *convs, a_log, bias, o_norm, conv, state, *where, **attrs, chunk=2
    )
    cq, ck, cv, new_conv = call("short_conv", q, k, v, *convs, conv, *where)
    lq = call("l2_norm", cq, heads=2, scale=0.5, eps=1e-6)
    lk = call("l2_norm", ck, heads=2, scale=1.0, eps=1e-6)
    g = call("kda_gate", f, a_log, bias, lower_bound=bound)
    o, new_state = call("kda_recurrence", lq, lk, cv, g, b, state, *where, chunk=2)
    o = call("gated_rms_norm", o, o_norm, z, heads=2, eps=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(got, (o, new_conv, new_state), strict=True))


@ACTS
def test_the_three_mla_kernels_are_mla_attention_and_its_gate(randn, act):
    q, kv_b, z = randn(5, 14, dtype=act), randn(10, 8, dtype=act), randn(5, 4, dtype=act)
    cache, pages = randn(4, 16, 12, dtype=act), i32(1, 2, 3, 0).view(2, 2)
    where = (i32(0, 1), i32(1, 3), i32(4, 14), pages)
    dims = {"heads": 2, "nope_dim": 3, "v_dim": 2}
    q_lat = call("mla_absorb_q", q, kv_b, **dims)
    assert q_lat.dtype == torch.float32
    o_lat = call("mla_attend", q_lat, cache, *where, scale=7**-0.5, latent_dim=8)
    plain = call("mla_absorb_v", o_lat, kv_b, **dims, result_dtypes=[act])
    want = call("mla_attention", q, kv_b, cache, *where, **dims)
    assert torch.equal(plain, want)
    gated = call("mla_absorb_v", o_lat, kv_b, z, **dims)
    assert torch.equal(gated, call("sigmoid_mul", want, z))


@ACTS
def test_combine_norm_rounds_between_the_sum_and_the_norm(randn, act):
    rows, weights, norm = randn(5, 3, 8, dtype=act), randn(5, 3), randn(8)
    want = call("rms_norm", call("combine", rows, weights), norm, eps=1e-5)
    assert torch.equal(call("combine_norm", rows, weights, norm, eps=1e-5), want)


def test_an_unknown_epilogue_is_refused(randn):
    with pytest.raises(AssertionError, match="want 'none' or 'situ'"):
        REFERENCE["linear"](randn(2, 4), randn(3, 4), epilogues=["gelu"])


def test_dtype_names_are_those_of_the_ir():
    assert ops.as_dtype("bf16") == torch.bfloat16
    assert ops.as_dtype(torch.float64) == torch.float64


KDA_ATTRS = {"heads": 2, "lower_bound": -5.0, "scale": 0.5, "l2_eps": 1e-6, "eps": 1e-5, "chunk": 2}


@ACTS
def test_kda_fb_rounds_the_forget_input_before_the_gate(randn, act):
    q, k, v, z = (randn(6, 8, dtype=act) for _ in range(4))
    f_a, f_b = randn(6, 4, dtype=act), randn(8, 4, dtype=act)
    b, small = randn(6, 2, dtype=act), [*(randn(8, 4) for _ in range(3)), randn(2), randn(8)]
    states = randn(3, 3, 24, dtype=act), randn(3, 2, 4, 4)
    tail = (*states, i32(0, 1), i32(1, 4), i32(1, 2), i32(9, 0))
    o_norm = randn(4)
    got = call("kda_fb", q, k, v, z, f_a, b, *small, o_norm, f_b, *tail, **KDA_ATTRS)
    f = call("linear", f_a, f_b)
    want = call("kda", q, k, v, z, f, b, *small, o_norm, *tail, **KDA_ATTRS)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@ACTS
def test_norm_linear_rounds_between_the_norm_and_the_product(randn, act):
    x, norm, w, addend = randn(5, 16, dtype=act), randn(16), randn(6, 16), randn(5, 6, dtype=act)
    y = call("rms_norm", x, norm, eps=1e-5)
    assert torch.equal(call("norm_linear", x, norm, w, eps=1e-5), call("linear", y, w))
    got = call("norm_linear", x, norm, w, addend, eps=1e-5)
    assert torch.equal(got, call("linear", y, w, addend))
