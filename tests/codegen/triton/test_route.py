"""route_topk, dispatch and route_dispatch on GPUs: exact choices, stable order, any logits."""

import pytest
import torch

from k3c.codegen.templates.triton.route import Dispatch, RouteDispatch, RouteTopk
from k3c.ir.graph import LayerAttr, Node
from k3c.targets.target import load_target
from tests.support.triton_runner import GPU_TARGETS, check, compiles, node, run, value

BOUND = 2e-6  # sigmoid within 5e-7, a sum of 16 and a division after it


def route(op, logits, k, first=0, local=0, **attrs):
    """A node of `op` that takes logits and a bias; `local` experts of this rank, 0: all."""
    rows, experts = logits.shape
    count = local or experts
    results = {
        "route_topk": [("f32", rows, k), ("i32", rows, k)],
        "route_dispatch": [("f32", rows, k), ("i32", count + 1), ("i32", rows, k)],
    }[op]
    attrs = {"renormalize": True, "scale": 1.0, **attrs}
    mine = {"num_experts": count, "first_expert": first}
    return node(op, [logits, torch.zeros(experts)], results, k=k, **mine, **attrs)


def routed(logits, bias, k, first=0, local=0, **attrs):
    """Check both ops and return the weights and the experts."""
    n = route("route_dispatch", logits, k, first, local, **attrs)
    check(RouteDispatch(), n, [logits, bias], BOUND)
    n = route("route_topk", logits, k, first, local, **attrs)
    return check(RouteTopk(), n, [logits, bias], BOUND)


# Awkward counts, all experts chosen, the product's 896; one block for all rows (up to 2), and more.
@pytest.mark.parametrize(
    ("rows", "experts", "k"),
    [(1, 896, 16), (2, 896, 16), (3, 896, 16), (1, 32, 4), (7, 51, 5), (5, 13, 13), (3, 5, 1)],
)
def test_experts_weights_and_order_are_the_reference_s(rows, experts, k):
    torch.manual_seed(rows)
    routed(torch.randn(rows, experts), torch.randn(experts), k)


@pytest.mark.parametrize(("rows", "first"), [(1, 0), (2, 48), (5, 32)])
def test_experts_of_other_ranks_weigh_nothing_and_have_no_place(rows, first):
    torch.manual_seed(rows)
    weights, experts = routed(torch.randn(rows, 64), torch.randn(64), 8, first, 16)
    away = (experts < first) | (experts >= first + 16)
    assert away.any()
    assert torch.equal(weights == 0, away)


def test_a_rank_without_any_chosen_expert_places_nothing():
    logits = torch.zeros(2, 64)
    logits[:, :32] = 3.0
    n = route("route_dispatch", logits, 8, 32, 16)
    weights, offsets, order = check(RouteDispatch(), n, [logits, torch.zeros(64)], BOUND)
    assert not weights.any()
    assert not offsets.any()
    assert (order == -1).all()  # poison still


def test_the_first_expert_is_known_at_run_time():
    logits, bias = torch.randn(3, 64), torch.randn(64)
    n = route("route_dispatch", logits, 8, 0, 16)
    n = Node(n.op, n.operands, n.results, {**n.attrs, "first_expert": LayerAttr("first")})
    check(RouteDispatch(), n, [logits, bias], BOUND, {"first": 32})


@pytest.mark.parametrize("renormalize", [True, False])
def test_scale_and_renormalisation_are_applied(renormalize):
    torch.manual_seed(0)
    routed(torch.randn(3, 32), torch.randn(32), 4, renormalize=renormalize, scale=2.5)


@pytest.mark.parametrize("first", [0, 32, 120, 880])
def test_winners_may_all_lie_in_one_narrow_range(first):
    torch.manual_seed(1)
    logits = torch.randn(1, 896)
    logits[:, first : first + 16] += 100
    _, experts = routed(logits, torch.zeros(896), 16)
    assert sorted(experts[0].tolist()) == list(range(first, first + 16))


@pytest.mark.parametrize("experts", [24, 896])
def test_ties_go_to_the_lower_index(experts):
    _, chosen = routed(torch.zeros(2, experts), torch.zeros(experts), 5)
    assert chosen.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_ties_between_experts_of_different_warps_go_to_the_lower_index():
    logits = torch.full((1, 896), -1.0)
    logits[0, [3, 200, 700, 500, 895, 128, 127]] = 2.0
    _, chosen = routed(logits, torch.zeros(896), 4)
    assert chosen.tolist() == [[3, 127, 128, 200]]


def test_infinite_logits_have_their_place_in_the_order():
    logits = torch.full((2, 40), -torch.inf)
    logits[:, 30], logits[:, 7], logits[1, 9] = torch.inf, 1.0, torch.inf
    _, chosen = routed(logits, torch.zeros(40), 5)
    assert chosen.tolist() == [[30, 7, 0, 1, 2], [9, 30, 7, 0, 1]]


