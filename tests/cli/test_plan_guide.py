"""The examples of docs/howto/plan.md run, and its options exist."""

import re
import shlex

import pytest

from tests.support.compiled import ROOT

GUIDE = (ROOT / "docs/howto/plan.md").read_text()
COMMANDS = [line for line in GUIDE.split("\n") if line.startswith("k3c plan ")]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_example_of_the_guide_runs(run, monkeypatch, command):
    monkeypatch.chdir(ROOT)
    code, out, err = run(*shlex.split(command)[1:])
    assert code in (0, 3), err
    assert out


def test_the_guide_shows_what_the_example_prints(run, monkeypatch):
    monkeypatch.chdir(ROOT)
    (command,) = [c for c in COMMANDS if "1024" in c]
    _, out, _ = run(*shlex.split(command)[1:])
    (shown,) = re.findall(r"^does not fit: .*$", GUIDE, flags=re.MULTILINE)
    assert shown in " ".join(out.split())


def test_every_option_of_the_guide_exists(run):
    _, out, _ = run("plan", "--help")
    options = set(re.findall(r"`(--[a-z-]+)`", GUIDE))
    assert options
    assert [option for option in sorted(options) if option not in out] == []
