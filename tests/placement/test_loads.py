"""Load files: what they give, and how wrong ones are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from k3c.errors import ConfigError, ParseError
from k3c.placement.loads import ExpertLoad, check_model, load_from_json, load_to_json

DEMO = Path(__file__).parents[2] / "models" / "k3-demo" / "expert_load.json"


def demo():
    return json.loads(DEMO.read_text())


def test_the_demo_load_counts_each_token_once_for_each_of_its_experts():
    load = load_from_json(DEMO.read_text(), "expert_load.json")
    assert load.layers == tuple(range(1, 9))
    assert load.rows.sum(axis=1).tolist() == [4 * (37705 + 47226)] * 8
    assert load.rows[0, :2].tolist() == [2348 + 8343, 6372 + 7818]
    np.testing.assert_allclose(load.token_shares.sum(axis=1), 4)


def test_domains_are_parts_of_the_traffic_and_pairs_are_symmetric():
    load = load_from_json(DEMO.read_text(), "expert_load.json")
    assert load.steps is not None
    assert load.pairs is not None
    assert load.steps.shape == (8, 2, 32)
    assert load.steps.sum(axis=2)[0].tolist() == [4 * 37705, 4 * 47226]
    assert load.pairs_of == 2
    assert load.pairs[0, 0, 1] == load.pairs[0, 1, 0] == 83
    assert not np.diagonal(load.pairs, axis1=1, axis2=2).any()


def test_a_written_load_is_read_back():
    rng = np.random.default_rng(0)
    pairs = np.triu(rng.integers(0, 9, (2, 6, 6)), 1).astype(float)
    steps = rng.integers(1, 9, (2, 3, 6)).astype(float)
    load = ExpertLoad((1, 4), 2, steps.sum(axis=1), pairs + pairs.swapaxes(1, 2), 2, steps)
    again = load_from_json(load_to_json(load), "x.json")
    assert again.layers == load.layers
    for name in ("rows", "pairs", "steps"):
        np.testing.assert_array_equal(getattr(again, name), getattr(load, name))


def change(raw, *path, to):
    for key in path[:-1]:
        raw = raw[key]
    raw[path[-1]] = to


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "k3-expert-load/2", "format is .*/2', expected .*/1'"),
        (("num_experts",), 33, r"32 experts, expected 33 .*load.code, layer 1\)"),
        (("num_experts",), "32", "found '32', expected a number from 1 on .*num_experts"),
        (("experts_per_token",), 40, "experts_per_token is 40, num_experts only 32"),
        (("moe_layers",), [1, 1], r"found \[1, 1\], expected different layer numbers"),
        (("moe_layers",), list(range(1, 10)), "8 layers, expected 9; layer 9 is missing"),
        (("load_total", "3", 7), -5, "found -5, expected a count from 0 on .*layer 3, expert 7"),
        (("load_total", "3", 7), float("nan"), "found nan, .*load_total, layer 3, expert 7"),
        (("load_total", "3", 7), "9", "found '9', .*layer 3, expert 7"),
        (("load_total", "2"), [1] * 31, "31 experts, expected 32 .*load_total, layer 2"),
        (("load_total", "1", 0), 1, "says 1, load adds up to 10691 .*layer 1, expert 0"),
        (("top2_coactivation", "5"), [[0] * 32], "1 rows of pairs, expected 32 .*layer 5"),
        (("steps",), {str(n): [[0] * 32] for n in range(1, 9)}, "step 0 has 0 rows, .*layer 1"),
        (("steps",), {str(n): [[1] * 32] * n for n in range(1, 9)}, "1 steps in one layer, 8 in"),
    ],
)  # fmt: skip
def test_a_wrong_load_is_refused_with_layer_expert_and_both_numbers(path, value, message):
    raw = demo()
    change(raw, *path, to=value)
    with pytest.raises(ParseError, match=message):
        load_from_json(json.dumps(raw), "load.json")


def test_a_layer_without_rows_is_refused():
    raw = demo()
    del raw["load"]
    raw["load_total"]["6"] = [0] * 32
    with pytest.raises(ParseError, match=r"all 32 experts have 0 rows, expected some .*layer 6"):
        load_from_json(json.dumps(raw), "load.json")


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_what_is_no_object_is_refused(text):
    with pytest.raises(ParseError, match=r"load\.json"):
        load_from_json(text, "load.json")


@pytest.mark.parametrize(
    ("experts", "top_k", "layers", "message"),
    [
        (896, 4, range(1, 9), "the load has 32 experts, the model 896"),
        (32, 16, range(1, 9), "the load has 4 experts a token, the model 16"),
        (
            32,
            4,
            range(1, 8),
            "8 MoE layers in the load, 7 in the model; layer 8 is only in the load",
        ),
        (32, 4, range(9), "8 MoE layers in the load, 9 in the model; layer 0 is only in the model"),
    ],
)
def test_a_load_of_another_model_is_refused_with_both_numbers(experts, top_k, layers, message):
    load = load_from_json(DEMO.read_text(), "expert_load.json")
    check_model(load, 32, 4, range(1, 9))
    with pytest.raises(ConfigError, match=message):
        check_model(load, experts, top_k, layers)
