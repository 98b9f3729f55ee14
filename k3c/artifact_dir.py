"""Reads the directory that is an artifact, and trusts nothing in it.

Names, kinds, sizes and hashes of all files are checked before anything uses them. `artifact_writer`
writes it:

    manifest.json            table of contents, with size and sha256 of every other file
    plans/<bucket>.json      one `Plan` per bucket
    weights.safetensors      one U8 tensor; data start at byte 4096, to be mapped in place
    kernels.so               kernels and entry functions
    lib/*.so                 the C libraries that kernels call
    tokenizer/*              the model's tokenizer files, where it has them
    ir/NN-<pass>.k3          the IR after each pass
    passes.json              matches and refusals of each pass
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from k3c.artifact import (
    FORMAT,
    FORMAT_MAJOR,
    PART_BYTES,
    WEIGHTS_DATA_START,
    Manifest,
    Member,
    Plan,
    from_json,
)
from k3c.errors import ArtifactError

MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "weights.safetensors"
KERNELS_FILE = "kernels.so"
KERNELS_FOLDER = "kernels"
CANDIDATES_FILE = "candidates.json"
LIBRARY_FOLDER = "lib"
TOKENIZER_FOLDER = "tokenizer"
PASSES_FILE = "passes.json"
PLACEMENT_FILE = "placement.json"  # which experts every rank holds, where a map says it
MAX_JSON_BYTES = 64 << 20  # a manifest of all of K3 is under 4 MiB
QUICK_WEIGHTS_BYTES = 1 << 30  # "quick" hashes weights up to this size: about a second
MEMBER_NAME = re.compile(r"[a-z0-9_-][a-z0-9_.-]*(/[a-z0-9_-][a-z0-9_.-]*)*")
# What `k3c pack` adds to an artifact of several ranks; see `k3c/rank_weights.py`.
RANK_WEIGHTS = re.compile(r"weights/rank-\d{3,}\.(safetensors|json)(\.part)?")
Verify = Literal["full", "quick"]

_AGAIN = "the artifact is damaged or foreign; compile again"


def plan_file(bucket: str) -> str:
    """Return the member that holds a bucket's plan."""
    return f"plans/{bucket}.json"


def weights_header(nbytes: int) -> bytes:
    """Return the first 4096 bytes of a weights file: one U8 tensor called `weights`."""
    tensor = {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}
    text = json.dumps({"weights": tensor}, sort_keys=True).encode()
    size = WEIGHTS_DATA_START - 8
    assert len(text) <= size, f"weights header has {len(text)} bytes, limit {size}"
    return size.to_bytes(8, "little") + text.ljust(size)


def member_of_parts(nbytes: int, digests: Sequence[bytes]) -> Member:
    """Return the entry of a file whose parts have these sha256 digests, in order."""
    whole = hashlib.sha256(b"".join(digests)).hexdigest()
    return Member(nbytes, whole, tuple(digest.hex() for digest in digests))


def check_digest(name: str, member: Member, part: int, found: str) -> None:
    """Compare the sha256 of one part of a member with the manifest's.

    Args:
        name: The member.
        member: Its entry in the manifest.
        part: Which part.
        found: The part's sha256.

    Raises:
        ArtifactError: They differ.
    """
    if found != member.parts[part]:
        first = part * PART_BYTES
        last = min(first + PART_BYTES, member.nbytes)
        what = f"bytes {first} to {last} have a sha256 that starts {found[:12]}"
        raise ArtifactError(f"{what}, the manifest says {member.parts[part][:12]}", name, _AGAIN)


def read_manifest(directory: Path) -> Manifest:
    """Read the table of contents; no other file is opened.

    Args:
        directory: The artifact.

    Raises:
        ArtifactError: There is none, or it is too large, foreign, newer, or breaks a rule.
    """
    path = directory / MANIFEST_FILE
    if not directory.is_dir():
        raise ArtifactError("no such artifact directory", str(directory), "run k3c compile first")
    text = _read_text(path)
    _check_format(text, str(path))
    manifest = from_json(Manifest, text, str(path))
    check_manifest(manifest, str(path))
    return manifest


