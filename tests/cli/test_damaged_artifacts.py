"""Damaged, foreign, newer and hostile artifacts: refused by name with exit code 4."""

import json
import os
import shutil

import pytest

from k3c.artifact import FORMAT_MAJOR
from k3c.artifact_dir import MAX_JSON_BYTES

VERBS = (
    ("inspect",),
    ("generate", "--tokens", "tokens.json"),
    ("eval", "--tokens", "tokens.json"),
    ("bench", "--repeat", "1"),
)


@pytest.fixture
def artifact(tiny_f32, tmp_path, monkeypatch):
    """A copy to damage; its files are links: a test replaces a file, never writes into one."""
    copy = tmp_path / "artifact"
    shutil.copytree(tiny_f32, copy, copy_function=os.link)
    (tmp_path / "tokens.json").write_text("[[1, 2, 3]]")
    monkeypatch.chdir(tmp_path)
    return copy


@pytest.fixture
def refused(refuse, artifact):
    """Return a function that opens the artifact with every verb and returns the error line."""

    def refused():
        lines = {refuse(4, "ArtifactError", verb, artifact, *rest) for verb, *rest in VERBS}
        assert len(lines) == 1, lines
        return lines.pop()

    return refused


def replace(artifact, name, data):
    path = artifact / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def edit_manifest(artifact, edit):
    manifest = json.loads((artifact / "manifest.json").read_text())
    edit(manifest)
    replace(artifact, "manifest.json", json.dumps(manifest).encode())


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "kernels.so", "plans/decode.b1.json", "lib/libtvm_runtime.so"]
)
def test_a_truncated_member(artifact, refused, name):
    data = (artifact / name).read_bytes()
    replace(artifact, name, data[:-1])
    line = refused()
    assert f"has {len(data) - 1} bytes, the manifest says {len(data)} ({name})" in line
    assert "compile again" in line


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "kernels.so", "plans/score.t64.json", "passes.json"]
)
def test_a_flipped_byte(artifact, refused, name):
    data = bytearray((artifact / name).read_bytes())
    data[len(data) * 2 // 3] ^= 1
    replace(artifact, name, bytes(data))
    line = refused()
    assert "sha256" in line
    assert f"({name})" in line


def test_a_missing_member(artifact, refused):
    (artifact / "kernels.so").unlink()
    assert "a member is missing (kernels.so)" in refused()


def test_a_file_that_the_manifest_does_not_list(artifact, refused):
    """AR08: a pickle put beside the members is never even opened."""
    replace(artifact, "weights.pt", b"cos\nsystem\n(S'touch pwned'\ntR.")
    assert "a file that the manifest does not list (weights.pt)" in refused()


def test_a_symbolic_link_in_place_of_a_member(artifact, refused, tmp_path):
    shutil.move(artifact / "kernels.so", tmp_path / "kernels.so")
    (artifact / "kernels.so").symlink_to(tmp_path / "kernels.so")
    assert "a symbolic link is not allowed (kernels.so)" in refused()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "lib/../../x", "a//b", ".hidden"])
def test_a_member_name_that_leaves_the_artifact(artifact, refused, name):
    def edit(manifest):
        manifest["members"][name] = manifest["members"]["kernels.so"]

    edit_manifest(artifact, edit)
    assert f"member name {name!r} is not allowed" in refused()


def test_a_kernel_binary_outside_the_artifact(artifact, refused):
    def edit(manifest):
        manifest["kernels"][0]["binary"] = "../../tmp/evil.so"

    edit_manifest(artifact, edit)
    assert "'../../tmp/evil.so' is needed, but is not a member" in refused()


def test_a_huge_manifest_is_not_read(artifact, refused):
    replace(artifact, "manifest.json", b"{")
    with (artifact / "manifest.json").open("r+b") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    line = refused()
    assert str(MAX_JSON_BYTES) in line
    assert "manifest.json" in line


@pytest.mark.parametrize("text", ["[" * 200_000, "{", "\xff\xfe", "null", '{"format": 1e999}'])
def test_a_manifest_that_is_not_one(artifact, refused, text):
    replace(artifact, "manifest.json", text.encode("latin-1"))
    assert "manifest.json" in refused()


def test_a_foreign_format(artifact, refused):
    edit_manifest(artifact, lambda m: m.update(format="gguf"))
    assert "format is 'gguf', expected 'k3c-artifact'" in refused()


def test_a_newer_format_names_both_versions_and_who_wrote_it(artifact, refused):
    edit_manifest(
        artifact, lambda m: m.update(major=FORMAT_MAJOR + 1, k3c_version="9.1.0", shiny="new")
    )
    line = refused()
    assert f"k3c-artifact {FORMAT_MAJOR + 1}, this k3c reads {FORMAT_MAJOR}" in line
    assert "9.1.0" in line


@pytest.mark.parametrize("field", ["k3c_version", "toolchain", "cache", "space_bytes"])
def test_a_manifest_without_a_field(artifact, refused, field):
    """AR03: the missing field is named."""
    edit_manifest(artifact, lambda m: m.pop(field))
    assert f"field {field} is missing" in refused()


def test_a_size_of_the_wrong_type(artifact, refused):
    edit_manifest(artifact, lambda m: m["space_bytes"].update(arena="many"))
    assert "space_bytes" in refused()


@pytest.mark.parametrize("verb", VERBS[1:], ids=lambda v: v[0])
def test_a_machine_without_the_needed_features(artifact, refuse, verb):
    """AR01: both sides are named, and what to do."""
    edit_manifest(artifact, lambda m: m["target"].update(arch="sparc64"))
    name, *rest = verb
    line = refuse(4, "ArtifactError", name, artifact, *rest)
    assert "sparc64" in line
    assert "x86_64" in line
    assert "compile" in line


def test_a_directory_that_is_no_artifact(refuse, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens.json").write_text("[[1]]")
    for folder in (tmp_path, tmp_path / "nowhere"):
        for verb, *rest in VERBS:
            line = refuse(4, "ArtifactError", verb, folder, *rest)
            assert str(folder) in line
