"""Ops of one rank: the ranks' results together are those of the unsharded op."""

import pytest
import torch

from k3c.export.ops import REFERENCE

RANKS = pytest.mark.parametrize("ranks", [1, 2, 4])
ROUTE = {"k": 3, "renormalize": True, "scale": 1.0}


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def call(name, *operands, **attrs):
    results = REFERENCE[name](*operands, **attrs)
    return results[0] if len(results) == 1 else results


def experts_of(count, rows, columns):
    generator = torch.Generator().manual_seed(1)
    shape = (count, rows, columns // 2), (count, rows, columns // 32)
    codes = torch.randint(0, 256, shape[0], generator=generator, dtype=torch.uint8)
    return codes, torch.randint(120, 130, shape[1], generator=generator, dtype=torch.uint8)


@RANKS
def test_the_sum_of_the_ranks_rows_is_the_embedding(ranks):
    table, ids = torch.randn(12, 4), i32(0, 11, 5, 6, 3)
    size = 12 // ranks
    parts = [
        call("embed", ids, table[r * size :][:size], result_dtypes=["f32"], first_row=r * size)
        for r in range(ranks)
    ]
    assert torch.equal(sum(parts), table[ids.long()])


@RANKS
def test_the_sum_of_the_ranks_experts_is_the_mixture(ranks):
    logits, bias, x = torch.randn(7, 8), torch.randn(8), torch.randn(7, 32)
    codes, scales = experts_of(8, 5, 32)
    weights, chosen = call("route_topk", logits, bias, **ROUTE)
    want = call("combine", call("grouped_linear", x, (codes, scales), chosen), weights)
    size, total = 8 // ranks, torch.zeros(7, 5)
    for r in range(ranks):
        mine = {"num_experts": size, "first_expert": r * size}
        local = codes[r * size :][:size], scales[r * size :][:size]
        part, offsets, order = call("route_dispatch", logits, bias, **ROUTE, **mine)
        rows = call("grouped_gemm", x, local, offsets, order)
        # Rows of other ranks' experts are NaN: combine must not read them.
        assert bool(rows.isnan().any()) == (ranks > 1)
        total += call("combine", rows, part)
    assert torch.allclose(total, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@RANKS
def test_route_dispatch_is_route_and_dispatch(ranks):
    logits, bias, size = torch.randn(7, 8), torch.randn(8), 8 // ranks
    for r in range(ranks):
        mine = {"num_experts": size, "first_expert": r * size}
        weights, chosen = call("route_topk", logits, bias, **ROUTE, **mine)
        want = weights, *call("dispatch", chosen, **mine)
        got = call("route_dispatch", logits, bias, **ROUTE, **mine)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_rank_lists_only_the_rows_of_its_experts():
    offsets, order = call(
        "dispatch", i32(0, 3, 2, 5, 3, 2).view(3, 2), num_experts=2, first_expert=2
    )
    assert offsets.tolist() == [0, 2, 4]
    assert order.flatten().tolist() == [2, 5, 1, 4, -1, -1]


def test_advance_moves_live_rows_only():
    args = i32(7, 8, 9), i32(1, 2, 3), i32(4, 0, 6), i32(1, 0, 1), i32(5, 0, 2)
    ids, context, position = call("advance", *args)
    assert ids.tolist() == [7, 2, 9]
    assert context.tolist() == [5, 0, 7]
    assert position.tolist() == [6, 0, 3]


def test_advance_never_makes_an_id_outside_the_vocabulary():
    args = i32(-1, 8), i32(1, 2), i32(4, 3), i32(1, 1), i32(5, 3)
    assert call("advance", *args)[0].tolist() == [0, 8]
