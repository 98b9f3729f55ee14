"""MLA: the paged cache, and the absorbed form against the expanded one and a plain loop."""

import pytest
import torch

from k3c.export.ops import mla_append, mla_attention, mla_attention_expanded
from tests.support.closeness import relative_error

HEADS, NOPE, PE, VALUE, LATENT, PAGE = 3, 8, 4, 6, 16, 16
DIMS = (HEADS, NOPE, VALUE)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# Segments: 3 tokens after 20, 18 fresh ones, an empty one, 1 token after 47; then two padding rows.
TOKENS, CONTEXT = (3, 18, 0, 1), (20, 0, 0, 47)
TABLE = torch.tensor([[4, 2, 0], [1, 9, 0], [0, 0, 0], [3, 8, 5]], dtype=torch.int32)
WHERE = (i32(0, 3, 21, 21), i32(*TOKENS), i32(*CONTEXT), TABLE)
ROWS = 24


def problem(dtype=torch.float64):
    q = randn(ROWS, HEADS * (NOPE + PE), seed=1, dtype=dtype)
    kv = randn(ROWS, LATENT + PE, seed=2, dtype=dtype)
    kv_b = randn(HEADS * (NOPE + VALUE), LATENT, seed=3, dtype=dtype)
    norm = 1 + 0.25 * randn(LATENT, seed=4)
    cache = torch.full((10, PAGE, LATENT + PE), torch.nan, dtype=dtype)
    for s, context in enumerate(CONTEXT):
        for p in range(context):
            cache[TABLE[s, p // PAGE], p % PAGE] = randn(LATENT + PE, seed=100 * s + p)
    return q, kv, kv_b, norm, cache


def plain(q, kv_b, rows, position):
    """Attention of one query over cached rows 0..position, head by head."""
    out = []
    for h in range(HEADS):
        w = kv_b[h * (NOPE + VALUE) : (h + 1) * (NOPE + VALUE)]
        query = q[h * (NOPE + PE) : (h + 1) * (NOPE + PE)]
        seen = rows[: position + 1]
        keys = torch.cat([seen[:, :LATENT] @ w[:NOPE].T, seen[:, LATENT:]], -1)
        weights = torch.softmax(keys @ query * (NOPE + PE) ** -0.5, 0)
        out.append(weights @ (seen[:, :LATENT] @ w[NOPE:].T))
    return torch.cat(out)


@pytest.mark.parametrize("form", [mla_attention, mla_attention_expanded])
def test_both_forms_equal_a_plain_loop_over_the_pages(form):
    q, kv, kv_b, norm, cache = problem()
    cache = mla_append(kv, norm, cache, *WHERE, 1e-5)
    got = form(q, kv_b, cache, *WHERE, *DIMS)
    row = 0
    for s, tokens in enumerate(TOKENS):
        rows = cache[TABLE[s].long()].flatten(0, 1)
        for t in range(tokens):
            want = plain(q[row], kv_b, rows, CONTEXT[s] + t)
            assert relative_error(got[row], want) < 1e-12
            row += 1
    assert (got[row:] == 0).all()


def test_bf16_forms_differ_by_their_roundings_only():
    q, kv, kv_b, norm, cache = problem(torch.bfloat16)
    cache = mla_append(kv, norm.float(), cache, *WHERE, 1e-5)
    absorbed = mla_attention(q, kv_b, cache, *WHERE, *DIMS)
    expanded = mla_attention_expanded(q, kv_b, cache, *WHERE, *DIMS)
    # The expanded form rounds keys and values to bf16 (2^-9 each) where the absorbed one does not.
    assert relative_error(expanded, absorbed) < 0.02


def test_append_normalises_the_latent_and_keeps_the_pe_dims_raw():
    _, kv, _, norm, cache = problem()
    after = mla_append(kv, norm, cache, *WHERE, 1e-5)
    row = kv[1]
    latent = row[:LATENT] / (row[:LATENT].square().mean() + 1e-5).sqrt() * norm
    # Row 1 is position 21 of segment 0: page 1 of its table, which is page 2.
    assert torch.allclose(after[2, 21 - PAGE], torch.cat([latent, row[LATENT:]]), rtol=1e-12)


def test_append_writes_only_the_steps_rows():
    _, kv, _, norm, cache = problem()
    after = mla_append(kv, norm, cache, *WHERE, 1e-5)
    changed = {
        (page, r)
        for page in range(10)
        for r in range(PAGE)
        if not torch.equal(after[page, r].nan_to_num(), cache[page, r].nan_to_num())
    }
    want = {
        (int(TABLE[s, (c + t) // PAGE]), (c + t) % PAGE)
        for s, (n, c) in enumerate(zip(TOKENS, CONTEXT, strict=True))
        for t in range(n)
    }
    assert changed == want
    assert after[0].isnan().all()


def test_the_norm_epsilon_is_the_one_given():
    _, kv, _, norm, cache = problem()
    small = 1e-3 * kv
    a, b = (mla_append(small, norm, cache, *WHERE, eps) for eps in (1e-5, 1e-6))
    # At a mean square of 1e-6 the two epsilons differ by a factor of sqrt(11 / 2).
    ratio = b[2, 4, :LATENT] / a[2, 4, :LATENT]
    mean = small[0, :LATENT].square().mean()
    assert torch.allclose(ratio, ((mean + 1e-5) / (mean + 1e-6)).sqrt().expand(LATENT))


def test_no_position_enters_so_older_rows_may_stand_in_any_order():
    q, kv, kv_b, norm, cache = problem()
    cache = mla_append(kv, norm, cache, *WHERE, 1e-5)
    last = (i32(0), i32(1), i32(47), TABLE[3:])
    query = q[21:22]
    want = mla_attention(query, kv_b, cache, *last, *DIMS)
    shuffled = cache.clone()
    shuffled[[3, 8]] = cache[[8, 3]].flip(1)
    assert relative_error(mla_attention(query, kv_b, shuffled, *last, *DIMS), want) < 1e-12


def test_the_pe_dims_take_part_in_the_scores():
    q, kv, kv_b, norm, cache = problem()
    cache = mla_append(kv, norm, cache, *WHERE, 1e-5)
    want = mla_attention(q, kv_b, cache, *WHERE, *DIMS)
    without = cache.clone()
    without[..., LATENT:] = 0
    assert relative_error(mla_attention(q, kv_b, without, *WHERE, *DIMS), want) > 0.05
