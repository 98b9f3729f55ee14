"""KDA: convolution, gate, norms, and the recurrence in both forms, per segment."""

import pytest
import torch
import torch.nn.functional as F

from k3c.export.ops import (
    kda_chunkwise,
    kda_gate,
    kda_recurrence,
    kda_recurrent,
    l2_norm,
    short_conv,
)
from tests.support.closeness import relative_error


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_the_bounded_gate_is_a_sigmoid_not_a_clamp():
    f, bias, a_log = 8 * randn(50, 12), randn(12, seed=1), randn(3, seed=2)
    x = a_log.exp().repeat_interleave(4) * (f + bias)
    got = kda_gate(f, a_log, bias, -5.0)
    assert torch.allclose(got, -5 * torch.sigmoid(x), rtol=1e-12)
    rate = a_log.exp().repeat_interleave(4)
    clamped = (-rate * F.softplus(f + bias)).clamp(min=-5)
    assert relative_error(got, clamped) > 0.2
    assert got.min() > -5
    assert got.max() < 0


def test_without_a_bound_the_gate_is_the_unbounded_softplus():
    f, bias, a_log = 8 * randn(50, 12), randn(12, seed=1), randn(3, seed=2)
    want = -a_log.exp().repeat_interleave(4) * torch.log1p((f + bias).exp())
    for none in (None, "none"):
        assert torch.allclose(kda_gate(f, a_log, bias, none), want, rtol=1e-9)
    assert want.min() < -5


def test_the_l2_epsilon_stands_inside_the_root():
    x = 1e-3 * randn(7, 8)
    norm = (x.view(7, 2, 4).square().sum(-1, keepdim=True) + 1e-6).sqrt()
    want = (x.view(7, 2, 4) / norm * 0.5).view(7, 8)
    assert torch.allclose(l2_norm(x, 2, 0.5, 1e-6), want, rtol=1e-12)
    assert relative_error(F.normalize(x.view(7, 2, 4), dim=-1).view(7, 8) * 0.5, want) > 0.05


def conv_arguments(tokens, width=6):
    raw = [randn(tokens, width, seed=s) for s in (1, 2, 3)]
    weights = [randn(width, 4, seed=s) for s in (4, 5, 6)]
    return raw, weights


def test_the_convolution_is_causal_with_silu_and_the_last_tap_on_the_current_token():
    raw, weights = conv_arguments(9)
    state = torch.full((2, 3, 18), torch.nan, dtype=torch.float64)
    *got, _ = short_conv(*raw, *weights, state, i32(0), i32(9), i32(1), i32(0))
    for x, w, y in zip(raw, weights, got, strict=True):
        padded = F.pad(x.T, (3, 0))[None]
        want = F.silu(F.conv1d(padded, w[:, None], groups=6)[0].T)
        assert torch.allclose(y, want, rtol=1e-12)


@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_the_convolution_state_carries_raw_rows_over_any_cut(cut):
    raw, weights = conv_arguments(9)
    fresh = torch.full((2, 3, 18), torch.nan, dtype=torch.float64)
    *whole, end = short_conv(*raw, *weights, fresh, i32(0), i32(9), i32(1), i32(0))
    head, tail = [x[:cut] for x in raw], [x[cut:] for x in raw]
    *first, state = short_conv(*head, *weights, fresh, i32(0), i32(cut), i32(1), i32(0))
    rest = i32(9 - cut)
    *second, state = short_conv(*tail, *weights, state, i32(0), rest, i32(1), i32(cut))
    for one, a, b in zip(whole, first, second, strict=True):
        assert torch.equal(torch.cat([a, b]), one)
    assert torch.equal(state[1], end[1])
    assert torch.equal(end[1], torch.cat(raw, -1)[-3:])
    assert state[0].isnan().all()


def recurrence_arguments(tokens, g, *, heads=3, dim=8, dtype=torch.float64):
    q, k, v = (randn(tokens, heads, dim, seed=s, dtype=dtype) for s in (1, 2, 3))
    k, q = F.normalize(k, dim=-1), F.normalize(q, dim=-1) * dim**-0.5
    beta = torch.sigmoid(randn(tokens, heads, seed=5, dtype=dtype))
    return q, k, v, g.to(dtype), beta, randn(heads, dim, dim, seed=6, dtype=dtype)


