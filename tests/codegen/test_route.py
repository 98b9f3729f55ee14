import pytest
import torch

from k3c.codegen.templates.tvm.dispatch import TEMPLATES as DISPATCHES
from k3c.codegen.templates.tvm.route_topk import TEMPLATES as ROUTES
from k3c.export.ops import REFERENCE
from tests.support.kernel_runner import check, node, run

(ROUTE,), (DISPATCH,) = ROUTES, DISPATCHES
BOUND = 2e-6  # sigmoid within 5e-7, a sum of 16 and a division after it


def route(logits, bias, k, renormalize=True, scale=1.0):
    rows = len(logits)
    results = [("f32", rows, k), ("i32", rows, k)]
    return node("route_topk", [logits, bias], results, k=k, renormalize=renormalize, scale=scale)


@pytest.mark.parametrize("rows", [1, 3, 63, 100])
@pytest.mark.parametrize(("experts", "k"), [(896, 16), (32, 4), (13, 13), (5, 1)])
def test_the_chosen_experts_and_weights_are_the_reference_s(rows, experts, k):
    logits, bias = torch.randn(rows, experts), torch.randn(experts)
    check(ROUTE, route(logits, bias, k), [logits, bias], BOUND)


@pytest.mark.parametrize("renormalize", [True, False])
def test_scale_and_renormalisation_are_applied(renormalize):
    logits, bias = torch.randn(7, 32), torch.randn(32)
    check(ROUTE, route(logits, bias, 4, renormalize, 2.5), [logits, bias], BOUND)


@pytest.mark.parametrize("first", [0, 32, 880])
def test_winners_may_all_lie_in_one_narrow_range(first):
    logits, bias = torch.randn(3, 896), torch.zeros(896)
    logits[:, first : first + 16] += 100
    _, experts = check(ROUTE, route(logits, bias, 16), [logits, bias], BOUND)
    assert sorted(experts[0].tolist()) == list(range(first, first + 16))


def test_ties_go_to_the_lower_index():
    logits, bias = torch.zeros(2, 24), torch.zeros(24)
    _, experts = check(ROUTE, route(logits, bias, 5), [logits, bias], BOUND)
    assert experts.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_nan_logits_still_choose_distinct_experts_in_range():
    logits, bias = torch.full((2, 24), torch.nan), torch.zeros(24)
    logits[1, 5] = 1.0
    _, experts = run(ROUTE, route(logits, bias, 6), [logits, bias])
    for row in experts.tolist():
        assert len(set(row)) == 6
        assert min(row) >= 0
        assert max(row) < 24
    assert experts[1, 0] == 5


@pytest.mark.parametrize("first", [0, 8, 24])
def test_weights_of_other_ranks_experts_are_zero(first):
    logits, bias = torch.randn(7, 32), torch.randn(32)
    n = node(
        "route_topk", [logits, bias], [("f32", 7, 4), ("i32", 7, 4)],
        k=4, renormalize=True, scale=1.0, num_experts=8, first_expert=first,
    )  # fmt: skip
    check(ROUTE, n, [logits, bias], BOUND)


@pytest.mark.parametrize("first", [0, 7, 60])
def test_dispatch_takes_the_experts_of_this_rank(first):
    chosen = torch.randint(0, 64, (13, 8), dtype=torch.int32)
    attrs = {"num_experts": 7, "first_expert": first}
    n = node("dispatch", [chosen], [("i32", 8), ("i32", 13, 8)], **attrs)
    offsets, order = run(DISPATCH, n, [chosen])
    want_offsets, want_order = REFERENCE["dispatch"](chosen, **attrs)
    assert torch.equal(offsets, want_offsets)
    live = int(offsets[-1])
    assert torch.equal(order.flatten()[:live], want_order.flatten()[:live])
    # Poison still: entries past the last row are not written.
    assert (order.flatten()[live:] == -1).all()


@pytest.mark.parametrize(("rows", "k", "experts"), [(1, 16, 896), (3, 4, 5), (100, 8, 64)])
def test_dispatch_sorts_rows_by_expert_and_keeps_their_order(rows, k, experts):
    chosen = torch.randint(0, experts, (rows, k), dtype=torch.int32)
    n = node("dispatch", [chosen], [("i32", experts + 1), ("i32", rows, k)], num_experts=experts)
    offsets, order = run(DISPATCH, n, [chosen])
    expected = REFERENCE["dispatch"](chosen, num_experts=experts)
    assert torch.equal(offsets, expected[0])
    assert torch.equal(order, expected[1])
