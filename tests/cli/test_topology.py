"""`k3c topology`: list, show, schema, detect; what a wrong file is answered."""

import json
import time

import jsonschema
import pytest

from k3c.targets.topology import FOLDER, known_topologies
from tests.support.compiled import ROOT
from tests.support.topologies import ISLANDS, MACHINES, rack


@pytest.fixture
def own(tmp_path):
    """Return a function that writes a topology of one's own, with one piece of text replaced."""

    def own(text, old="", new=""):
        assert old in text
        path = tmp_path / "own.toml"
        path.write_text(text.replace(old, new, 1))
        return path

    return own


def test_list_names_every_topology_with_its_ranks_and_links(run):
    code, out, err = run("topology", "list")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines()[1:]}
    assert set(rows) == set(known_topologies()) - {"cpu"}
    assert rows["gb300-nvl72"].split()[1:4] == ["72", "18", "gb300"]
    assert "nvlink 900 GB/s, infiniband 100 GB/s" in rows["gb300-nvl72"]
    listed = json.loads(run("topology", "list", "--json")[1])
    assert [row["name"] for row in listed] == list(rows)


def test_show_prints_links_islands_bisection_and_sources(run):
    code, out, _ = run("topology", "show", "hgx-h200-x2")
    assert code == 0
    assert "ranks      16 on 2 hosts (8 each)" in out
    assert "islands    2: 0..7; 8..15" in out
    assert "bisection  400 GB/s" in out
    assert "source of network: gbs: NVIDIA DGX H200 datasheet" in out
    assert "warning" not in out
    one = run("topology", "show", "h200")[1]
    assert "ranks      1 on 1 hosts" in one
    assert "138.4 GiB for a plan" in one


def test_show_of_a_degraded_rack_warns_and_offers_a_smaller_domain(run, own):
    path = own(rack(degraded='[[degraded]]\nfabric = "nvlink"\nhosts = [7]\npaths_up = 4'))
    code, out, _ = run("topology", "show", path)
    assert code == 0
    assert "warning: host 7 (ranks 28..31): 4 of 8 nvlink paths are up" in out
    assert "warning: a domain without the degraded ranks has 68 of 72 ranks" in out
    report = json.loads(run("topology", "show", path, "--json")[1])
    assert (report["ranks"], len(report["warnings"])) == (72, 2)


def test_collectives_prints_what_is_chosen_with_its_error_bar(run, refuse):
    code, out, _ = run("topology", "collectives", "hgx-h200")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    small = next(row for row in rows if row[:2] == ["all_reduce", "16"])
    large = next(row for row in rows if row[:2] == ["all_reduce", "131072"])
    assert (small[2], large[2]) == ("one_shot", "nvls")
    assert float(small[4]) <= float(small[3]) <= float(small[5])
    four = json.loads(run("topology", "collectives", "hgx-h200", "--ranks", "4", "--json")[1])
    assert four[0]["us"] < float(small[3])
    assert four[0]["source"].startswith("one_shot: fitted to")
    line = refuse(2, "ConfigError", "topology", "collectives", "hgx-h200", "--ranks", "9")
    assert "9 ranks, of 8 that hgx-h200 has" in line


def test_the_schema_is_valid_and_accepts_every_shipped_file(run):
    import tomllib

    schema = json.loads(run("topology", "schema")[1])
    jsonschema.Draft202012Validator.check_schema(schema)
    files = sorted(FOLDER.glob("*.toml"))
    assert len(files) == 7
    for path in files:
        jsonschema.validate(tomllib.loads(path.read_text()), schema)
    described = schema["properties"]["fabric"]["items"]["properties"]
    undescribed = [k for k, v in described.items() if not {"description", "enum"} & set(v)]
    assert undescribed == []


def test_detect_writes_a_file_that_show_reads(run, tmp_path):
    path = tmp_path / "mine.toml"
    args = ("topology", "detect", "--from", MACHINES / "h200-nvl-islands")
    assert run(*args, "-o", path) == (0, "", "")
    assert run(*args)[1] == path.read_text()
    out = run("topology", "show", path)[1]
    assert "warning: 2 islands of 4 ranks: pcie at 63 GB/s between them" in out


