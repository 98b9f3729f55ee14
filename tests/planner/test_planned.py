"""Meshes that the compiler cannot lower are passed over, and the answer says why."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from k3c.errors import CodegenError, PassError
from k3c.planner import search
from k3c.planner.planned import _compiled
from k3c.planner.planning import meshes_of
from k3c.planner.problem import PlanOptions, read_problem
from k3c.planner.refusing import unplanned
from k3c.planner.search import SHORT_LIST, Quick
from k3c.targets.mesh import Mesh

K3 = Path(__file__).parents[1] / "data/configs/kimi-k3-config.json"


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


def test_a_way_of_sharing_that_failed_twice_is_not_tried_again():
    desk = desk_that_lowers(3)
    ways = [replace(q, mesh=replace(q.mesh, ep=q.mesh.tp)) for q in candidates(6)]
    # One rank shares nothing: its way is another, and it fails on its own.
    assert _compiled(desk, [*ways[:2], *ways[3:]]) == []
    reasons = list(desk.refused.values())
    assert reasons[:3] == ["no tp=1", "no tp=2", "no tp=4"]
    assert set(reasons[3:]) == {"a mesh of its kind cannot be lowered"}


def test_where_none_can_be_lowered_closed_forms_say_so_and_what_they_know():
    problem = read_problem(K3, PlanOptions("gb300-nvl72", mesh="TEP16"))
    ranked = search.rank_candidates(problem, meshes_of(problem))
    answer = unplanned(problem, ranked, {ranked[0].mesh: "no kernel"})
    assert (answer.fits, answer.source, answer.speed) == (True, "quick", ())
    assert "the compiler cannot lower it: no kernel" in answer.verdict
    assert answer.candidates[0].why == "no kernel"
    assert answer.capacity.max_num_seqs > 8
