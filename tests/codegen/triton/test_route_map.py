"""map_experts, and route_dispatch with a map: the reference's slots, weights and order."""

import pytest
import torch

from k3c.codegen.templates.triton.route import RouteDispatch
from k3c.codegen.templates.triton.route_map import MapExperts, RoutePlaced
from k3c.ir.graph import LayerAttr, Node
from k3c.placement.expert_map import expert_map
from k3c.placement.placement import Placement, contiguous
from k3c.targets.target import load_target
from tests.support.triton_runner import GPU_TARGETS, check, compiles, node, value

BOUND = 2e-6  # sigmoid within 5e-7, a sum of 16 and a division after it


def table(placement: Placement, rank: int) -> torch.Tensor:
    """A rank's map of layer 0."""
    experts = placement.num_experts
    rows = expert_map(placement, 0)[rank * experts : (rank + 1) * experts]
    return torch.from_numpy(rows.copy())


def placed(logits, bias, rank_map, k, slots):
    rows = len(logits)
    results = [("f32", rows, k), ("i32", slots + 1), ("i32", rows, k)]
    operands = [logits, bias, rank_map]
    attrs = {"num_experts": slots, "renormalize": True, "scale": 2.5, "k": k}
    return check(RoutePlaced(), node("route_dispatch", operands, results, **attrs), operands, BOUND)


def forced(monkeypatch, **config):
    monkeypatch.setattr(RoutePlaced, "config", lambda *_: config)


# The product's 72 ranks of 13 slots; seven experts on three ranks; replicas on all of four ranks.
@pytest.mark.parametrize(
    ("rows", "experts", "k", "ranks", "spare"),
    [(1, 896, 16, 72, 0), (2, 896, 16, 72, 0), (3, 896, 16, 72, 0), (5, 7, 3, 3, 0),
     (2, 12, 4, 5, 0), (6, 8, 5, 4, 3)],
)  # fmt: skip
def test_ranks_share_every_routed_row_and_each_sorts_its_own(rows, experts, k, ranks, spare):
    torch.manual_seed(rows)
    logits, bias = torch.randn(rows, experts), torch.randn(experts)
    placement = contiguous(experts, ranks, (0,), spare)
    taken = torch.zeros(rows, k, dtype=torch.int32)
    for rank in sorted({0, 1, ranks // 2, ranks - 1} if ranks > 5 else range(ranks)):
        weights, offsets, order = placed(
            logits, bias, table(placement, rank), k, placement.slots_per_rank
        )
        assert int(offsets[-1]) == int((weights != 0).sum())
        mine = order.flatten()[: int(offsets[-1])]
        taken += (weights != 0).int()
        assert torch.equal(weights.flatten()[mine.long()] != 0, torch.ones_like(mine).bool())
    assert int(taken.max()) <= 1
    if ranks <= 5:
        assert torch.equal(taken, torch.ones_like(taken))


@pytest.mark.parametrize("config", [{"few": 1, "chunks": 0}, {"few": 0, "chunks": 0},
                                    {"few": 0, "chunks": 1}])  # fmt: skip
def test_every_way_to_sort_gives_the_same(monkeypatch, config):
    torch.manual_seed(1)
    forced(monkeypatch, split=1, **config)
    placement = contiguous(40, 3, (0,), 2)
    placed(torch.randn(4, 40), torch.randn(40), table(placement, 1), 4, placement.slots_per_rank)


def test_tokens_take_the_replicas_of_an_expert_in_turn():
    # Expert 0 lies in slot 1 of rank 0 and in slot 0 of rank 1: tokens 0, 2 and tokens 1, 3.
    placement = Placement(3, 2, 2, {0: ((1, 0), (0, 2))})
    logits = torch.tensor([[4.0, 0.0, 1.0]]).expand(4, 3).contiguous()
    first = placed(logits, torch.zeros(3), table(placement, 0), 1, 2)
    second = placed(logits, torch.zeros(3), table(placement, 1), 1, 2)
    assert (first[0] != 0).flatten().tolist() == [True, False, True, False]
    assert (second[0] != 0).flatten().tolist() == [False, True, False, True]
    assert first[1].tolist() == [0, 0, 2]
    assert second[1].tolist() == [0, 2, 2]
    assert first[2].flatten()[:2].tolist() == [0, 2]
    assert second[2].flatten()[:2].tolist() == [1, 3]


def mapping(tensors, slots, **attrs):
    kinds = [("f32", *tensors[0].shape), ("i32", *tensors[0].shape)]
    return node("map_experts", tensors, kinds, num_experts=slots, **attrs)


@pytest.mark.parametrize(("rows", "k"), [(1, 16), (40, 16), (3, 5)])
def test_choices_of_other_ranks_get_the_slots_of_this_one(rows, k):
    torch.manual_seed(rows)
    weights = torch.rand(rows, k) + 0.1
    experts = torch.randint(0, 51, (rows, k), dtype=torch.int32)
    placement = contiguous(51, 4, (0,), 1)
    operands = [weights, experts, table(placement, 2)]
    check(MapExperts(), mapping(operands, placement.slots_per_rank), operands, 0.0)
    n = mapping([weights, experts], 13, first_expert=LayerAttr("first"))
    got, slots = check(MapExperts(), n, [weights, experts], 0.0, {"first": 26})
    assert torch.equal(slots >= 0, (experts >= 26) & (experts < 39))
    assert torch.equal(got != 0, slots >= 0)


@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize("rows", [1, 16, 8192])
def test_every_target_has_the_kernels(target, rows):
    device = load_target(target)
    w, e = value("w", "f32", rows, 16), value("e", "i32", rows, 16)
    rank_map = value("m", "i32", 896, 42)
    own, slots = value("v", "f32", rows, 16), value("s", "i32", rows, 16)
    offsets, order = value("o", "i32", 14), value("r", "i32", rows, 16)
    logits, bias = value("x", "f32", rows, 896), value("b", "f32", 896)
    attrs = {"num_experts": 13}
    compiles(MapExperts(), Node("map_experts", (w, e, rank_map), (own, slots), attrs), device)
    first = {**attrs, "first_expert": LayerAttr("first_expert")}
    compiles(MapExperts(), Node("map_experts", (w, e), (own, slots), first), device)
    attrs |= {"k": 16, "renormalize": True, "scale": 1.0}
    results = (own, offsets, order)
    compiles(
        RoutePlaced(), Node("route_dispatch", (logits, bias, rank_map), results, attrs), device
    )


def test_the_map_decides_which_template_a_routing_gets():
    device, logits = load_target("h200"), torch.zeros(1, 8)
    results = [("f32", 1, 2), ("i32", 4), ("i32", 1, 2)]
    attrs = {"num_experts": 3, "renormalize": True, "scale": 1.0, "k": 2}
    by_number = node("route_dispatch", [logits, torch.zeros(8)], results, **attrs)
    rank_map = torch.ones(8, 3, dtype=torch.int32)
    mapped = node("route_dispatch", [logits, torch.zeros(8), rank_map], results, **attrs)
    assert [RouteDispatch().accepts(n, device) is None for n in (by_number, mapped)] == [
        True,
        False,
    ]
    assert [RoutePlaced().accepts(n, device) is None for n in (by_number, mapped)] == [False, True]
