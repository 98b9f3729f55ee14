"""The placement type: its rules, its file, its hash."""

import json

import pytest

from k3c.errors import ConfigError, ParseError, PlacementError
from k3c.placement.placement import Placement, contiguous, placement_from_json, slots_for


def test_the_rack_gets_13_physical_experts_a_rank_and_40_replicas():
    placed = contiguous(896, 72, range(1, 93))
    assert (placed.slots_per_rank, placed.num_replicas) == (13, 40)
    assert len(placed.layers) == 92


@pytest.mark.parametrize(
    ("ranks", "slots", "replicas"),
    [(3, 299, 1), (7, 128, 0), (12, 75, 4), (64, 14, 0), (65, 14, 14)],
)
def test_any_number_of_ranks_gets_its_replicas(ranks, slots, replicas):
    placed = contiguous(896, ranks, [1])
    assert (placed.slots_per_rank, placed.num_replicas) == (slots, replicas)


def test_no_number_of_replicas_is_too_many_until_a_rank_holds_every_expert():
    assert contiguous(896, 72, [1], spare=16).num_replicas == 72 * 29 - 896
    assert slots_for(896, 72, 896 - 13) == 896
    with pytest.raises(PlacementError, match=r"897 slots .* nearest: 896"):
        slots_for(896, 72, 896 - 12)


def test_bands_without_replicas_are_contiguous_and_others_are_not():
    assert contiguous(8, 4, [0]).is_contiguous
    assert not contiguous(8, 3, [0]).is_contiguous
    assert not Placement(4, 2, 2, {0: ((0, 2), (1, 3))}).is_contiguous


def test_replicas_are_counted_from_another_rank_for_each_expert():
    placed = Placement(2, 3, 2, {5: ((0, 1), (0, 1), (0, 1))})
    assert placed.homes(5) == ((0, 1, 2), (1, 2, 0))


def test_a_file_gives_the_placement_back_and_the_same_text():
    placed = contiguous(896, 72, [3, 1, 92])
    again = placement_from_json(placed.to_json(), "p.json")
    assert again == placed
    assert again.to_json() == placed.to_json()
    assert again.hash() == placed.hash()
    assert list(json.loads(placed.to_json())["layers"]) == ["1", "3", "92"]


def test_the_hash_tells_slots_apart():
    one = Placement(2, 1, 2, {0: ((0, 1),)})
    assert one.hash() != Placement(2, 1, 2, {0: ((1, 0),)}).hash()


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (((0, 1),), "1 ranks, expected 2 .layer 7."),
        (((0, 1), (2,)), "1 physical experts, expected 2 .layer 7, rank 1."),
        (((0, 1), (2, 4)), "expert 4, expected 0 to 3 .layer 7, rank 1."),
        (((0, 1), (2, 2)), "expert 2 lies 2 times on a rank, expected once .layer 7, rank 1."),
        (((0, 1), (1, 2)), "3 of 4 experts have a rank, expert 3 none .layer 7."),
    ],
)
def test_a_broken_rule_is_named_with_layer_and_rank(ranks, message):
    with pytest.raises(PlacementError, match=message):
        Placement(4, 2, 2, {7: ranks})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda raw: raw.update(format="other/1"),
            "format is 'other/1', expected 'k3-placement/1'",
        ),
        (lambda raw: raw.pop("num_ranks"), "num_ranks is None, expected a number"),
        (lambda raw: raw.update(num_experts=5), "4 of 5 experts .* expected|2 slots on each"),
        (lambda raw: raw.update(layers=[]), "layers is missing or not an object"),
        (lambda raw: raw["layers"].update({"x": []}), "found 'x'"),
        (
            lambda raw: raw["layers"].update({"1": [[0, 1], [2, "3"]]}),
            "not a list of lists .*layer 1",
        ),
        (
            lambda raw: raw["layers"].update({"1": [[0, 1], [1, 2]]}),
            "expert 3 none .p.json: layer 1.",
        ),
    ],
)
def test_a_damaged_file_is_refused_with_the_place(change, message):
    raw = json.loads(contiguous(4, 2, [1]).to_json())
    change(raw)
    with pytest.raises(ParseError, match=message):
        placement_from_json(json.dumps(raw), "p.json")


def test_text_that_is_not_json_is_refused():
    with pytest.raises(ParseError, match=r"not valid JSON: .*p\.json"):
        placement_from_json("{", "p.json")


def test_numbers_below_one_are_refused():
    with pytest.raises(ConfigError, match="896 experts, 0 ranks, 0 spare slots"):
        slots_for(896, 0)