def decays(name, tokens, heads=3, dim=8):
    noise = torch.rand(tokens, heads, dim, generator=torch.Generator().manual_seed(4))
    return {
        "near -5": -5 + 0.01 * noise,
        "near 0": -1e-3 * noise,
        "mixed": torch.where(noise > 0.5, -4.999, -1e-4),
        "spread": -5 * noise,
    }[name]


def test_the_recurrence_is_the_delta_rule_written_as_matrices():
    q, k, v, g, beta, state = recurrence_arguments(6, decays("spread", 6))
    got, end = kda_recurrent(q, k, v, g, beta, state)
    for h in range(3):
        s = state[h]
        for t in range(6):
            kt = k[t, h][:, None]
            keep = torch.eye(8, dtype=s.dtype) - beta[t, h] * kt @ kt.T
            s = keep @ torch.diag(g[t, h].exp()) @ s + beta[t, h] * kt @ v[t, h][None]
            assert torch.allclose(got[t, h], s.T @ q[t, h], rtol=1e-10)
        assert torch.allclose(end[h], s, rtol=1e-10)


@pytest.mark.parametrize("name", ["near -5", "near 0", "mixed", "spread"])
@pytest.mark.parametrize(("tokens", "chunk"), [(1, 16), (3, 16), (63, 16), (100, 64), (64, 64)])
def test_chunks_equal_the_recurrence_at_every_decay(name, tokens, chunk):
    arguments = recurrence_arguments(tokens, decays(name, tokens))
    want, want_end = kda_recurrent(*arguments)
    got, got_end = kda_chunkwise(*arguments, chunk=chunk)
    assert relative_error(got, want) < 1e-12
    assert relative_error(got_end, want_end) < 1e-12


def test_float32_chunks_of_64_survive_a_cumulative_decay_of_320():
    single = recurrence_arguments(64, decays("near -5", 64), dtype=torch.float32)
    double = tuple(x.double() for x in single)
    got, end = kda_chunkwise(*single, chunk=64)
    want, want_end = kda_recurrent(*double)
    assert relative_error(got, want) < 1e-5
    assert relative_error(end, want_end) < 1e-5


def packed(*segments, chunk=4):
    """Run packed segments (tokens, context, slot) followed by one padding row."""
    rows = sum(n for n, _, _ in segments) + 1
    q, k, v = (randn(rows, 8, seed=s) for s in (1, 2, 3))
    g, b = -5 * torch.sigmoid(randn(rows, 8, seed=4)), randn(rows, 2, seed=5)
    state = randn(5, 2, 4, 4, seed=6)
    tokens = [n for n, _, _ in segments]
    start = [sum(tokens[:s]) for s in range(len(tokens))]
    where = (i32(*start), i32(*tokens), i32(*(s for *_, s in segments)))
    context = i32(*(c for _, c, _ in segments))
    inputs = (q, k, v, g, b)
    return inputs, state, kda_recurrence(*inputs, state, *where, context, chunk)


@pytest.mark.parametrize("chunk", [0, 4])
def test_segments_do_not_see_each_other_and_padding_touches_nothing(chunk):
    segments = ((5, 0, 2), (0, 0, 0), (1, 7, 4), (3, 2, 1))
    inputs, before, (out, after) = packed(*segments, chunk=chunk)
    row = 0
    for tokens, context, slot in segments:
        part = [x[row : row + tokens] for x in inputs]
        alone = (i32(0), i32(tokens), i32(slot), i32(context))
        o, state = kda_recurrence(*part, before, *alone, chunk)
        assert torch.equal(out[row : row + tokens], o)
        if tokens:
            assert torch.equal(after[slot], state[slot])
        row += tokens
    assert (out[row:] == 0).all()
    assert torch.equal(after[[0, 3]], before[[0, 3]])


def test_a_fresh_segment_ignores_what_its_slot_holds():
    segments = ((4, 0, 2),)
    inputs, before, (out, after) = packed(*segments)
    poisoned = torch.full_like(before, torch.nan)
    where = (i32(0), i32(4), i32(2), i32(0))
    again, state = kda_recurrence(*inputs, poisoned, *where, 4)
    assert torch.equal(again, out)
    assert torch.equal(state[2], after[2])
