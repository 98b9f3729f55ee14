"""Which placement a module is compiled for."""

import pytest

from k3c.errors import ConfigError, PlacementError
from k3c.ir.text import parse
from k3c.passes.place_experts import describe, moe_layers, place_experts
from k3c.placement.placement import Placement, contiguous
from k3c.targets.mesh import Mesh

TEXT = """k3ir 1
level model
dim T in [1, 64]

graph @dense(io %x: bf16[T, 64]) -> bf16[T, 64] {
  %y = add(%x, %x) : bf16[T, 64]
  return y=%y
}

graph @moe(io %x: bf16[T, 64]) -> bf16[T, 64] {
  weight %w_gate: bf16[8, 64] from "layers.*.block_sparse_moe.gate.weight"
  weight %bias: f32[8] from "layers.*.block_sparse_moe.gate.e_score_correction_bias"
  weight %w1: mxfp4[8, 64, 64] from "layers.*.block_sparse_moe.experts.*.w1"
  %logits = linear(%x, %w_gate) : f32[T, 8]
  %p, %e = route_topk(%logits, %bias) {k: 3, renormalize: true, scale: 1.0} : f32[T, 3], i32[T, 3]
  %rows = grouped_linear(%x, %w1, %e) : bf16[T, 3, 64]
  %y = combine(%rows, %p) : bf16[T, 64]
  return y=%y
}

schedule {
  dense 0 {}
  moe 1 {}
  moe 2 {}
}
"""


@pytest.fixture
def module():
    return parse(TEXT)


def test_experts_that_divide_stay_where_their_number_says(module):
    placed = place_experts(module, Mesh(tp=4, ep=4))
    assert placed == contiguous(8, 4, [1, 2])
    assert describe(placed) == (
        "8 experts on 4 ranks: 2 physical experts a rank, 0 replicas a layer (by number)"
    )


def test_experts_that_do_not_divide_get_replicas_and_it_is_said(module):
    placed = place_experts(module, Mesh(tp=3, ep=3))
    assert placed is not None
    assert (placed.slots_per_rank, placed.num_replicas) == (3, 1)
    assert "3 physical experts a rank, 1 replicas a layer (placed, sha256" in describe(placed)


def test_spare_slots_are_added_to_every_rank(module):
    placed = place_experts(module, Mesh(tp=4, ep=4), spare=1)
    assert placed is not None
    assert placed.num_replicas == 4


@pytest.mark.parametrize("mesh", [None, Mesh(tp=4)])
def test_ranks_that_do_not_share_experts_need_no_placement(module, mesh):
    assert place_experts(module, mesh) is None
    with pytest.raises(ConfigError, match="a placement on 4 ranks, but experts lie on ep=1 rank"):
        place_experts(module, mesh, contiguous(8, 4, [1, 2]))
    with pytest.raises(ConfigError, match="1 spare slots, but"):
        place_experts(module, mesh, spare=1)


def test_a_given_placement_is_taken(module):
    given = Placement(8, 4, 2, dict.fromkeys((1, 2), ((7, 0), (1, 6), (2, 5), (3, 4))))
    assert place_experts(module, Mesh(tp=4, ep=4), given) is given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (contiguous(16, 4, [1, 2]), "the placement has 16 experts a layer, expected 8"),
        (contiguous(8, 2, [1, 2]), "the placement has 2 ranks, expected 4"),
        (
            contiguous(8, 4, [1]),
            "1 layers placed, the model routes in 2; layer 2 is only in the model",
        ),
        (contiguous(8, 4, [0, 1, 2]), "3 layers placed, .* in 2; layer 0 is only in the placement"),
    ],
)
def test_a_placement_of_another_model_or_mesh_is_refused_with_both_numbers(module, given, message):
    with pytest.raises(PlacementError, match=message):
        place_experts(module, Mesh(tp=4, ep=4), given)


def test_the_layers_that_route_are_found(module):
    assert moe_layers(module) == {1: 8, 2: 8}
