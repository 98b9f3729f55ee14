"""Weights of one rank of several: the same bytes as packed at once, whatever stops the run."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from k3c.artifact import PART_BYTES, WEIGHTS_DATA_START
from k3c.artifact_dir import read_manifest
from k3c.artifact_ranks import weight_of_rank
from k3c.artifact_writer import MemberWriter, WeightsWriter
from k3c.console import Console
from k3c.errors import ArtifactError, CheckpointError, ConfigError
from k3c.model.checkpoint import Checkpoint
from k3c.model.config import load_config
from k3c.pack import pack
from k3c.rank_weights import note_path, read_rank_weights, weights_path
from k3c.runtime.loader import LoadOptions, load_artifact
from k3c.weights import WeightPacker
from tests.support.compiled import ROOT, k3c
from tests.support.tiny_checkpoint import write_toy

OPTIONS = ("--target", "h200", "--mesh", "tp=2,ep=2", "--buckets", "decode.b1")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "model"
    write_toy(folder)
    return folder


@pytest.fixture(scope="module")
def compiled(toy, tmp_path_factory):
    output = tmp_path_factory.mktemp("ranks") / "artifact"
    k3c("compile", toy, *OPTIONS, "-o", output)
    return output


@pytest.fixture
def artifact(compiled, tmp_path):
    copy = tmp_path / "artifact"
    subprocess.run(["cp", "-r", compiled, copy], check=True)
    return copy


def test_an_artifact_of_several_ranks_has_no_weights_and_a_map_of_them(compiled, toy):
    manifest = read_manifest(compiled)
    assert not manifest.model.has_weights
    assert not any("weights" in name for name in manifest.members)
    assert {part.axis for entry in manifest.weights for part in entry.ranges} == {"", "tp", "ep"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_holds_its_own_parts_of_every_tensor(artifact, toy, rank):
    pack(toy, artifact, rank, Console())
    manifest = read_manifest(artifact)
    data = np.fromfile(weights_path(artifact, rank), np.uint8)[WEIGHTS_DATA_START:]
    checkpoint = Checkpoint(toy, load_config(toy))
    packer = WeightPacker(checkpoint, manifest.mesh, rank)
    for entry in manifest.weights:
        own = weight_of_rank(entry, manifest.mesh, rank)
        raw = b"".join(np.ascontiguousarray(a).tobytes() for a in packer.arrays(own))
        found = data[entry.offset : entry.offset + entry.nbytes].tobytes()
        if entry.layout == "row_major" and entry.dtype != "mxfp4":
            assert found[: len(raw)] == raw, entry.name
        assert len(found) == entry.nbytes
    assert read_rank_weights(artifact, manifest, rank).rank == rank


def test_packing_later_gives_the_bytes_of_packing_at_once(artifact, toy, tmp_path):
    pack(toy, artifact, 1, Console())
    k3c("compile", toy, *OPTIONS, "--rank", "1", "-o", tmp_path / "once")
    once = (tmp_path / "once/weights.safetensors").read_bytes()
    assert weights_path(artifact, 1).read_bytes() == once
    assert read_manifest(tmp_path / "once").rank == 1


def test_two_ranks_differ(artifact, toy):
    digests = set()
    for rank in (0, 1):
        pack(toy, artifact, rank, Console())
        digests.add(hashlib.sha256(weights_path(artifact, rank).read_bytes()).hexdigest())
    assert len(digests) == 2


@pytest.mark.parametrize("parts", [0, 1, 2])
def test_a_writer_goes_on_behind_the_parts_that_are_there(tmp_path, parts):
    random = np.random.default_rng(0)
    weights = [(0, random.bytes(PART_BYTES // 2)), (PART_BYTES, random.bytes(2 * PART_BYTES))]
    total = 3 * PART_BYTES + 640

    def write(path, done=(), entries=weights):
        with path.open("r+b" if path.exists() else "xb") as file:
            file.seek(len(done) * PART_BYTES)
            file.truncate()
            out = WeightsWriter(MemberWriter(file, True, done), total)
            for offset, data in entries:
                if offset + len(data) > out.position:
                    out.write_at(offset, data)
            return out.close()

    whole = write(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    again = tmp_path / "again"
    again.write_bytes(data[: parts * PART_BYTES + 77])
    done = [bytes.fromhex(part) for part in whole.parts[:parts]]
    assert write(again, done) == whole
    assert again.read_bytes() == data


def test_a_run_that_is_killed_is_resumed_and_gives_the_same_bytes(tmp_path):
    from k3c.pack import _good_parts

    random = np.random.default_rng(1)
    data = random.bytes(3 * PART_BYTES + 5)
    digests = [
        hashlib.sha256(data[i * PART_BYTES : (i + 1) * PART_BYTES]).digest() for i in range(3)
    ]
    path, journal = tmp_path / "file", tmp_path / "journal"
    journal.write_text("".join(f"{d.hex()}\n" for d in digests))
    path.write_bytes(data)
    with path.open("rb") as file:
        assert _good_parts(file, journal) == digests
    # Bytes that never reached the disk, and a line that did not wholly.
    path.write_bytes(data[: 2 * PART_BYTES + 9])
    with path.open("rb") as file:
        assert _good_parts(file, journal) == digests[:2]
    damaged = bytearray(data)
    damaged[PART_BYTES + 3] ^= 1
    path.write_bytes(bytes(damaged))
    with path.open("rb") as file:
        assert _good_parts(file, journal) == digests[:1]


@pytest.mark.slow
def test_a_killed_process_leaves_no_weights_and_the_next_one_ends_its_work(artifact, toy):
    expected = None
    for attempt in range(20):
        process = subprocess.Popen(
            [sys.executable, "-m", "k3c", "pack", str(toy), str(artifact), "--rank", "0"],
            cwd=ROOT, env=os.environ, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(1.5 + 0.2 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert weights_path(artifact, 0).exists() or not note_path(artifact, 0).exists()
        if note_path(artifact, 0).exists():
            break
    else:
        pack(toy, artifact, 0, Console())
    expected = read_rank_weights(artifact, read_manifest(artifact), 0).member
    data = weights_path(artifact, 0).read_bytes()
    assert expected.nbytes == len(data)


def test_a_rank_that_is_not_there_or_is_packed_already_is_refused(artifact, toy):
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        pack(toy, artifact, 2, Console())
    pack(toy, artifact, 0, Console())
    with pytest.raises(ConfigError, match="rank 0 is packed already"):
        pack(toy, artifact, 0, Console())


def test_another_model_is_refused_before_anything_is_written(artifact, toy, tmp_path):
    other = tmp_path / "other"
    subprocess.run(["cp", "-r", toy, other], check=True)
    config = json.loads((other / "config.json").read_text())
    text = config.get("text_config", config)
    text["routed_scaling_factor"] = 1.25
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="the config has digest"):
        pack(other, artifact, 0, Console())
    assert not (artifact / "weights").exists()


def test_weights_of_another_artifact_and_missing_ones_are_refused_by_the_loader(artifact, toy):
    manifest = read_manifest(artifact)
    with pytest.raises(ArtifactError, match="the weights of rank 0 are not packed"):
        load_artifact(artifact, LoadOptions())
    with pytest.raises(ConfigError, match="rank 5 of 2"):
        load_artifact(artifact, LoadOptions(rank=5))
    pack(toy, artifact, 0, Console())
    note = note_path(artifact, 0)
    text = json.loads(note.read_text())
    note.write_text(json.dumps({**text, "artifact": "0" * 64}))
    with pytest.raises(ArtifactError, match="not of this one"):
        read_rank_weights(artifact, manifest, 0)
    note.write_text(json.dumps(text))
    with weights_path(artifact, 0).open("ab") as file:
        file.write(b"x")
    with pytest.raises(ArtifactError, match="bytes of packed weights, planned"):
        read_rank_weights(artifact, manifest, 0)
