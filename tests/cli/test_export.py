"""`k3c export`: text out, refusals of wrong configurations."""

import json
import shutil

import pytest

from k3c.ir.text import parse, show
from tests.support.compiled import DEMO, TINY
from tests.support.tiny_checkpoint import toy_config_json


def test_a_bare_config_exports_as_text_that_parses_back(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(toy_config_json()))
    code, out, _ = run("export", tmp_path)
    assert code == 0
    assert show(parse(out)) == out
    assert "bf16[T, 64]" in out


def test_export_to_a_file_writes_text_that_parses_and_nothing_else(run, tmp_path):
    config, target = tmp_path / "config.json", tmp_path / "out" / "model.k3"
    config.write_text(json.dumps(toy_config_json()))
    target.parent.mkdir()
    assert run("export", config, "--compute", "float32", "-o", target)[:2] == (0, "")
    text = target.read_text()
    assert show(parse(text)) == text
    assert "f32[T, 64]" in text
    assert "bf16[T, 64]" not in text
    assert [p.name for p in target.parent.iterdir()] == ["model.k3"]


def test_a_model_directory_exports_with_its_stored_types(run):
    code, out, _ = run("export", DEMO)
    assert code == 0
    assert "mxfp4" in out


def test_a_directory_without_config_is_refused(refuse, tmp_path):
    line = refuse(2, "ConfigError", "export", tmp_path)
    assert "config.json" in line
    assert str(tmp_path) in line


def test_export_into_a_folder_that_is_missing_is_refused(refuse, tmp_path):
    line = refuse(2, "ConfigError", "export", TINY, "-o", tmp_path / "no" / "model.k3")
    assert str(tmp_path / "no") in line


def test_a_missing_key_an_unknown_key_and_a_wrong_value_are_named(refuse, tmp_path):
    file = tmp_path / "config.json"
    shutil.copy(TINY / "config.json", file)
    data = json.loads(file.read_text())
    for edit, word in (
        (lambda text: text.pop("kv_lora_rank"), "missing key 'kv_lora_rank'"),
        (lambda text: text.update(new_feature=1), "unknown key 'new_feature'"),
        (lambda text: text.update(hidden_size="big"), 'hidden_size is "big"'),
        (lambda text: text["linear_attn_config"].pop("gate_lower_bound"), "gate_lower_bound"),
    ):
        changed = json.loads(json.dumps(data))
        edit(changed["text_config"])
        file.write_text(json.dumps(changed))
        assert word in refuse(2, "ConfigError", "export", tmp_path)


def test_a_missing_folder_is_refused_before_the_export(refuse, toy, tmp_path, monkeypatch):
    monkeypatch.setattr("k3c.compile.export_text", lambda *_: pytest.fail("it exported first"))
    line = refuse(2, "ConfigError", "export", toy, "-o", tmp_path / "none" / "model.k3")
    assert str(tmp_path / "none") in line
