"""The code of docs/embed.md, as it stands there, on the demo."""

import re

import pytest

from tests.support.compiled import ROOT

TEXT = (ROOT / "docs/embed.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_code_of_the_page_runs_and_ends(demo_bf16, capsys):
    names = {"ARTIFACT": str(demo_bf16)}
    for block in BLOCKS:
        exec(compile(block, "docs/embed.md", "exec"), names)
    assert len(BLOCKS) == 3
    assert len(names["tokens"]) <= 16
    assert all(len(answer) == 16 for answer in names["answers"])
    assert names["engine"].usage.slots_used == 0
    printed = capsys.readouterr().out
    assert "the server is draining" not in printed
    assert "ready Usage(" in printed
    assert "Answer(reasoning=" in printed


def test_the_page_names_options_that_are_there():
    import k3c
    from k3c.runtime.cache.prefix import PrefixOptions

    assert PrefixOptions(snapshot_every=512).on
    with pytest.raises(TypeError):
        k3c.load("nowhere", no_such_option=1)