def read_plan(directory: Path, bucket: str) -> Plan:
    """Read a bucket's plan.

    Args:
        directory: The artifact; `verify` has checked its members.
        bucket: A bucket of its manifest.

    Raises:
        ArtifactError: It is missing, too large, or not a plan.
    """
    path = directory / plan_file(bucket)
    return from_json(Plan, _read_text(path), str(path))


def read_pass_report(directory: Path) -> list[dict[str, Any]]:
    """Read what the passes did: one object a pass, for people and reports, not for the runtime.

    Raises:
        ArtifactError: It is missing, too large, or not JSON.
    """
    path = directory / PASSES_FILE
    try:
        return json.loads(_read_text(path))
    except (ValueError, RecursionError) as exc:
        raise ArtifactError(f"not valid JSON: {exc}", str(path), _AGAIN) from exc


def is_hashed(name: str, member: Member, mode: Verify) -> bool:
    """Return whether a mode of `verify` hashes a member: "quick" all but weights over 1 GiB."""
    return mode == "full" or name != WEIGHTS_FILE or member.nbytes <= QUICK_WEIGHTS_BYTES


def verify(
    directory: Path, manifest: Manifest, mode: Verify = "full", later: Collection[str] = ()
) -> None:
    """Check every file of an artifact.

    Args:
        directory: The artifact.
        manifest: Its table of contents, from `read_manifest`.
        mode: "full" hashes every member; "quick" all but weights over 1 GiB.
        later: Members whose hash the caller checks when it reads them.

    Raises:
        ArtifactError: A file is missing, not a member, not a regular file, or differs.
    """
    found = dict(_files(directory, ""))
    for name in sorted(found.keys() - manifest.members.keys() - {MANIFEST_FILE}):
        if RANK_WEIGHTS.fullmatch(name) and not manifest.model.has_weights:
            continue  # checked by whoever reads it
        raise ArtifactError("a file that the manifest does not list", name, _AGAIN)
    for name, member in sorted(manifest.members.items()):
        if name not in found:
            raise ArtifactError("a member is missing", name, _AGAIN)
        if found[name] != member.nbytes:
            what = f"a member has {found[name]} bytes, the manifest says {member.nbytes}"
            raise ArtifactError(what, name, _AGAIN)
        if name not in later and is_hashed(name, member, mode):
            check_hash(directory / name, name, member)
    if manifest.model.has_weights:
        _check_weights(directory, manifest)


def check_manifest(manifest: Manifest, where: str) -> None:
    """Check what a manifest says against itself: names of members, and that all it names is there.

    Raises:
        ArtifactError: A name is not allowed, or a plan, kernel or the weights are not members.
    """
    for name, member in manifest.members.items():
        if not MEMBER_NAME.fullmatch(name) or name == MANIFEST_FILE:
            raise ArtifactError(f"member name {name[:80]!r} is not allowed", where, _AGAIN)
        _check_member_parts(name, member, where)
    buckets = [bucket.name for bucket in manifest.buckets]
    if len(set(buckets)) != len(buckets):
        raise ArtifactError("two buckets have one name", where, _AGAIN)
    needed = [*map(plan_file, buckets), *(k.binary for k in manifest.kernels)]
    needed += [WEIGHTS_FILE] if manifest.model.has_weights else []
    for name in needed:
        if name not in manifest.members:
            raise ArtifactError(f"{name[:80]!r} is needed, but is not a member", where, _AGAIN)


