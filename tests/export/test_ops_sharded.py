"""Ops of one rank: the ranks' results together are those of the unsharded op."""

import pytest
import torch

from k3c.export.ops import REFERENCE
from k3c.placement.expert_map import expert_map
from k3c.placement.placement import Placement

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


def placed(experts, ranks, slots):
    """A drawn placement of one layer: every expert somewhere, none twice on a rank."""
    generator, held = torch.Generator().manual_seed(5), [[] for _ in range(ranks)]
    for expert in torch.randperm(experts, generator=generator).tolist():
        held[min(range(ranks), key=lambda r: len(held[r]))].append(expert)
    for rank in held:
        others = [e for e in torch.randperm(experts, generator=generator).tolist() if e not in rank]
        rank += others[: slots - len(rank)]
    return Placement(experts, ranks, slots, {0: tuple(map(tuple, held))})


@pytest.mark.parametrize(("experts", "ranks", "slots"), [(7, 3, 3), (12, 5, 3), (8, 2, 6)])
def test_the_sum_of_placed_experts_is_the_mixture_and_every_row_is_computed_once(
    experts, ranks, slots
):
    placement = placed(experts, ranks, slots)
    logits, bias, x = torch.randn(9, experts), torch.randn(experts), torch.randn(9, 32)
    codes, scales = experts_of(experts, 5, 32)
    weights, chosen = call("route_topk", logits, bias, **ROUTE)
    want = call("combine", call("grouped_linear", x, (codes, scales), chosen), weights)
    table, total, rows = torch.from_numpy(expert_map(placement, 0)), torch.zeros(9, 5), 0
    for r in range(ranks):
        held = list(placement.layers[0][r])
        own = table[r * experts :][:experts]
        part, offsets, order = call("route_dispatch", logits, bias, own, **ROUTE, num_experts=slots)
        assert torch.equal(part, call("map_experts", weights, chosen, own, num_experts=slots)[0])
        found = call("grouped_gemm", x, (codes[held], scales[held]), offsets, order)
        total += call("combine", found, part)
        rows += int(offsets[-1])
    assert rows == chosen.numel()
    assert torch.allclose(total, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_tokens_take_the_replicas_of_an_expert_in_turn():
    # Expert 1 has three replicas, the second of them in slot 4 of this rank; expert 0 is elsewhere.
    table = i32(1, -1, -1, -1, 3, -1, 4, -1).view(2, 4)
    weights = torch.ones(7, 2)
    found, local = call("map_experts", weights, i32(*[1, 0] * 7).view(7, 2), table, num_experts=5)
    assert local[:, 0].tolist() == [-1, 4, -1, -1, 4, -1, -1]
    assert (local[:, 1] == -1).all()
    assert torch.equal(found != 0, local >= 0)


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