@pytest.mark.parametrize("experts", [24, 896])
def test_nan_logits_still_choose_distinct_experts_in_range(experts):
    logits = torch.full((2, experts), torch.nan)
    logits[1, 5] = 1.0
    n = route("route_topk", logits, 6)
    weights, chosen = run(RouteTopk(), n, [logits, torch.zeros(experts)])
    assert chosen.tolist() == [[0, 1, 2, 3, 4, 5], [5, 0, 1, 2, 3, 4]]
    assert weights.isnan().all()
    n = route("route_dispatch", logits, 6)
    weights, offsets, order = run(RouteDispatch(), n, [logits, torch.zeros(experts)])
    assert int(offsets[-1]) == 12
    assert sorted(order.flatten().tolist()) == list(range(12))


def forced(monkeypatch, template, **config):
    monkeypatch.setattr(template, "config", lambda *_: config)
    return template()


def sorting(experts, count, first=0):
    rows, k = experts.shape
    results = [("i32", count + 1), ("i32", rows, k)]
    return node("dispatch", [experts], results, num_experts=count, first_expert=first)


# 40 rows of 16 are three chunks, the last one partly filled.
@pytest.mark.parametrize("chunks", [0, 1])
@pytest.mark.parametrize(
    ("rows", "k", "experts", "count", "first"),
    [(1, 16, 896, 896, 0), (3, 4, 5, 5, 0), (40, 16, 64, 64, 0), (40, 16, 64, 20, 16)],
)
def test_rows_are_sorted_by_expert_and_keep_their_order(
    monkeypatch, chunks, rows, k, experts, count, first
):
    torch.manual_seed(rows)
    chosen = torch.randint(0, experts, (rows, k), dtype=torch.int32)
    template = forced(monkeypatch, Dispatch, chunks=chunks)
    check(template, sorting(chosen, count, first), [chosen], 0.0)


@pytest.mark.parametrize("expert", [0, 63])
def test_all_rows_may_have_one_expert(monkeypatch, expert):
    chosen = torch.full((20, 16), expert, dtype=torch.int32)
    template = forced(monkeypatch, Dispatch, chunks=1)
    check(template, sorting(chosen, 64), [chosen], 0.0)
    check(Dispatch(), sorting(chosen, 64), [chosen], 0.0)


def test_a_choice_and_a_chunked_sort_share_the_workspace(monkeypatch):
    torch.manual_seed(2)
    logits, bias = torch.randn(5, 40), torch.randn(40)
    template = forced(monkeypatch, RouteDispatch, split=1, few=0, chunks=1)
    check(template, route("route_dispatch", logits, 4, 8, 16), [logits, bias], BOUND)


@pytest.mark.device
@pytest.mark.parametrize("rows", [1, 2, 16, 64, 300, 512, 4096, 8192])
@pytest.mark.parametrize(("first", "local"), [(0, 0), (840, 56)])
def test_real_shapes(rows, first, local):
    torch.manual_seed(rows)
    # Scores that differ by more than the rounding of a sigmoid, so that the choice is not in doubt.
    logits = (torch.rand(rows, 896).argsort(-1) / 112 - 4).float()
    routed(logits, torch.zeros(896), 16, first, local)


@pytest.mark.device
@pytest.mark.parametrize("few", [0, 1])
@pytest.mark.parametrize("split", [1, 4, 8])
def test_every_configuration_gives_the_same(monkeypatch, few, split):
    torch.manual_seed(4)
    logits = (torch.rand(2, 896).argsort(-1) / 112 - 4).float()
    template = forced(monkeypatch, RouteDispatch, split=split, few=few, chunks=0)
    check(template, route("route_dispatch", logits, 16), [logits, torch.zeros(896)], BOUND)


def test_more_choices_than_a_warp_keeps_are_refused():
    n = route("route_topk", torch.zeros(2, 896), 65)
    assert "chooses 1 to 64" in str(RouteTopk().accepts(n, load_target("h200")))


def abstract(op, rows, local):
    """A node of the product's router without tensors."""
    operands = (value("x", "f32", rows, 896), value("b", "f32", 896))
    weights, experts = value("w", "f32", rows, 16), value("e", "i32", rows, 16)
    offsets, order = value("o", "i32", local + 1), value("r", "i32", rows, 16)
    results = {
        "route_topk": (weights, experts),
        "dispatch": (offsets, order),
        "route_dispatch": (weights, offsets, order),
    }[op]
    attrs = {"num_experts": local, "first_expert": LayerAttr("first_expert")}
    if op == "dispatch":
        return Node(op, (experts,), results, attrs)
    return Node(op, operands, results, {**attrs, "k": 16, "renormalize": True, "scale": 1.0})


@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize("rows", [1, 16, 8192])
def test_every_target_has_the_kernels(target, rows):
    device = load_target(target)
    compiles(RouteDispatch(), abstract("route_dispatch", rows, 56), device)
    compiles(RouteTopk(), abstract("route_topk", rows, 896), device)
    compiles(Dispatch(), abstract("dispatch", rows, 896), device)
