"""Ranks of a mesh: where each stands, and what of an artifact is its own."""

import pytest

from k3c.artifact import Bucket, LayerCall, Plan, RankAttr, SourceRange, WeightEntry
from k3c.artifact_ranks import coordinates, plan_of_rank, rank_count, weight_of_rank

MESHES = (
    {},
    {"tp": 16, "ep": 16},
    {"tp": 2, "dp": 3, "ep": 6},
    {"dp": 72, "ep": 72},
    {"tp": 8, "pp": 2},
    {"tp": 2, "dp": 2, "pp": 3, "ep": 4},
)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_rank_has_a_place_of_its_own(mesh):
    places = [coordinates(mesh, rank) for rank in range(rank_count(mesh))]
    assert len({tuple(p[a] for a in ("tp", "dp", "pp")) for p in places}) == len(places)
    for axis in ("tp", "dp", "pp", "ep"):
        assert {p[axis] for p in places} == set(range(mesh.get(axis, 1)))


def test_neighbours_along_tp_have_neighbouring_ranks_and_stages_come_last():
    mesh = {"tp": 2, "dp": 3, "pp": 2, "ep": 6}
    assert coordinates(mesh, 0) == {"tp": 0, "dp": 0, "pp": 0, "ep": 0}
    assert coordinates(mesh, 1) == {"tp": 1, "dp": 0, "pp": 0, "ep": 1}
    assert coordinates(mesh, 2) == {"tp": 0, "dp": 1, "pp": 0, "ep": 2}
    assert coordinates(mesh, 11) == {"tp": 1, "dp": 2, "pp": 1, "ep": 5}


def test_attributes_of_a_layer_become_numbers():
    bucket = Bucket("decode.b1", "decode", {"T": 1})
    parts = {"first_expert": RankAttr("ep", 7), "tp_place": RankAttr("tp", 1)}
    calls = (LayerCall("g", 3, {"weights": 64}, {"rows": 5}, parts), LayerCall("h", -1, {}, {}))
    plan = Plan(bucket, 0, {}, 0, (), {}, calls, (), "", {})
    bound = plan_of_rank(plan, {"tp": 2, "dp": 3, "ep": 6}, 3)
    assert bound.calls[0].attrs == {"rows": 5, "first_expert": 21, "tp_place": 1}
    assert not bound.calls[0].rank_attrs
    assert bound.calls[1] == calls[1]


def test_a_rank_reads_its_own_indices_of_each_source():
    parts = (SourceRange(0, 0, 6, "tp"), SourceRange(-1, 0, 0), SourceRange(1, 0, 13, "ep"))
    entry = WeightEntry("w", 1, ("a", "b", "c"), "bf16", (6, 4), "row_major", 0, 48, 0, parts)
    own = weight_of_rank(entry, {"tp": 2, "dp": 2, "ep": 4}, 3)
    assert own.ranges == (SourceRange(0, 6, 12), SourceRange(-1, 0, 0), SourceRange(1, 39, 52))
