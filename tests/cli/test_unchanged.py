"""A second compile of the same inputs, and what `--explain` says is built again."""

import json

import pytest

from k3c.codegen import kernel_build, kernel_key
from k3c.codegen.kernel_build import build_kernel, why_missing
from k3c.codegen.kernel_key import KernelRequest
from k3c.codegen.templates.triton.pointwise import TEMPLATES
from k3c.explain import explain_kernels
from k3c.targets.target import load_target
from k3c.unchanged import changes, inputs_of
from tests.support.compiled import TINY, k3c

TARGET = load_target("h200")
OPTIONS = {"target": "cpu-avx2", "max_num_seqs": 8}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-config")
    (folder / "config.json").write_bytes((TINY / "config.json").read_bytes())
    return folder / "config.json"


@pytest.fixture(scope="module")
def made(config, tmp_path_factory):
    output = tmp_path_factory.mktemp("made") / "out"
    k3c("compile", config, "--target", "cpu", "--compute", "float32", "-o", output)
    return output


def stamps(folder):
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*")}


def again(config, output, *more):
    args = ("compile", config, "--target", "cpu", "--compute", "float32", "-o", output, *more)
    return k3c(*args, check=False)


def test_the_same_inputs_leave_an_artifact_as_it_is(config, made):
    before = stamps(made)
    done = again(config, made)
    assert done.returncode == 0, done.stderr
    assert "unchanged: " in done.stderr
    assert "kernels" not in done.stderr
    assert stamps(made) == before
    assert "inputs.json" in json.loads((made / "manifest.json").read_text())["members"]


def test_other_inputs_are_refused_by_name(config, made):
    done = again(config, made, "--max-num-seqs", "4")
    assert done.returncode == 2
    assert "output exists, made from other options" in done.stderr


def test_a_damaged_artifact_is_not_called_unchanged(config, made, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (p for p in made.rglob("*") if p.is_file()):
        (copy / path.relative_to(made)).parent.mkdir(parents=True, exist_ok=True)
        (copy / path.relative_to(made)).write_bytes(path.read_bytes())
    victim = copy / "passes.json"
    victim.write_bytes(victim.read_bytes()[:-2] + b" \n")
    done = again(config, copy)
    assert done.returncode == 4
    assert "passes.json" in done.stderr


def test_explain_says_that_every_kernel_is_kept(config, made, tmp_path):
    done = again(config, tmp_path / "out", "--explain")
    assert done.returncode == 0, done.stderr
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("kernels: ")]
    needed, kept, built = (int(w) for w in line.replace(",", "").split() if w.isdecimal())
    assert (needed, built) == (kept, 0)
    assert needed > 10


def test_an_input_that_changes_is_named(config, tmp_path):
    now = inputs_of(config, OPTIONS)
    assert changes(now, inputs_of(config, {**OPTIONS, "explain": True})) == []
    assert changes(now, inputs_of(config, {**OPTIONS, "max_num_seqs": 9})) == ["options"]
    other = tmp_path / config.parent.name / "config.json"
    other.parent.mkdir()
    other.write_bytes(config.read_bytes() + b"\n")
    assert changes(now, inputs_of(other, OPTIONS)) == ["config"]


def test_a_kernel_is_built_again_for_a_reason_that_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("K3C_CACHE_DIR", str(tmp_path))
    template = next(t for t in TEMPLATES if t.name == "triton_add")
    constants = {"WIDTH": 64, "OP": "add", "BETA": 0.0, "LINEAR_BETA": 0.0, "BLOCK": 128, "PDL": 0,
                 "num_warps": 4, "num_stages": 2, "pdl": 0,
                 "types": "*bf16 *bf16 *bf16 i32"}  # fmt: skip
    request = KernelRequest(template, constants)
    assert why_missing(request, TARGET) == "not built before"
    build_kernel(request, TARGET)
    assert why_missing(request, TARGET) is None
    monkeypatch.setattr(kernel_key, "module_digest", lambda name: "other code")
    kernel_key._makers.cache_clear()
    kernel_key._key.cache_clear()
    try:
        assert why_missing(request, TARGET) == "the template's code changed"
        lines = explain_kernels([request], TARGET)
        assert lines[0] == "kernels: 1 needed, 0 kept, 1 to build"
        assert lines[1] == "  triton_add: 1 to build, the template's code changed"
    finally:
        monkeypatch.undo()
        kernel_key._makers.cache_clear()
        kernel_key._key.cache_clear()
    assert kernel_build.MAKERS == "makers"
