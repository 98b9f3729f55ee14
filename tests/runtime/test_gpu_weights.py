"""Weights on their way to a GPU: every byte arrives, is checked, and progress is told."""

import threading
import time

import numpy as np
import pytest

from k3c import artifact_dir
from k3c.artifact import WEIGHTS_DATA_START, Manifest, Member
from k3c.artifact_writer import ArtifactWriter
from k3c.errors import ArtifactError, DeviceFault
from k3c.runtime.driver import gpu_weights
from k3c.runtime.driver.driver import WeightsFile
from tests.support.artifacts import BUCKETS, empty_plan, small_manifest
from tests.support.gpu_plans import open_driver

PART = 1 << 16


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    for module in ("k3c.artifact_writer", "k3c.artifact_dir", "k3c.runtime.driver.gpu_weights"):
        monkeypatch.setattr(f"{module}.PART_BYTES", PART)
    # Parts are no multiple of pieces, and the header ends inside the first part.
    monkeypatch.setattr(gpu_weights, "PIECE_BYTES", 3001)


def write_weights(path, nbytes):
    """Write a weights file through the writer of artifacts; return its data and its entry."""
    data = np.random.default_rng(5).integers(0, 256, nbytes, np.uint8).tobytes()
    with ArtifactWriter(path) as out:
        for bucket in BUCKETS:
            out.add_plan(empty_plan(bucket))
        out.add_bytes("kernels.so", b"\x7fELF")
        weights = out.start_weights(nbytes)
        for first in range(0, nbytes, 50_001):
            weights.write_at(first, memoryview(data)[first : first + 50_001])
        out.end_weights(weights)
        manifest = out.finish(small_manifest())
    return data, manifest


def file_of(path, manifest: Manifest, nbytes, check=True):
    member = manifest.members["weights.safetensors"]
    return WeightsFile(path / "weights.safetensors", nbytes, member, check)


@pytest.mark.parametrize("nbytes", [PART + 1, PART * 3 - WEIGHTS_DATA_START, PART * 40 + 77])
def test_every_byte_arrives(kind, stub, tmp_path, nbytes):
    driver, _ = open_driver(tmp_path, kind)
    data, manifest = write_weights(tmp_path / "a", nbytes)
    before = stub.used_bytes
    memory = driver.load_weights(file_of(tmp_path / "a", manifest, nbytes))
    assert memory.read(0, nbytes) == data
    assert stub.used_bytes - before == nbytes
    assert len(file_of(tmp_path / "a", manifest, nbytes).member.parts) == -(
        -(nbytes + WEIGHTS_DATA_START) // PART
    )


def test_a_damaged_part_is_refused_by_its_bytes_and_only_where_it_is_checked(cuda, tmp_path):
    nbytes = PART * 5
    driver, _ = open_driver(tmp_path)
    _, manifest = write_weights(tmp_path / "a", nbytes)
    path = tmp_path / "a/weights.safetensors"
    data = bytearray(path.read_bytes())
    data[3 * PART + 17] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=f"bytes {3 * PART} to {4 * PART} have a sha256"):
        driver.load_weights(file_of(tmp_path / "a", manifest, nbytes))
    driver.load_weights(file_of(tmp_path / "a", manifest, nbytes, check=False))
    with pytest.raises(ArtifactError, match=f"bytes {3 * PART} to {4 * PART} have a sha256"):
        artifact_dir.verify(tmp_path / "a", manifest)


def test_part_hashes_that_do_not_belong_to_the_file_are_refused(tmp_path):
    _, manifest = write_weights(tmp_path / "a", PART * 3)
    member = manifest.members["weights.safetensors"]
    for wrong in (member.parts[:-1], member.parts[::-1], (*member.parts, "00" * 32)):
        members = {**manifest.members, "weights.safetensors": Member(1, member.sha256, wrong)}
        object.__setattr__(manifest, "members", members)
        with pytest.raises(ArtifactError, match="part hashes do not make up"):
            artifact_dir.check_manifest(manifest, "here")


def test_a_short_file_is_refused_before_anything_is_read(cuda, tmp_path):
    driver, _ = open_driver(tmp_path)
    _, manifest = write_weights(tmp_path / "a", PART * 3)
    with pytest.raises(ArtifactError, match=f"{PART * 3 + 4096} bytes, the plan needs"):
        driver.load_weights(file_of(tmp_path / "a", manifest, PART * 4))


def test_a_copy_that_fails_is_told_and_all_threads_end(cuda, tmp_path):
    driver, _ = open_driver(tmp_path)
    _, manifest = write_weights(tmp_path / "a", PART * 50)
    cuda.fail("cuMemcpyHtoDAsync_v2", 700, after=9)
    before = threading.active_count()
    with pytest.raises(DeviceFault, match="cuMemcpyHtoDAsync_v2 failed: ERROR_ILLEGAL_ADDRESS"):
        driver.load_weights(file_of(tmp_path / "a", manifest, PART * 50))
    assert threading.active_count() == before


def test_progress_names_phase_bytes_rate_and_the_time_left(cuda, tmp_path, monkeypatch):
    """CS05, CS06: on a slow disk a line comes every few seconds."""
    lines, real = [], gpu_weights._Stream._read

    def slow(self, first, view):
        time.sleep(0.05)
        real(self, first, view)

    monkeypatch.setattr(gpu_weights._Stream, "_read", slow)
    monkeypatch.setattr(gpu_weights, "LINE_EVERY_S", 0.1)
    driver, _ = open_driver(tmp_path, say=lines.append)
    _, manifest = write_weights(tmp_path / "a", PART * 100)
    driver.load_weights(file_of(tmp_path / "a", manifest, PART * 100))
    assert len(lines) >= 2
    assert all(line.startswith("weights to the device: ") for line in lines)
    text = gpu_weights.progress(12_300_000_000, 98_000_000_000, 3.0)
    assert text == "weights to the device: 12.3 of 98.0 GB, 4.1 GB/s, 21 s left"
    assert gpu_weights.progress(0, 10, 3.0).endswith("not started")


def test_a_disk_that_stalls_is_given_up_not_one_that_is_slow(cuda, tmp_path, monkeypatch):
    hold = threading.Event()
    monkeypatch.setattr(gpu_weights, "STALL_S", 0.2)
    monkeypatch.setattr(gpu_weights._Stream, "_read", lambda *_: hold.wait(20))
    driver, _ = open_driver(tmp_path)
    _, manifest = write_weights(tmp_path / "a", PART * 3)
    try:
        with pytest.raises(DeviceFault, match="no part of the weights came in 0 s, 0 bytes"):
            driver.load_weights(file_of(tmp_path / "a", manifest, PART * 3, check=False))
    finally:
        hold.set()
