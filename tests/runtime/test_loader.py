"""A whole artifact from disk, in processes of their own: a test run may hold TVM already."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from k3c.errors import ArtifactError
from k3c.runtime import loader
from k3c.runtime.loader import LoadOptions, load_artifact
from tests.support.c_artifact import WEIGHT_BYTES, write_artifact
from tests.support.fake_plan import expected_tokens

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [[1, 2, 3], [5], list(range(20)), [7] * 9]
SCRIPT = """
import json, sys
import k3c
from k3c.runtime.engine import Engine
from k3c.runtime.loader import LoadOptions

directory, executor = sys.argv[1:]
engine = Engine.open(directory, LoadOptions(executor=executor))
results = engine.generate(json.loads(sys.stdin.read()), 12, top_logprobs=2)
loaded = engine._loaded
print(json.dumps({
    "tokens": [r.token_ids for r in results],
    "logprobs": [r.top_logprobs for r in results],
    "scores": [row.tolist() for row in engine.score([[1, 2, 3]])],
    "allocated": {s: m.nbytes for s, m in loaded.memory.items()},
    "planned": dict(engine.manifest.space_bytes),
    "phases": sorted(engine.timings["load_s"]),
    "modules": sorted({m.split(".")[0] for m in sys.modules}),
}))
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return write_artifact(tmp_path_factory.mktemp("c_artifact"))


def run(artifact, executor):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(artifact), executor],
        input=json.dumps(PROMPTS),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_artifact_generates_and_scores_with_either_executor(artifact):
    by_entry, by_command = run(artifact, "whole"), run(artifact, "command")
    assert by_entry["tokens"] == [expected_tokens(p, 12) for p in PROMPTS]
    assert by_entry["scores"] == [[-(1 + 2 / 128), -(2 + 3 / 128)]]
    assert by_entry == by_command


def test_the_process_holds_no_compiler_and_exactly_the_planned_bytes(artifact):
    found = run(artifact, "whole")
    assert not set(found["modules"]) & {"torch", "triton", "tvm", "tvm_ffi", "networkx", "tiktoken"}
    assert found["allocated"] == found["planned"]
    assert found["allocated"]["weights"] == WEIGHT_BYTES
    assert found["phases"] == ["bind", "kernels", "manifest", "memory", "plans", "verify"]


def changed(artifact, tmp_path, name, data):
    copy = tmp_path / "copy"
    shutil.copytree(artifact, copy)
    (copy / name).write_bytes(data)
    return copy


def test_one_flipped_byte_of_the_weights_is_refused_before_anything_is_mapped(
    artifact, tmp_path, monkeypatch
):
    data = bytearray((artifact / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    copy = changed(artifact, tmp_path, "weights.safetensors", data)
    monkeypatch.setattr(loader, "_make_memory", None)
    with pytest.raises(ArtifactError, match=r"weights\.safetensors"):
        load_artifact(copy, LoadOptions())


def test_a_cpu_without_a_needed_feature_is_refused_before_members_are_read(tmp_path, monkeypatch):
    artifact = write_artifact(tmp_path, target_features=("avx9000",))
    monkeypatch.setattr(loader.artifact_dir, "verify", None)
    with pytest.raises(ArtifactError, match="compiled for avx9000, this CPU lacks avx9000"):
        load_artifact(artifact, LoadOptions())


def test_a_plan_that_the_checker_rejects_is_refused(artifact, tmp_path, monkeypatch):
    plan = json.loads((artifact / "plans" / "decode.b1.json").read_text())
    plan["buffers"][0]["offset"] = 2**40
    data = json.dumps(plan).encode()
    copy = changed(artifact, tmp_path, "plans/decode.b1.json", data)
    monkeypatch.setattr(loader.artifact_dir, "verify", lambda *_: None)
    with pytest.raises(ArtifactError, match=r"bounds.*decode\.b1"):
        load_artifact(copy, LoadOptions())
