"""Reading checkpoints: spellings, shapes, and every kind of damage before any weight is read."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from k3c.errors import CheckpointError
from k3c.ir.types import BF16, F32, MXFP4
from k3c.model.checkpoint import INDEX, Checkpoint
from k3c.model.config import load_config
from k3c.model.random_weights import write_random_checkpoint
from k3c.model.safetensors_file import Stored
from k3c.model.tensor_names import expected_tensors
from tests.support.tiny_checkpoint import (
    SHARD,
    edit_tensors,
    renamed,
    replaced,
    same_bytes,
    write_toy,
)

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests/data/k3-tiny"
LAYER = "language_model.model.layers."
STEM = LAYER + "*.block_sparse_moe.experts.*."


@pytest.fixture
def toy(tmp_path):
    return tmp_path, write_toy(tmp_path)


@pytest.fixture
def no_reads(monkeypatch):
    """Damage must be found in headers: reading a weight fails the test."""

    def read(*_):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(Stored, "read_into", read)


def everything(directory, config):
    checkpoint = Checkpoint(directory, config)
    return {name: checkpoint.load(name) for name in checkpoint.names}


def test_tiny_has_every_tensor_and_vision_is_skipped_by_name():
    config = load_config(TINY)
    checkpoint = Checkpoint(TINY, config)
    assert len(checkpoint.skipped) == 18
    assert {name.split(".")[0] for name in checkpoint.skipped} == {"vision_tower", "mm_projector"}
    assert checkpoint.load(f"{LAYER}0.self_attn.A_log").shape == (6,)
    assert checkpoint.load(f"{LAYER}0.self_attn.q_conv1d.weight").shape == (192, 4)
    assert checkpoint.load(f"{LAYER}3.self_attention_res_proj.weight").shape == (1, 256)
    packed, scale = checkpoint.load_experts(STEM + "w2", 5)
    assert (packed.shape, scale.shape) == ((32, 128, 64), (32, 128, 4))
    one = f"{LAYER}5.block_sparse_moe.experts.31.w2.weight_packed"
    assert torch.equal(packed[31], checkpoint.load(one))


def test_released_count_of_tensors():
    config = load_config(ROOT / "tests/data/configs/kimi-k3-config.json")
    names = expected_tensors(config)
    experts = sum(".experts." in name for name in names)
    assert (experts, len(names) - experts) == (2 * 247_296, 2_460)


def test_types_are_the_stored_ones_and_the_wider_where_layers_differ(toy):
    directory, config = toy
    name = f"{LAYER}1.self_attn.q_proj.weight"
    edit_tensors(directory, replaced(name, lambda t: t.float()))
    checkpoint = Checkpoint(directory, config)
    assert checkpoint.dtype(name) == F32
    assert checkpoint.dtype(f"{LAYER}*.self_attn.q_proj.weight") == F32
    assert checkpoint.dtype(f"{LAYER}*.self_attn.o_proj.weight") == BF16
    assert checkpoint.dtype("language_model.lm_head.weight") == BF16
    assert checkpoint.dtype(STEM + "w1") == MXFP4


def test_a_log_is_narrowed_to_the_first_entries(toy):
    directory, config = toy
    name = f"{LAYER}0.self_attn.A_log"
    edit_tensors(directory, replaced(name, lambda t: torch.arange(8.0)))
    assert Checkpoint(directory, config).load(name).tolist() == [0, 1, 2, 3, 4, 5]


OLD_NAMES = {
    "short prefix": lambda n: n.replace("language_model.model.layers.", "language_model.layers."),
    "mlp for block_sparse_moe": lambda n: n.replace("block_sparse_moe", "mlp"),
    "old residual spelling": lambda n: re.sub(r"_res_(proj|norm)\.weight", r"_res.\1_weight", n),
}


@pytest.mark.parametrize("change", OLD_NAMES.values(), ids=OLD_NAMES)
def test_other_spellings_load_the_same_values(toy, change):
    directory, config = toy
    before = everything(directory, config)
    edit_tensors(directory, renamed(change))
    after = everything(directory, config)
    assert before.keys() == after.keys()
    assert all(same_bytes(before[n], after[n]) for n in before)


def test_other_ranks_load_the_same_values(toy):
    directory, config = toy
    before = everything(directory, config)

    def edit(tensors):
        for name, tensor in tensors.items():
            if name.endswith("conv1d.weight"):
                tensors[name] = tensor.squeeze(1)
            elif name.endswith("A_log"):
                tensors[name] = tensor[:6].reshape(1, 1, 6, 1)
            elif name.endswith("weight_scale"):
                tensors[name] = tensor[:, :, None, None]
            elif name.endswith("res_proj.weight"):
                tensors[name] = tensor[0]

    edit_tensors(directory, edit)
    after = everything(directory, config)
    assert all(same_bytes(before[n], after[n]) for n in before)


def test_layers_past_the_last_are_skipped_by_name(toy):
    directory, config = toy

    def add(tensors):
        tensors[f"{LAYER}3.self_attn.q_proj.weight"] = torch.zeros(3)

    edit_tensors(directory, add)
    assert Checkpoint(directory, config).skipped == (f"{LAYER}3.self_attn.q_proj.weight",)


def test_a_single_file_without_an_index_loads(toy):
    directory, config = toy
    before = everything(directory, config)
    (directory / SHARD).rename(directory / "model.safetensors")
    (directory / INDEX).unlink()
    after = everything(directory, config)
    assert all(same_bytes(before[n], after[n]) for n in before)


NAME = f"{LAYER}1.self_attn.q_proj.weight"
EXPERT = f"{LAYER}1.block_sparse_moe.experts.0.w1"


def added(name):
    """An edit that stores a copy of a tensor under another name."""
    return lambda tensors: tensors.update({name: tensors[NAME].clone()})


DAMAGE = {
    "missing tensor": (lambda t: t.pop(NAME), NAME),
    "expert missing": (lambda t: t.pop(f"{EXPERT}.weight_scale"), f"{EXPERT}.weight_scale"),
    "unknown tensor": (added(f"{LAYER}1.self_attn.x.weight"), "unknown tensor .*x.weight"),
    "unknown module": (added("draft.weight"), "unknown tensor draft.weight"),
    "stored twice": (added(NAME.replace("model.model", "model")), "q_proj.weight is stored twice"),
    "shape": (replaced(NAME, lambda t: t[:, 1:]), r"has shape \[48, 63\], expected \[48, 64\]"),
    "transposed": (replaced(NAME, lambda t: t.T), r"has shape \[64, 48\], expected \[48, 64\]"),
    "dtype": (replaced(NAME, lambda t: t.half()), "has dtype F16, expected BF16 or F32"),
    "packed dtype": (
        replaced(f"{EXPERT}.weight_packed", lambda t: t.to(torch.int8)),
        "has dtype I8, expected U8",
    ),
    "A_log too short": (replaced(f"{LAYER}0.self_attn.A_log", lambda t: t[:5]), "A_log has shape"),
}


@pytest.mark.parametrize(("edit", "message"), DAMAGE.values(), ids=DAMAGE)
@pytest.mark.usefixtures("no_reads")
def test_wrong_tensors_are_refused_by_name_before_any_is_read(toy, edit, message):
    directory, config = toy
    edit_tensors(directory, edit)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(directory, config)
    assert caught.value.where
    assert caught.value.exit_code == 4


@pytest.mark.usefixtures("no_reads")
def test_a_truncated_shard_gives_both_sizes(toy):
    directory, config = toy
    shard = directory / SHARD
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(CheckpointError, match=f"holds {size - 1} bytes.*describes {size}"):
        Checkpoint(directory, config)
    for short in (100, 7, 0):
        with shard.open("r+b") as file:
            file.truncate(short)
        with pytest.raises(CheckpointError, match=f"holds {short} bytes"):
            Checkpoint(directory, config)


@pytest.mark.usefixtures("no_reads")
def test_bytes_after_the_data_are_refused(toy):
    directory, config = toy
    with (directory / SHARD).open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="holds"):
        Checkpoint(directory, config)


@pytest.mark.usefixtures("no_reads")
def test_a_missing_shard_or_no_weights_at_all_say_what_to_do(toy):
    directory, config = toy
    (directory / SHARD).unlink()
    with pytest.raises(CheckpointError, match="missing shard") as caught:
        Checkpoint(directory, config)
    assert caught.value.where == str(directory / SHARD)
    (directory / INDEX).unlink()
    with pytest.raises(CheckpointError, match="found neither"):
        Checkpoint(directory, config)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not JSON"),
        ('{"weight_map": []}', "expected a JSON object"),
        ("{}", "missing key 'weight_map'"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "not a plain file name"),
        ('{"weight_map": {"a": 3}}', "not a plain file name"),
        (json.dumps({"weight_map": {"a": SHARD}}), "a is not in the shard"),
    ],
)
@pytest.mark.usefixtures("no_reads")
def test_a_broken_index_is_refused(toy, index, message):
    directory, config = toy
    (directory / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(directory, config)


def one_tensor(**change):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | change
    return {"a": entry}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "header is a list"),
        ({"a": 3}, "malformed header entry"),
        (one_tensor(shape=[-2]), "malformed"),
        (one_tensor(shape=[True]), "malformed"),
        (one_tensor(dtype="F13"), "unknown dtype 'F13'"),
        (one_tensor(shape=[3]), r"gives 8 bytes, F32 \[3\] needs 12"),
        (one_tensor(data_offsets=[4, 12]), "data start at byte"),
        (one_tensor(data_offsets=[8, 0]), "needs 8"),
    ],
)
@pytest.mark.usefixtures("no_reads")
def test_a_broken_header_is_refused(toy, header, message):
    directory, config = toy
    raw = json.dumps(header).encode()
    (directory / SHARD).write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(directory, config)


def test_a_header_length_beyond_the_file_is_refused(toy):
    directory, config = toy
    (directory / SHARD).write_bytes(b"\xff" * 8 + b"{}")
    with pytest.raises(CheckpointError, match="its header alone needs"):
        Checkpoint(directory, config)


def test_a_scale_byte_of_255_names_tensor_row_and_column(toy):
    directory, config = toy
    name = f"{LAYER}2.block_sparse_moe.experts.1.w2.weight_scale"

    def damage(scale):
        scale = scale.clone()
        scale[40, 2] = 255
        return scale

    edit_tensors(directory, replaced(name, damage))
    checkpoint = Checkpoint(directory, config)
    message = re.escape(f"{name}: scale byte 255 (NaN) at row 40, column 2")
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(name)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load_experts(STEM + "w2", 2)
    checkpoint.load_experts(STEM + "w2", 1)


def test_a_shard_that_shrinks_after_the_check_is_noticed(toy):
    directory, config = toy
    checkpoint = Checkpoint(directory, config)
    with (directory / SHARD).open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match="bytes could be read"):
        checkpoint.load("language_model.lm_head.weight")


def test_random_checkpoints_repeat_by_seed(tmp_path, toy):
    directory, config = toy
    again, other = tmp_path / "again", tmp_path / "other"
    write_toy(again)
    other.mkdir()
    write_random_checkpoint(other, config, seed=1)
    assert (directory / SHARD).read_bytes() == (again / SHARD).read_bytes()
    assert (directory / SHARD).read_bytes() != (other / SHARD).read_bytes()


_STREAM = """
import resource, sys
from k3c.model.checkpoint import Checkpoint
from k3c.model.config import load_config
checkpoint = Checkpoint(sys.argv[1], load_config(sys.argv[1]))
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
checkpoint.load(checkpoint.names[0])
start = peak = rss()
for name in checkpoint.names:
    checkpoint.load(name)
    peak = max(peak, rss())
print(peak - start, checkpoint.nbytes)
"""


def test_reading_everything_keeps_nothing():
    done = subprocess.run(
        [sys.executable, "-c", _STREAM, str(TINY)], capture_output=True, text=True, check=True
    )
    grown, total = map(int, done.stdout.split())
    # A memory map or a cache of the shards would grow by all 18 MB; the largest tensor has 1 MB.
    assert grown < total / 3
