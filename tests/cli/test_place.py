"""k3c place: what it prints and writes, and how wrong requests are refused."""

import json
import re
from pathlib import Path

import pytest

from k3c.placement.placement import placement_from_json
from k3c.placement.statistics import max_over_mean, moves
from k3c.placement.traffic import zipf

DEMO = Path("models/k3-demo")
LOAD = DEMO / "expert_load.json"
K3 = Path("tests/data/configs/kimi-k3-config.json")


def written(path):
    return placement_from_json(path.read_text(), str(path))


def test_the_rack_gets_40_replicas_on_its_own_and_their_bytes_are_printed(run, tmp_path):
    """EP01 and EP09: 896 experts on 72 ranks; replicas x bytes a layer x layers."""
    out = tmp_path / "p.json"
    code, text, err = run("place", K3, "--target", "gb300-nvl72", "--load", "zipf:1.2", "-o", out)
    assert code == 0, err
    assert "896 experts in each of 92 layers on 72 ranks: 13 physical experts a rank" in text
    assert "40 replicas a layer" in text
    # An expert is 3 x 3072 x 3584 weights of 4.25 bits.
    size = 3 * 3072 * 3584 * 4.25 / 8
    assert f"40 x {size / 1e6:.2f} MB = {40 * size / 1e6:.2f} MB a layer" in text
    assert f"x 92 layers = {92 * 40 * size / 1e9:.2f} GB on 72 ranks" in text
    placed = written(out)
    assert placed.num_replicas == 40
    load = zipf(range(1, 93), 896, 16, 1.2)
    assert max_over_mean(placed, load.layers, load.rows).max() <= 1.1
    assert len(text.splitlines()) <= 24


def test_the_demo_load_is_placed_and_the_facts_are_json(run, tmp_path):
    out = tmp_path / "p.json"
    args = ("place", DEMO, "--ranks", 4, "--spare", 1, "--load", LOAD, "-o", out, "--json")
    code, text, err = run(*args)
    assert code == 0, err
    facts = json.loads(text)
    assert (facts["slots_per_rank"], facts["replicas"]) == (9, 4)
    assert facts["placed"]["mean"] <= facts["eplb"]["mean"] <= facts["now"]["mean"]
    assert facts["replica_bytes"] == 4 * 8 * facts["expert_bytes"]
    assert facts["hash"] == written(out).hash()
    assert run(*args)[1] == text


def test_a_second_placement_moves_no_more_than_it_may(run, tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    assert run("place", DEMO, "--ranks", 4, "--load", "zipf:1.0", "-o", first)[0] == 0
    code, text, err = run(
        "place", DEMO, "--load", LOAD, "--previous", first, "--max-moves", 6, "-o", second
    )
    assert code == 0, err
    moved = moves(written(first), written(second)).slots
    assert 0 < moved <= 6
    assert f"moves: {moved} physical experts" in text


def test_a_dead_rank_is_planned_around_and_lost_experts_are_counted(run, tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    assert run("place", DEMO, "--ranks", 4, "--load", LOAD, "-o", first)[0] == 0
    code, text, err = run(
        "place", DEMO, "--load", LOAD, "--previous", first, "--dead", "1", "-o", second
    )
    assert code == 0, err
    assert "lost: 64 experts have no living replica and are read again" in text  # 8 in 8 layers
    assert written(second).num_ranks == 3


@pytest.mark.parametrize(
    ("code", "kind", "args", "message"),
    [
        (2, "ConfigError", ["--load", LOAD], "no ranks given .*--ranks N or --target"),
        (2, "ConfigError", ["--load", "none.json", "--ranks", 4], "no load file none.json"),
        (2, "ConfigError", ["--load", "zipf:x", "--ranks", 4], "found 'zipf:x'"),
        (2, "ConfigError", ["--load", "zipf:-1", "--ranks", 4], "exponent is -1.0, expected"),
        (3, "PlacementError", ["--load", LOAD, "--ranks", 4, "--spare", 25],
         "33 slots on each of 4 ranks for 32 experts .*nearest: 32"),
        (2, "ConfigError", ["--load", LOAD, "--ranks", 4, "--spare", -1], "-1 spare slots"),
        (2, "ConfigError", ["--load", LOAD, "--target", "hgx-h200", "--ranks", 7],
         "7 ranks, hgx-h200 has 8"),
        (2, "ConfigError", ["--load", LOAD, "--ranks", 4, "--max-moves", 3], "give --previous"),
        (2, "ConfigError", ["--load", LOAD, "--ranks", 4, "--dead", "x"], "write ranks as 3,7"),
        (2, "ConfigError", ["--load", LOAD, "--ranks", 4, "--previous", "no.json"],
         "no placement file no.json"),
        (2, "ParseError", ["--load", LOAD, "--ranks", 4, "--previous", LOAD],
         "format is 'k3-expert-load/1', expected 'k3-placement/1'"),
    ],
)  # fmt: skip
def test_wrong_requests_are_refused_with_what_would_work(
    refuse, tmp_path, code, kind, args, message
):
    line = refuse(code, kind, "place", DEMO, *args, "-o", tmp_path / "p.json")
    assert re.search(message, line), line
    assert not (tmp_path / "p.json").exists()


def test_a_load_of_another_model_is_refused_with_both_numbers(refuse, tmp_path):
    args = ("place", K3, "--ranks", 72, "--load", LOAD, "-o", tmp_path / "p.json")
    assert "the load has 32 experts, the model 896" in refuse(2, "ConfigError", *args)


def test_a_previous_placement_of_other_ranks_is_refused_with_both_numbers(refuse, run, tmp_path):
    first = tmp_path / "a.json"
    assert run("place", DEMO, "--ranks", 4, "--load", LOAD, "-o", first)[0] == 0
    args = ("--load", LOAD, "--previous", first, "--ranks", 8, "-o", tmp_path / "b.json")
    line = refuse(2, "ConfigError", "place", DEMO, *args)
    assert "the placement has 4 ranks of 8 slots, expected 8 of 4" in line