def test_detect_without_a_device_or_a_folder_says_what_to_do(refuse, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    line = refuse(5, "DeviceFault", "topology", "detect")
    assert "--from" in line
    line = refuse(2, "ConfigError", "topology", "detect", "--from", tmp_path / "gone")
    assert "no such folder" in line


def test_the_example_of_the_guide_is_a_topology(run, own):
    guide = (ROOT / "docs/howto/topology.md").read_text()
    example = guide.split("```toml\n")[1].split("```")[0]
    out = run("topology", "show", own(example))[1]
    assert "ranks      68 on 17 hosts (4 each)" in out
    assert "host 3 (ranks 12..15): 9 of 18 nvlink paths are up" in out


WRONG = {
    "wrong key": (
        ISLANDS,
        "gbs = 450.0",
        "gbps = 450.0",
        "fabric[0]: unknown key 'gbps'",
        "'gbs'?",
    ),
    "negative rate": (ISLANDS, "450.0", "-450.0", "fabric[0].gbs: found -450.0", "above 0"),
    "missing key": (ISLANDS, "us = 0.6\n", "", "'us' is missing", "add fabric[0].us"),
    "wrong type": (ISLANDS, "ranks = 8", 'ranks = "8"', 'ranks: found "8"', "type integer"),
    "wrong kind": (ISLANDS, '"nvlink"', '"nvlnk"', 'found "nvlnk"', "'xgmi'"),
    "later format": (ISLANDS, "schema = 1", "schema = 2", "schema: found 2", "expected 1"),
    "no toml": (ISLANDS, "schema = 1", "schema 1", "not toml", "line 2"),
    "unknown device": (ISLANDS, '"h200"', '"h201"', "target: found 'h201'", "did you mean 'h200'?"),
    "rank count": (ISLANDS, "ranks = 8", "ranks = 9", "ranks: found 9, expected 8", "ranks = 8"),
    "rank not there": (ISLANDS, "6, 7]", "6, 8]", "found rank 8, of 0..7", "groups"),
    "rank twice": (ISLANDS, "6, 7]", "6, 0]", "found rank 0, twice", "at most one group"),
    "no common fabric": (
        ISLANDS,
        'span = "host"',
        "groups = [[0, 1, 2, 3], [4, 5, 6, 7]]",
        "ranks 0 and 4 of 8 share no fabric",
        "add one that spans both",
    ),
    "span and groups": (
        ISLANDS,
        'span = "host"',
        'span = "host"\ngroups = [[0, 1]]',
        "found both span and groups",
        "expected one of them",
    ),
    "same name": (ISLANDS, '"pcie"\nkind', '"bridge"\nkind', "found 'bridge' 2 times", "own name"),
    "missing host": (
        rack(missing="missing_hosts = [17]", ranks=68),
        "[17]",
        "[18]",
        "missing_hosts: found 18, expected 0..17",
        "count from 0",
    ),
    "paths up": (
        rack(degraded='[[degraded]]\nfabric = "nvlink"\nhosts = [7]\npaths_up = 4'),
        "paths_up = 4",
        "paths_up = 9",
        "degraded[0].paths_up: found 9, expected 0..8",
        "paths = 8",
    ),
    "degraded host": (
        rack(degraded='[[degraded]]\nfabric = "nvlink"\nhosts = [7]\npaths_up = 4'),
        "hosts = [7]",
        "hosts = [18]",
        "degraded[0].hosts: found 18, expected 0..17",
        "count from 0",
    ),
    "degraded fabric": (
        rack(degraded='[[degraded]]\nfabric = "nvlink"\nhosts = [7]\npaths_up = 4'),
        'fabric = "nvlink"\nhosts',
        'fabric = "nvlnk"\nhosts',
        "degraded[0].fabric: found 'nvlnk', expected one of nvlink, network",
        "of this file",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_answered_with_the_key_both_values_and_what_to_do(refuse, own, name):
    text, old, new, *words = WRONG[name]
    path = own(text, old, new)
    start = time.monotonic()
    line = refuse(2, "ConfigError", "topology", "show", path)
    assert time.monotonic() - start < 2
    assert [word for word in (*words, str(path)) if word not in line] == [], line


def test_a_file_that_cannot_be_read_is_named(refuse, tmp_path):
    line = refuse(2, "ConfigError", "topology", "show", tmp_path / "gone.toml")
    assert "cannot read the topology: No such file or directory" in line
    assert "k3c topology list" in line
    line = refuse(2, "ConfigError", "topology", "show", f"{tmp_path}/")
    assert "Is a directory" in line
    (tmp_path / "bytes.toml").write_bytes(b"schema = \xff\n")
    line = refuse(2, "ConfigError", "topology", "show", tmp_path / "bytes.toml")
    assert "byte 9 is not UTF-8" in line
    line = refuse(2, "ConfigError", "topology", "show", "gb300-nvl36")
    assert "unknown target or topology 'gb300-nvl36'" in line
    assert "gb300-nvl72" in line
