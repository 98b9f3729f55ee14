"""Meshes that the compiler cannot lower are passed over, and the answer says why."""

from types import SimpleNamespace

import pytest

from k3c.errors import CodegenError, PassError
from k3c.planner.planned import _compiled
from k3c.planner.search import SHORT_LIST, Quick
from k3c.targets.mesh import Mesh


def candidates(count):
    return [Quick(Mesh(tp=n), 1, 1.0, 1.0, 1) for n in range(1, count + 1)]


def desk_that_lowers(*sizes):
    def time(found):
        if found.mesh.tp in sizes:
            return found
        raise (PassError if found.mesh.tp % 2 else CodegenError)(f"no tp={found.mesh.tp}")

    return SimpleNamespace(time=time, refused={})


def test_a_mesh_without_kernels_gives_its_place_to_the_next():
    desk = desk_that_lowers(2, 3, 4, 5, 6, 7)
    found = _compiled(desk, candidates(8))
    assert [q.mesh.tp for q in found] == [2, 3, 4, 5][:SHORT_LIST]
    assert desk.refused == {Mesh(tp=1): "no tp=1"}


def test_where_none_can_be_lowered_the_error_of_the_best_is_shown():
    with pytest.raises(PassError, match="no tp=1"):
        _compiled(desk_that_lowers(), candidates(2))
