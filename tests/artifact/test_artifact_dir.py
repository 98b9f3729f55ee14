"""The reader refuses every damaged, foreign, newer or hostile artifact, and names the member."""

import json
import os
import shutil

import pytest

from k3c import artifact_dir
from k3c.artifact import to_json
from k3c.artifact_dir import MAX_JSON_BYTES, read_manifest, read_plan, verify
from k3c.errors import ArtifactError
from tests.support.artifacts import BUCKETS, empty_plan, write_small_artifact


@pytest.fixture
def artifact(tmp_path):
    write_small_artifact(tmp_path / "a")
    return tmp_path / "a"


def check(artifact, mode="full"):
    verify(artifact, read_manifest(artifact), mode)


def edit_manifest(artifact, change):
    raw = json.loads((artifact / "manifest.json").read_text())
    change(raw)
    (artifact / "manifest.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("mode", ["full", "quick"])
def test_what_was_written_reads_back(artifact, mode):
    check(artifact, mode)
    assert read_manifest(artifact).buckets == BUCKETS
    assert read_plan(artifact, "decode.b2") == empty_plan(BUCKETS[1])


@pytest.mark.parametrize("member", ["kernels.so", "weights.safetensors", "plans/decode.b1.json"])
@pytest.mark.parametrize("mode", ["full", "quick"])
def test_a_truncated_member_is_named_with_both_sizes(artifact, member, mode):
    size = (artifact / member).stat().st_size
    os.truncate(artifact / member, size - 1)
    with pytest.raises(ArtifactError, match=f"{size - 1} bytes.*{size}.*{member}"):
        check(artifact, mode)


@pytest.mark.parametrize("member", ["kernels.so", "weights.safetensors", "ir/01-canonicalize.k3"])
@pytest.mark.parametrize("mode", ["full", "quick"])
def test_a_flipped_bit_is_found_and_the_member_named(artifact, member, mode):
    data = bytearray((artifact / member).read_bytes())
    data[-1] ^= 1
    (artifact / member).write_bytes(data)
    with pytest.raises(ArtifactError, match=f"sha256.*{member}"):
        check(artifact, mode)


def test_quick_hashes_all_but_large_weights(artifact, monkeypatch):
    monkeypatch.setattr(artifact_dir, "QUICK_WEIGHTS_BYTES", 1)
    data = bytearray((artifact / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (artifact / "weights.safetensors").write_bytes(data)
    check(artifact, "quick")
    with pytest.raises(ArtifactError, match=r"weights\.safetensors"):
        check(artifact, "full")


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/../../b", "a//b", "A", "a b", ".a"])
def test_a_member_name_that_leaves_the_directory_is_refused(artifact, name):
    edit_manifest(artifact, lambda m: m["members"].update({name: m["members"]["kernels.so"]}))
    with pytest.raises(ArtifactError, match="not allowed"):
        read_manifest(artifact)


def test_a_bucket_name_cannot_lead_outside(artifact):
    edit_manifest(artifact, lambda m: m["buckets"][0].update(name="../../evil"))
    with pytest.raises(ArtifactError, match="not a member"):
        read_manifest(artifact)


def test_a_kernel_binary_that_is_no_member_is_refused(artifact):
    edit_manifest(artifact, lambda m: m["kernels"][0].update(binary="/tmp/evil.so"))
    with pytest.raises(ArtifactError, match=r"evil.so.*not a member"):
        read_manifest(artifact)


def test_a_symbolic_link_is_refused_even_to_equal_bytes(artifact, tmp_path):
    shutil.move(artifact / "kernels.so", tmp_path / "k")
    (artifact / "kernels.so").symlink_to(tmp_path / "k")
    with pytest.raises(ArtifactError, match=r"symbolic link.*kernels.so"):
        check(artifact)


def test_a_linked_folder_is_refused(artifact, tmp_path):
    shutil.move(artifact / "plans", tmp_path / "plans")
    (artifact / "plans").symlink_to(tmp_path / "plans")
    with pytest.raises(ArtifactError, match=r"symbolic link.*plans"):
        check(artifact)


def test_a_linked_manifest_is_refused(artifact, tmp_path):
    shutil.move(artifact / "manifest.json", tmp_path / "m")
    (artifact / "manifest.json").symlink_to(tmp_path / "m")
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        read_manifest(artifact)


def test_a_pipe_in_place_of_a_file_does_not_hang(artifact):
    (artifact / "kernels.so").unlink()
    os.mkfifo(artifact / "kernels.so")
    with pytest.raises(ArtifactError, match=r"not a regular file.*kernels.so"):
        check(artifact)
    (artifact / "manifest.json").unlink()
    os.mkfifo(artifact / "manifest.json")
    with pytest.raises(ArtifactError, match="not a regular file"):
        read_manifest(artifact)


def test_a_huge_manifest_is_refused_by_size(artifact):
    os.truncate(artifact / "manifest.json", MAX_JSON_BYTES + 5)
    with pytest.raises(ArtifactError, match=f"{MAX_JSON_BYTES + 5} bytes, limit {MAX_JSON_BYTES}"):
        read_manifest(artifact)


def test_deep_json_is_refused(artifact):
    (artifact / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(ArtifactError, match="not valid JSON"):
        read_manifest(artifact)


def test_a_newer_major_version_names_both_versions_and_the_writer(artifact):
    edit_manifest(artifact, lambda m: m.update(major=9, k3c_version="9.1", new_field=1))
    with pytest.raises(ArtifactError, match=r"k3c-artifact 9, this k3c reads 3.*use k3c 9.1"):
        read_manifest(artifact)


@pytest.mark.parametrize("text", ["{}", "[]", '"x"', '{"format": "gguf"}', '{"major": 1}'])
def test_a_foreign_manifest_is_refused_by_its_format(artifact, text):
    (artifact / "manifest.json").write_text(text)
    with pytest.raises(ArtifactError, match="expected 'k3c-artifact'"):
        read_manifest(artifact)


def test_a_foreign_directory_has_no_manifest(tmp_path):
    with pytest.raises(ArtifactError, match=r"manifest.json"):
        read_manifest(tmp_path)
    with pytest.raises(ArtifactError, match="no such artifact directory"):
        read_manifest(tmp_path / "none")


@pytest.mark.parametrize("field", ["k3c_version", "major", "model", "members", "space_bytes"])
def test_a_missing_field_is_named(artifact, field):
    edit_manifest(artifact, lambda m: m.pop(field))
    with pytest.raises(ArtifactError, match=f"field {field} is missing"):
        read_manifest(artifact)


def test_a_missing_member_is_named(artifact):
    (artifact / "plans/decode.b2.json").unlink()
    with pytest.raises(ArtifactError, match=r"missing.*plans/decode.b2.json"):
        check(artifact)


@pytest.mark.parametrize("name", ["evil.pkl", "plans/model.pt", ".hidden", "UPPER"])
def test_a_file_that_is_no_member_is_refused_by_name(artifact, name):
    (artifact / name).write_bytes(b"cos\nsystem\n")
    with pytest.raises(ArtifactError, match=f"does not list.*{name}"):
        check(artifact)


def test_weights_that_do_not_fill_their_space_are_refused(artifact):
    edit_manifest(artifact, lambda m: m["space_bytes"].update(weights=264))
    with pytest.raises(ArtifactError, match=r"200 bytes of weights, the plans have 264"):
        check(artifact)


def test_a_plan_of_another_shape_is_refused(artifact):
    (artifact / "plans/decode.b1.json").write_text(to_json(read_manifest(artifact)))
    with pytest.raises(ArtifactError, match="field"):
        read_plan(artifact, "decode.b1")
