"""Configurations: the rule's, a variant's, the table's, and the key that names a node."""

import json
from dataclasses import replace

import pytest
import torch

from k3c.codegen import tuning
from k3c.codegen.templates.triton.rms_norm import TEMPLATES
from k3c.targets.target import load_target
from tests.support.nodes import node

RMS = TEMPLATES[0]
TARGET = load_target("h200")


@pytest.fixture
def case():
    x, weight = torch.randn(3, 7168).to(torch.bfloat16), torch.rand(7168)
    return node("rms_norm", [x, weight], [("bf16", 3, 7168)], eps=1e-5)


@pytest.fixture
def written(tmp_path, monkeypatch):
    def write(entries):
        (tmp_path / "h200.json").write_text(json.dumps({"entries": entries}))
        monkeypatch.setattr(tuning, "FOLDER", tmp_path)
        tuning.table.cache_clear()

    yield write
    tuning.table.cache_clear()


def entry(case, config):
    return {"template": "rms_norm", "key": RMS.tuning_key(case), "config": config}


def test_without_an_entry_the_rule_decides(case, written):
    written([])
    assert RMS.config(case, TARGET) == RMS.configs(case, TARGET)[0]


def test_an_entry_decides_where_it_is_still_a_candidate(case, written):
    other = RMS.configs(case, TARGET)[-1]
    written([entry(case, dict(other))])
    assert RMS.config(case, TARGET) == other != RMS.configs(case, TARGET)[0]


def test_an_entry_that_is_no_candidate_any_more_is_not_used(case, written):
    written([entry(case, {"num_warps": 3})])
    assert RMS.config(case, TARGET) == RMS.configs(case, TARGET)[0]


def test_a_variant_counts_the_candidates_round(case, written):
    written([entry(case, dict(RMS.configs(case, TARGET)[0]))])
    candidates = RMS.configs(case, TARGET)
    for variant in range(2 * len(candidates)):
        chosen = RMS.config(case, replace(TARGET, variant=variant))
        assert chosen == candidates[variant % len(candidates)]


def test_the_shipped_table_holds_numbers_that_were_measured():
    tuning.table.cache_clear()
    path = tuning.FOLDER / "h200.json"
    for line in json.loads(path.read_text())["entries"]:
        assert line["us"] > 0
        assert "H200" in line["device"]
        assert line["measured"] >= 1
