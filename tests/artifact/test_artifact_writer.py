"""An artifact appears whole or not at all, and the same input gives the same bytes."""

import errno
import hashlib
import json

import pytest

from k3c import artifact_writer
from k3c.artifact import WEIGHTS_DATA_START
from k3c.artifact_writer import ArtifactWriter, MemberWriter, WeightsWriter
from k3c.errors import ArtifactError, ConfigError, DeviceFault
from tests.support.artifacts import WEIGHTS_BYTES, small_manifest, write_small_artifact


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_two_writes_of_one_input_are_byte_identical(tmp_path):
    write_small_artifact(tmp_path / "a")
    write_small_artifact(tmp_path / "b")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_only_the_artifact_is_left(tmp_path):
    write_small_artifact(tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_every_member_is_recorded_with_size_and_hash(tmp_path):
    manifest = write_small_artifact(tmp_path / "a")
    files = tree(tmp_path / "a")
    files.pop("manifest.json")
    assert manifest.members.keys() == files.keys()
    for name, data in files.items():
        assert manifest.members[name].nbytes == len(data)
        assert manifest.members[name].sha256 == hashlib.sha256(data).hexdigest()


def test_the_weights_file_is_safetensors_with_data_at_byte_4096(tmp_path):
    write_small_artifact(tmp_path / "a")
    data = (tmp_path / "a/weights.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    tensor = json.loads(data[8 : 8 + size])["weights"]
    assert 8 + size == WEIGHTS_DATA_START
    assert tensor == {"dtype": "U8", "shape": [WEIGHTS_BYTES], "data_offsets": [0, WEIGHTS_BYTES]}
    assert len(data) == WEIGHTS_DATA_START + WEIGHTS_BYTES
    # The gap between two weights and the tail are zero.
    assert not any(data[WEIGHTS_DATA_START + 8 : WEIGHTS_DATA_START + 64])
    assert not any(data[WEIGHTS_DATA_START + 128 :])


def test_the_weights_open_with_the_safetensors_library(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    write_small_artifact(tmp_path / "a")
    assert numpy.load_file(tmp_path / "a/weights.safetensors")["weights"].shape == (WEIGHTS_BYTES,)


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_an_output_that_exists_is_refused_and_untouched(tmp_path, kind):
    out = tmp_path / "a"
    make = {"file": out.touch, "folder": out.mkdir, "dangling link": lambda: out.symlink_to("no")}
    make[kind]()
    with pytest.raises(ConfigError, match="output exists"):
        ArtifactWriter(out)
    assert out.is_symlink() or out.exists()


def test_an_output_that_appears_meanwhile_is_not_overwritten(tmp_path, monkeypatch):
    end_weights = ArtifactWriter.end_weights

    def race(self, writer):
        (tmp_path / "a").mkdir()
        end_weights(self, writer)

    monkeypatch.setattr(ArtifactWriter, "end_weights", race)
    with pytest.raises(ConfigError, match="output exists"):
        write_small_artifact(tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert not list((tmp_path / "a").iterdir())


def test_a_missing_parent_is_named(tmp_path):
    with pytest.raises(ConfigError, match="none"):
        ArtifactWriter(tmp_path / "none/a")


def test_a_full_disk_is_a_device_fault_and_leaves_nothing(tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MemberWriter, "write", full)
    with pytest.raises(DeviceFault, match="disk is full"):
        write_small_artifact(tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_at_the_last_moment_leaves_nothing(tmp_path, monkeypatch):
    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artifact_writer, "_sync", full)
    with pytest.raises(DeviceFault, match="disk is full"):
        write_small_artifact(tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_any_other_failure_leaves_nothing_and_stays_itself(tmp_path, monkeypatch):
    def interrupt(self, offset, data):
        raise KeyboardInterrupt

    monkeypatch.setattr(WeightsWriter, "write_at", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_small_artifact(tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_an_artifact_that_lacks_what_it_names_is_not_written(tmp_path):
    with pytest.raises(ArtifactError, match="not a member"), ArtifactWriter(tmp_path / "a") as out:
        out.finish(small_manifest())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["../x", "/x", "X", "manifest.json", ""])
def test_a_bad_member_name_is_our_own_fault(tmp_path, name):
    with pytest.raises(AssertionError, match="member"), ArtifactWriter(tmp_path / "a") as out:
        out.add_bytes(name, b"")


def test_a_weight_may_not_be_written_twice_or_past_the_end(tmp_path):
    with ArtifactWriter(tmp_path / "a") as out:
        weights = out.start_weights(128)
        weights.write_at(64, bytes(32))
        with pytest.raises(AssertionError, match="written already"):
            weights.write_at(64, bytes(32))
        with pytest.raises(AssertionError, match="planned 128"):
            weights.write_at(96, bytes(64))
