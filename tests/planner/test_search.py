"""Meshes of a machine: legal ones, those that may fit, the best by each goal; refusals."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from k3c.errors import ConfigError, PlacementError
from k3c.mesh_limits import problems
from k3c.planner import search
from k3c.planner.describe import deployment, short_name
from k3c.planner.planning import meshes_of, plan_model
from k3c.planner.problem import PlanOptions, read_problem
from k3c.targets.mesh import Mesh
from tests.support.drafts import PUBLISHED

K3 = Path(__file__).parents[1] / "data/configs/kimi-k3-config.json"


def ask(**options):
    return read_problem(K3, PlanOptions(**{"target": "gb300-nvl72", **options}))


def ranked(problem):
    return search.rank_candidates(problem, meshes_of(problem))


def test_every_mesh_that_is_offered_divides_the_model_and_fits_the_machine():
    problem = ask()
    found = search.legal(problem.config, 72, True)
    assert {short_name(m) for m in found} >= {
        "TP1", "TP8", "TP16", "TEP8", "TEP16", "TEP32", "DEP16", "DEP32", "DEP64", "TP8xPP2",
        "TP8xDP8xEP64",
    }  # fmt: skip
    assert all(m.ranks <= 72 and not problems(problem.config, m) for m in found)
    assert list(found) == sorted(found, key=search.order)


def test_a_rack_holds_replicas_of_a_mesh_and_spare_ranks():
    used = deployment(ask(), Mesh(tp=16, ep=16))
    assert (used.replicas, used.spare_ranks, used.physical_experts) == (4, 8, 56)


def test_experts_that_do_not_divide_are_filled_up_with_replicas():
    used = deployment(ask(), Mesh(dp=72, ep=72))
    assert (used.physical_experts, used.expert_replicas) == (13, 40)


def test_fit_takes_the_fewest_ranks_that_hold_it():
    found = ranked(ask(goal="fit"))
    assert found[0].mesh.ranks == min(q.mesh.ranks for q in found)
    smaller = [m for m in meshes_of(ask()) if m.ranks < found[0].mesh.ranks]
    assert smaller
    assert all(search.free_bytes(ask(), m) < 0 for m in smaller)


def test_latency_takes_the_fastest_step_and_throughput_the_most_tokens_a_gpu():
    fast, rich = ranked(ask()), ranked(ask(goal="throughput"))
    assert fast[0].decode_us == min(q.decode_us for q in fast)
    assert rich[0].gpu_rate == max(q.gpu_rate for q in rich)


def test_a_mesh_that_fits_only_with_latent_projections_shared_is_taken_so():
    # 160 requests on 16 H200s: the replicated projections are what is too much.
    problem = ask(target="hgx-h200-x2", mesh="TEP16", max_num_seqs=160)
    assert search.free_bytes(problem, Mesh(tp=16, ep=16)) < 0
    (mesh,) = meshes_of(problem)
    assert mesh.latent == "sharded"
    assert search.free_bytes(problem, mesh) >= 0
    (said,) = meshes_of(replace(problem, options=replace(problem.options, latent="replicated")))
    assert said.latent == "replicated"


def test_the_smallest_mesh_that_fits_fits_and_a_smaller_one_does_not():
    problem = ask(target="h200")
    least = search.smallest(problem)
    assert search.free_bytes(problem, least) >= 0
    fewer = list(search.legal(problem.config, least.ranks - 1, True))
    variants = [replace(m, latent="sharded") for m in fewer if m.tp > 1]
    assert all(search.free_bytes(problem, m) < 0 for m in fewer + variants)


def test_a_request_that_cannot_fit_is_answered_from_closed_forms_with_what_would_work():
    options = PlanOptions("gb300-nvl72", mesh="TEP16", max_num_seqs=1024)
    answer = plan_model(K3, options)
    assert (answer.fits, answer.source) == (False, "quick")
    largest = answer.capacity.max_num_seqs
    assert f"largest legal --max-num-seqs is {largest}" in answer.verdict
    assert answer.changes[0].option == f"--max-num-seqs {largest}"
    assert all(change.fits for change in answer.changes)
    again = read_problem(K3, replace(options, max_num_seqs=largest))
    assert ranked(again)
    assert not ranked(read_problem(K3, replace(options, max_num_seqs=largest + 1)))


def test_a_model_too_large_for_the_device_names_the_smallest_mesh():
    answer = plan_model(K3, PlanOptions("h200"))
    least = search.smallest(ask(target="h200"))
    assert not answer.fits
    assert answer.capacity.max_num_seqs == 0
    assert f"{least.ranks} ranks, the machine has 1" in answer.changes[0].effect
    assert short_name(least) in answer.verdict


def test_a_mesh_of_more_ranks_than_the_machine_is_refused():
    with pytest.raises(PlacementError, match="16 ranks, hgx-h200 has 8") as caught:
        meshes_of(ask(target="hgx-h200", mesh="TEP16"))
    assert "--mesh tp=8,ep=8" in caught.value.hint


@pytest.mark.parametrize(("ranks", "words"), [(6, "tp=6"), (12, "tp=12")])
def test_six_and_twelve_gpus_have_a_legal_mesh(ranks, words):
    found = search.legal(ask().config, ranks, True)
    assert any(words in str(m) for m in found)


def test_a_device_of_the_cpu_kind_runs_one_rank():
    assert search.legal(ask().config, 1, False) == (Mesh(),)


def test_verified_rows_must_fit_a_step(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    with pytest.raises(ConfigError, match="1,100 requests of 8 verified rows are 8,800"):
        ask(draft=tmp_path, max_num_seqs=1100)
