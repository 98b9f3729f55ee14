"""`k3c compile --mesh`: what is refused, in what words; and what an artifact of a rank says."""

import json
from pathlib import Path

import pytest

from k3c.artifact_dir import read_manifest, read_plan
from k3c.artifact_ranks import plan_of_rank

K3 = Path(__file__).parents[1] / "data/configs/kimi-k3-config.json"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--mesh", "tp=10,ep=10"), ("96 KDA heads by tp=10", "nearest: tp=8,ep=8 or tp=12,ep=12")),
        (("--mesh", "tp=5"), ("96 MXFP4 blocks", "nearest: tp=4,ep=1 or tp=6,ep=1")),
        (
            ("--mesh", "tp=72,ep=72"),
            ("96 KDA heads by tp=72", "with 72 ranks: tp=24,ep=72,dp=3 or tp=12,ep=72,dp=6"),
        ),
        (("--mesh", "TP7xDP2"), ("96 MLA heads by tp=7", "tp=6,ep=12,dp=2 or tp=8,ep=16,dp=2")),
        (("--mesh", "DEP72"), ("8192 rows of each of dp=72 ranks", "at most 3640 a rank")),
        (("--mesh", "tp=3,dp=700"), ("2100 ranks, at most 1024",)),
        (("--mesh", "tp=16,ep=8"), ("ep=8 with tp=16,dp=1", "ep=16 or ep=1")),
        (("--mesh", "tp=8,dp=9,ep=8"), ("ep=8 with tp=8,dp=9", "ep=72 or ep=1")),
        (("--mesh", "tp=8,tp=4"), ("axis tp twice",)),
        (("--mesh", "TEP8xEP8"), ("an axis twice in 'TEP8xEP8'",)),
        (("--mesh", "tp=0"), ("found 'tp=0'", "tp=16,ep=16")),
        (("--mesh", "xp=2"), ("found 'xp=2'",)),
        (("--mesh", "tp=16,ep=16", "--rank", "16"), ("16 is out of range, expected 0..15",)),
        (("--rank", "1"), ("1 is out of range, expected 0..0",)),
        (("--mesh", "tp=2", "--latent", "half"), ("found 'half'", "replicated or sharded")),
    ],
)
def test_a_wrong_mesh_is_refused_before_anything_is_read(refuse, tmp_path, options, words):
    line = refuse(
        2, "ConfigError", "compile", K3, "--target", "h200", "-o", tmp_path / "o", *options
    )
    assert [word for word in words if word not in line] == [], line
    assert not (tmp_path / "o").exists()


def test_a_cpu_runs_one_rank(refuse, tmp_path):
    options = ("--target", "cpu-avx2", "--mesh", "tp=2,ep=2", "-o", tmp_path / "o")
    assert "runs one rank" in refuse(2, "ConfigError", "compile", K3, *options)


def test_a_model_that_does_not_fit_names_the_smallest_mesh_that_does(refuse, tmp_path):
    options = ("--target", "h200", "--buckets", "decode.b1", "-o", tmp_path / "o")
    line = refuse(3, "PlanError", "compile", K3, *options)
    assert "GiB planned, 138.4 GiB there" in line
    assert "--mesh tp=12,ep=12 fits" in line


def test_a_rank_of_a_config_alone_is_inspected_and_not_served(run, refuse, toy, tmp_path):
    # The toy has 6 and 4 heads and 2 experts: two ranks divide all of it.
    output = tmp_path / "artifact"
    options = ("--mesh", "tp=2,ep=2", "--rank", "1", "--buckets", "decode.b1", "-o", output)
    code, _, err = run("compile", toy / "config.json", "--target", "h200", *options)
    assert code == 0, err
    manifest = read_manifest(output)
    assert (dict(manifest.mesh), manifest.rank) == ({"tp": 2, "ep": 2}, 1)
    assert not manifest.model.has_weights
    plan = read_plan(output, "decode.b1")
    commands = [c for graph in plan.commands.values() for c in graph if c.kind == "collective"]
    assert {(c.kernel, c.args[3].value, c.args[4].layer_attr) for c in commands} == {
        ("all_reduce", 2, "tp_place"),
        ("all_gather", 2, "tp_place"),
    }
    assert all(
        call.attrs["tp_place"] == 1
        for call in plan_of_rank(plan, manifest.mesh, manifest.rank).calls
    )
    report = json.loads(run("inspect", output, "--json")[1])
    assert (report["mesh"], report["rank"]) == ({"tp": 2, "ep": 2}, 1)
    text = run("inspect", output)[1]
    assert "rank     1 of ep=2, tp=2" in text
    assert "no weights" in text
    line = refuse(4, "ArtifactError", "generate", output, "--prompt", "x")
    assert "the weights of rank 1 are not packed" in line
    assert "k3c pack MODEL" in line
