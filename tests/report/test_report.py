"""The report of an artifact: one file, everything in it, nothing from elsewhere."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from k3c.artifact_dir import read_manifest, read_plan
from k3c.report.facts import artifact_facts
from k3c.report.page import FOLDER, render
from tests.support.compiled import k3c


class Page(HTMLParser):
    """Collects elements, and the text of scripts by their type."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self._open = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open = dict(attrs).get("type", "code") if tag == "script" else None

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open:
            self.scripts[self._open] = self.scripts.get(self._open, "") + data


@pytest.fixture(scope="module")
def facts(demo_bf16):
    return artifact_facts(demo_bf16)


@pytest.fixture(scope="module")
def text(facts):
    return render(facts)


def test_the_page_holds_its_facts_and_needs_nothing_else(text, facts):
    page = Page(text)
    assert json.loads(page.scripts["application/json"]) == json.loads(json.dumps(facts))
    assert not [a for _, a in page.elements for name in ("src", "href") if name in a]
    assert not re.search(r"(https?:)?//[a-z]", page.scripts["code"])
    assert "@import" not in text
    assert "/*page." not in text
    assert "/*facts*/" not in text


def test_equal_facts_give_equal_bytes(facts, text, demo_bf16):
    assert render(artifact_facts(demo_bf16)) == text
    assert len(text.encode()) < 5_000_000


def test_nothing_in_the_facts_ends_the_script(facts):
    hostile = {**facts, "manifest": {**facts["manifest"], "k3c_version": "</script><b>"}}
    page = Page(render(hostile))
    assert "b" not in [tag for tag, _ in page.elements]
    found = json.loads(page.scripts["application/json"])
    assert found["manifest"]["k3c_version"] == "</script><b>"


def test_every_byte_of_every_space_is_in_one_segment(facts, demo_bf16):
    manifest = read_manifest(demo_bf16)
    for bucket in manifest.buckets:
        plan = read_plan(demo_bf16, bucket.name)
        for space, rows in facts["memory"]["spaces"].items():
            segments = rows.get("all", rows.get(bucket.name))
            end = 0
            for offset, nbytes, *_ in segments:
                assert offset == end
                end += nbytes
            assert end == plan.space_bytes.get(space, 0)


def test_kinds_of_nodes_hold_every_command_of_a_step(facts, demo_bf16):
    for bucket in facts["buckets"]:
        plan = read_plan(demo_bf16, bucket["name"])
        commands = [c for call in plan.calls for c in plan.commands[call.graph]]
        assert sum(kind["launches"] for kind in bucket["kinds"]) == len(commands)
        floor_us = sum(c.floor_ns for c in commands) / 1e3
        assert sum(kind["floor_us"] for kind in bucket["kinds"]) == pytest.approx(floor_us)


def test_the_changes_of_a_pass_lead_from_one_text_to_the_next(facts):
    steps = facts["ir"]
    assert [step["name"][:2] for step in steps] == [f"{i:02}" for i in range(len(steps))]
    for before, after in pairwise(steps):
        added = [line[1:] for line in after["changes"] if line.startswith("+")]
        gone = [line[1:] for line in after["changes"] if line.startswith("-")]
        kept = before["text"].splitlines()
        for line in gone:
            kept.remove(line)
        assert sorted([*kept, *added]) == sorted(after["text"].splitlines())


def test_the_script_is_one(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on this machine to read the script")
    subprocess.run([node, "--check", FOLDER / "page.js"], check=True)


def test_the_verb_writes_it_once(demo_bf16, tmp_path):
    output = tmp_path / "report.html"
    done = k3c("report", demo_bf16, "-o", output, "--topology", "hgx-h200")
    assert f"{output}: " in done.stdout
    topology = json.loads(Page(output.read_text()).scripts["application/json"])["topology"]
    assert (topology["name"], len(topology)) > ("hgx-h200", 1)
    again = k3c("report", demo_bf16, "-o", output, check=False)
    assert (again.returncode, "output exists" in again.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (("nowhere", "-o", "r.html"), 4, "no such artifact directory"),
        (("{artifact}", "-o", "gone/r.html"), 2, "does not exist"),
        (("{artifact}", "-o", "r.html", "--topology", "moon"), 2, "unknown target or topology"),
        (("{artifact}", "-o", "r.html", "--placement", "gone.json"), 2, "cannot be read"),
    ],
    ids=["artifact", "folder", "topology", "placement"],
)
def test_what_is_wrong_is_said_and_nothing_is_written(
    arguments, code, problem, demo_bf16, tmp_path
):
    words = [
        str(tmp_path / w) if w.endswith(".html") else w.format(artifact=demo_bf16)
        for w in arguments
    ]
    done = k3c("report", *words, check=False)
    assert (done.returncode, problem in done.stderr) == (code, True), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_placement_shows_each_ranks_share(tmp_path):
    from k3c.placement.placement import contiguous
    from k3c.report.extras import placement_facts

    path = tmp_path / "placement.json"
    path.write_text(contiguous(7, 3, (1, 2)).to_json())
    found = placement_facts(path, None)
    # 9 slots for 7 experts: the first two stand twice, each copy with half of its rows.
    assert (found["ranks"], found["slots_per_rank"], found["layers"]) == (3, 3, [1, 2])
    assert sum(found["shares"][0]) == pytest.approx(3, abs=2e-3)
    assert found["worst"] == max(map(max, found["shares"]))
