"""Meshes: what names mean, where ranks stand, which ranks work together."""

import pytest

from k3c.errors import ConfigError
from k3c.targets.mesh import Mesh, parse_mesh

NAMES = {
    "TP8": Mesh(tp=8),
    "TP16": Mesh(tp=16),
    "TEP8": Mesh(tp=8, ep=8),
    "TEP16": Mesh(tp=16, ep=16),
    "DEP16": Mesh(dp=16, ep=16),
    "DEP64": Mesh(dp=64, ep=64),
    "TP8xPP2": Mesh(tp=8, pp=2),
    "TEP16xPP2": Mesh(tp=16, ep=16, pp=2),
    "TP8xDP9": Mesh(tp=8, dp=9, ep=72),
    "tp=8,dp=9": Mesh(tp=8, dp=9),
    "TP8xDP9xEP72": Mesh(tp=8, dp=9, ep=72),
    "TP8xDP9+EP72": Mesh(tp=8, dp=9, ep=72),
    "tp=8,dp=9,ep=72": Mesh(tp=8, dp=9, ep=72),
    "tp=4, pp=3": Mesh(tp=4, pp=3),
    "": None,
    "TP1": None,
    "tp=1,ep=1": None,
}


@pytest.mark.parametrize("text", NAMES)
def test_names_of_the_field_and_axes_give_the_mesh(text):
    assert parse_mesh(text) == NAMES[text]


@pytest.mark.parametrize("mesh", [m for m in NAMES.values() if m], ids=str)
def test_a_mesh_is_printed_as_it_is_parsed(mesh):
    assert parse_mesh(str(mesh)) == mesh


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("TP8xTP2", "axis twice"),
        ("TEP8xEP8", "axis twice"),
        ("TP0", "found 'TP0'"),
        ("tp=8,tp=8", "axis tp twice"),
        ("tp=-8", "found 'tp=-8'"),
        ("cp=2", "the axes are tp, ep, dp, pp"),
        ("TP8xDP9xEP8", "ep=72 or ep=1"),
        ("EP8", "ep=1 or ep=1"),
        ("dp=4,ep=2", "ep=4 or ep=1"),
    ],
)
def test_wrong_names_say_what_would_be_right(text, words):
    with pytest.raises(ConfigError) as error:
        parse_mesh(text)
    assert words in str(error.value)


def test_every_rank_has_a_place_of_its_own_and_tp_is_innermost():
    mesh = Mesh(tp=2, dp=3, ep=6, pp=2)
    places = [mesh.coordinates(rank) for rank in range(mesh.ranks)]
    assert [p["tp"] for p in places[:4]] == [0, 1, 0, 1]
    assert [p["dp"] for p in places] == [0, 0, 1, 1, 2, 2] * 2
    assert [p["pp"] for p in places] == [0] * 6 + [1] * 6
    assert [p["ep"] for p in places] == [0, 1, 2, 3, 4, 5] * 2
    assert len({(p["tp"], p["dp"], p["pp"]) for p in places}) == mesh.ranks == 12


def test_groups_of_an_axis_split_the_ranks():
    mesh = Mesh(tp=2, dp=3, ep=6, pp=2)
    assert mesh.group(7, "tp") == (6, 7)
    assert mesh.group(7, "dp") == (7, 9, 11)
    assert mesh.group(7, "ep") == (6, 7, 8, 9, 10, 11)
    assert mesh.group(7, "pp") == (1, 7)
    assert Mesh(tp=2, dp=3).group(3, "ep") == (3,)
    for axis in ("tp", "dp", "ep", "pp"):
        for rank in range(mesh.ranks):
            group = mesh.group(rank, axis)
            assert len(group) == mesh.size(axis)
            assert all(mesh.group(other, axis) == group for other in group)
