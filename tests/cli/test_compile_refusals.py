"""`k3c compile` with bad input: one line that says what, where and what to do; nothing is left."""

import errno
import json

import pytest
import torch

from k3c import artifact_writer
from k3c.model import mlp
from tests.support import tiny_checkpoint as toys

LAYER = "language_model.model.layers.1."
EXPERT = f"{LAYER}block_sparse_moe.experts.1.w2"


@pytest.fixture
def compile_(refuse, toy, tmp_path):
    """Return a function that compiles the toy, expects an error, and returns its line."""

    def compile_(code, kind, *options):
        output = tmp_path / "out"
        line = refuse(code, kind, "compile", toy, "-o", output, *(options or ("--target", "cpu")))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["toy"], "something was left behind"
        return line

    return compile_


def edit_config(toy, edit):
    file = toy / "config.json"
    data = json.loads(file.read_text())
    edit(data["text_config"])
    file.write_text(json.dumps(data))


def test_no_config_json(compile_, toy):
    (toy / "config.json").unlink()
    line = compile_(2, "ConfigError")
    assert str(toy / "config.json") in line
    assert "pass a Hugging Face model directory" in line


def test_no_model_directory(refuse, tmp_path):
    line = refuse(
        2, "ConfigError", "compile", tmp_path / "x", "--target", "cpu", "-o", tmp_path / "o"
    )
    assert str(tmp_path / "x") in line


@pytest.mark.parametrize("key", ["kv_lora_rank", "attn_res_block_size", "routed_scaling_factor"])
def test_a_key_of_k3_that_the_config_lacks(compile_, toy, key):
    edit_config(toy, lambda text: text.pop(key))
    line = compile_(2, "ConfigError")
    assert f"missing key {key!r}" in line
    assert "config.json" in line


def test_a_key_that_k3c_does_not_know(compile_, toy):
    edit_config(toy, lambda text: text.update(sliding_window=128))
    assert "unknown key 'sliding_window'" in compile_(2, "ConfigError")


def test_a_tensor_of_the_wrong_dtype(compile_, toy):
    name = f"{LAYER}self_attn.q_proj.weight"
    toys.edit_tensors(toy, toys.replaced(name, lambda t: t.to(torch.float16)))
    line = compile_(4, "CheckpointError")
    assert f"{name} has dtype F16, expected BF16" in line
    assert toys.SHARD in line


def test_a_tensor_of_the_wrong_shape(compile_, toy):
    name = f"{LAYER}self_attn.q_proj.weight"
    toys.edit_tensors(toy, toys.replaced(name, lambda t: t[:-1]))
    line = compile_(4, "CheckpointError")
    assert f"{name} has shape [" in line
    assert "expected [" in line


def test_a_missing_shard(compile_, toy):
    (toy / toys.SHARD).unlink()
    line = compile_(4, "CheckpointError")
    assert "missing shard" in line
    assert toys.SHARD in line


def test_a_truncated_shard(compile_, toy):
    shard = toy / toys.SHARD
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size - 7)
    line = compile_(4, "CheckpointError")
    assert f"holds {size - 7} bytes, its header describes {size}" in line
    assert "download it again" in line


def test_a_tensor_that_no_shard_has(compile_, toy):
    name = f"{LAYER}self_attn.q_proj.weight"
    toys.edit_tensors(toy, lambda tensors: tensors.pop(name))
    assert f"missing {name}" in compile_(4, "CheckpointError")


def test_a_scale_byte_of_255(compile_, toy):
    """QL04: tensor, row and column are named, whatever has been written by then is gone."""

    def break_scale(scale):
        scale = scale.clone()
        scale[5, 1] = 255
        return scale

    toys.edit_tensors(toy, toys.replaced(f"{EXPERT}.weight_scale", break_scale))
    line = compile_(4, "CheckpointError")
    assert f"{EXPERT}.weight_scale: scale byte 255 (NaN) at row 5, column 1" in line


def test_an_unknown_target(compile_):
    line = compile_(2, "ConfigError", "--target", "abacus")
    assert "unknown target or topology 'abacus'" in line
    assert "cpu-avx2" in line


@pytest.mark.parametrize(
    "options", [("--max-num-seqs", "0"), ("--max-model-len", "1"), ("--max-model-len", "999999999")]
)
def test_a_plan_option_out_of_range(compile_, options):
    line = compile_(2, "ConfigError", "--target", "cpu", *options)
    assert options[0] in line
    assert options[1] in line


def test_an_unknown_compute_type_is_refused_with_the_known_ones(run, toy, tmp_path):
    code, _, err = run(
        "compile", toy, "--target", "cpu", "--compute", "float8", "-o", tmp_path / "out"
    )
    assert code == 2
    assert "bfloat16" in err
    assert "float32" in err


@pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
def test_an_output_that_exists_is_left_alone(refuse, toy, tmp_path, kind):
    output = tmp_path / "out"
    if kind == "directory":
        output.mkdir()
        (output / "mine").write_text("keep")
    elif kind == "file":
        output.write_text("keep")
    else:
        output.symlink_to(tmp_path / "nowhere")
    line = refuse(2, "ConfigError", "compile", toy, "--target", "cpu", "-o", output)
    assert f"output exists ({output})" in line
    assert kind != "directory" or (output / "mine").read_text() == "keep"
    assert kind != "file" or output.read_text() == "keep"


def test_an_output_whose_folder_is_missing(refuse, toy, tmp_path):
    line = refuse(2, "ConfigError", "compile", toy, "--target", "cpu", "-o", tmp_path / "a" / "b")
    assert str(tmp_path / "a") in line


@pytest.mark.parametrize("after_bytes", [0, 600_000])
def test_a_full_disk(compile_, monkeypatch, after_bytes):
    left = [after_bytes]
    real = artifact_writer.MemberWriter.write

    def write(self, data):
        left[0] -= memoryview(data).nbytes
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, data)

    monkeypatch.setattr(artifact_writer.MemberWriter, "write", write)
    line = compile_(5, "DeviceFault")
    assert "the disk is full" in line
    assert "free space" in line


def test_an_op_without_a_lowering_is_named_with_its_layer(compile_, monkeypatch):
    """EX09: found at compile time, not when the artifact is loaded."""
    real = mlp.MLP.forward

    def forward(self, x):
        return real(self, x) + torch.fft.rfft(x).real[..., :1]

    monkeypatch.setattr(mlp.MLP, "forward", forward)
    line = compile_(1, "ExportError", "--target", "cpu", "--compute", "float32")
    assert "fft_rfft" in line
    assert "kda_dense" in line