def _check_format(text: str, where: str) -> None:
    """Refuse what is not ours, by name, before its fields are looked at."""
    try:
        raw: Any = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ArtifactError(f"not valid JSON: {exc}", where, _AGAIN) from exc
    found = raw.get("format") if isinstance(raw, dict) else None
    if found != FORMAT:
        what = f"format is {str(found)[:80]!r}, expected {FORMAT!r}"
        raise ArtifactError(what, where, "this is not an artifact that k3c wrote")
    if "major" in raw and raw["major"] != FORMAT_MAJOR:
        what = f"format {FORMAT} {str(raw['major'])[:20]}, this k3c reads {FORMAT_MAJOR}"
        version = str(raw.get("k3c_version", "unknown"))[:40]
        raise ArtifactError(what, where, f"use k3c {version}, which wrote it, or compile again")


def _files(directory: Path, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield the name and size of every file; anything but folders and files is refused."""
    with os.scandir(directory) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        name = prefix + entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _files(directory / entry.name, f"{name}/")
            continue
        info = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(info.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(info.st_mode) else "not a regular file"
            raise ArtifactError(f"{kind} is not allowed", name, _AGAIN)
        yield name, info.st_size


def _read_text(path: Path) -> str:
    """Read a JSON member without following a link, never more than the limit."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise ArtifactError("not a regular file", str(path), _AGAIN)
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as exc:
        raise ArtifactError(f"cannot be read: {exc.strerror}", str(path), _AGAIN) from exc
    if len(data) > MAX_JSON_BYTES:
        size = max(info.st_size, len(data))
        raise ArtifactError(f"has {size} bytes, limit {MAX_JSON_BYTES}", str(path), _AGAIN)
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise ArtifactError(f"is not UTF-8: {exc.reason}", str(path), _AGAIN) from exc


def check_hash(path: Path, name: str, member: Member) -> None:
    """Hash a file, and hold it against what is said of it.

    Raises:
        ArtifactError: They differ, or it cannot be read.
    """
    try:
        if member.parts:
            _check_parts(path, name, member)
            return
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise ArtifactError(f"cannot be read: {exc.strerror}", name, _AGAIN) from exc
    if found != member.sha256:
        what = f"a member's sha256 starts {found[:12]}, the manifest says {member.sha256[:12]}"
        raise ArtifactError(what, name, _AGAIN)


def _check_parts(path: Path, name: str, member: Member) -> None:
    """Hash the parts of a member on all cores: hashing and reading let other threads run."""
    with path.open("rb") as file, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:

        def check(index: int) -> None:
            data = os.pread(file.fileno(), PART_BYTES, index * PART_BYTES)
            check_digest(name, member, index, hashlib.sha256(data).hexdigest())

        for _ in pool.map(check, range(len(member.parts))):
            pass


def _check_member_parts(name: str, member: Member, where: str) -> None:
    digests = [bytes.fromhex(part) for part in member.parts]
    expected = member_of_parts(member.nbytes, digests)
    if member.parts and (expected != member or len(digests) != -(-member.nbytes // PART_BYTES)):
        what = f"{name}: its {len(digests)} part hashes do not make up its {member.nbytes} bytes"
        raise ArtifactError(what, where, _AGAIN)


def file_bytes(manifest: Manifest) -> int:
    """Return the size of a file of packed weights: its header and space weights."""
    return WEIGHTS_DATA_START + manifest.space_bytes.get("weights", 0)


def _check_weights(directory: Path, manifest: Manifest) -> None:
    """Check that the file holds space weights exactly, where a map of it expects the data."""
    nbytes = manifest.space_bytes.get("weights", 0)
    found = manifest.members[WEIGHTS_FILE].nbytes - WEIGHTS_DATA_START
    if found != nbytes:
        what = f"{found} bytes of weights, the plans have {nbytes}"
        raise ArtifactError(what, WEIGHTS_FILE, _AGAIN)
    with (directory / WEIGHTS_FILE).open("rb") as file:
        if file.read(WEIGHTS_DATA_START) != weights_header(nbytes):
            raise ArtifactError("the header is not the one k3c writes", WEIGHTS_FILE, _AGAIN)
