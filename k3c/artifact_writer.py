"""Writes an artifact: a temporary directory beside the destination, renamed when it is complete.

A reader never sees half an artifact, and the bytes depend on the content alone.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO

from k3c.artifact import PART_BYTES, WEIGHTS_DATA_START, Manifest, Member, Plan, to_json
from k3c.artifact_dir import (
    MANIFEST_FILE,
    MAX_JSON_BYTES,
    MEMBER_NAME,
    WEIGHTS_FILE,
    check_manifest,
    member_of_parts,
    plan_file,
    weights_header,
)
from k3c.errors import ConfigError, DeviceFault
from k3c.files import umask

_CHUNK_BYTES = 1 << 22
_FULL = (errno.ENOSPC, errno.EDQUOT)


class MemberWriter:
    """Writes one member in order, hashing as it goes; made by `ArtifactWriter`."""

    def __init__(
        self,
        file: IO[bytes],
        in_parts: bool = False,
        done: Sequence[bytes] = (),
        on_part: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """Start, or go on behind some parts.

        Args:
            file: Where to write, at its place.
            in_parts: Hash every `PART_BYTES` on their own.
            done: The hashes of the parts that are in the file already.
            on_part: Called with the hash of each whole part that was written.
        """
        self._file, self._in_parts, self._on_part = file, in_parts, on_part
        self._hash = hashlib.sha256()
        self._parts = list(done)
        self.nbytes = len(done) * PART_BYTES

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        if not memoryview(data).nbytes:
            return
        view = memoryview(data).cast("B")
        self._file.write(view)
        while self._in_parts and len(view) >= (left := PART_BYTES - self.nbytes % PART_BYTES):
            self._hash.update(view[:left])
            self._end_part()
            self._on_part(self._parts[-1])
            view, self.nbytes = view[left:], self.nbytes + left
        self._hash.update(view)
        self.nbytes += len(view)

    def close(self) -> Member:
        """Flush the file to the disk and return its size and hash."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if not self._in_parts:
            return Member(self.nbytes, self._hash.hexdigest())
        if self.nbytes % PART_BYTES:
            self._end_part()
        return member_of_parts(self.nbytes, self._parts)

    def _end_part(self) -> None:
        self._parts.append(self._hash.digest())
        self._hash = hashlib.sha256()

    def abandon(self) -> None:
        """Close the file without recording it."""
        # Closing flushes: on a full disk that fails again, and the first failure is to be told.
        with suppress(OSError):
            self._file.close()


class WeightsWriter:
    """Streams packed weights in ascending order of offset; gaps become zero bytes."""

    def __init__(self, member: MemberWriter, total_bytes: int) -> None:
        self._member, self._total_bytes = member, total_bytes
        if not member.nbytes:
            member.write(weights_header(total_bytes))
        self._resumed_at = self.position

    @property
    def position(self) -> int:
        """Next data byte, counted from the start of space weights."""
        return self._member.nbytes - WEIGHTS_DATA_START

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Write one packed weight.

        Args:
            offset: Its first byte in space weights; not before `position`, but where an earlier
                run has written a part of it.
            data: u8[...], its packed bytes.
        """
        written = max(0, self.position - offset)
        assert not written or self.position == self._resumed_at, (
            f"weight at {offset}, {self.position} is written already"
        )
        self._fill(offset)
        self._member.write(memoryview(data).cast("B")[written:])
        assert self.position <= self._total_bytes, f"{self.position} B, planned {self._total_bytes}"

    def close(self) -> Member:
        """Fill to the planned size and return the member's size and hash."""
        self._fill(self._total_bytes)
        return self._member.close()

    def _fill(self, offset: int) -> None:
        while self.position < offset:
            self._member.write(bytes(min(offset - self.position, _CHUNK_BYTES)))


class ArtifactWriter:
    """Makes an artifact; use as a context manager and end with `finish`.

    Whatever ends the block before `finish` removes everything written; a full disk becomes a
    `DeviceFault`.
    """

    def __init__(self, destination: Path) -> None:
        """Check the destination; nothing is written yet.

        Raises:
            ConfigError: The destination exists, or its parent does not.
        """
        self.destination = destination
        self._members: dict[str, Member] = {}
        self._open: list[MemberWriter] = []
        self._refuse_existing()
        if not destination.parent.is_dir():
            what = "the folder to make the artifact in does not exist"
            raise ConfigError(what, str(destination.parent), "make it first")

    def __enter__(self) -> ArtifactWriter:
        with disk_faults(self.destination):
            parent = self.destination.parent
            self._root = Path(tempfile.mkdtemp(prefix=f".{self.destination.name}.", dir=parent))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for member in self._open:
            member.abandon()
        # Gone already where `finish` renamed it.
        shutil.rmtree(self._root, ignore_errors=True)
        if isinstance(exc, OSError) and exc.errno in _FULL:
            raise _full_disk(exc, self.destination) from exc

    def add_bytes(self, name: str, data: bytes) -> None:
        """Add a member."""
        member = self._start(name)
        member.write(data)
        self._members[name] = member.close()

    def add_text(self, name: str, text: str) -> None:
        """Add a member of UTF-8 text."""
        self.add_bytes(name, text.encode())

    def add_file(self, name: str, source: Path) -> None:
        """Add a copy of a file."""
        member = self._start(name)
        with source.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                member.write(chunk)
        self._members[name] = member.close()

    def add_plan(self, plan: Plan) -> None:
        """Add a bucket's plan."""
        self.add_text(plan_file(plan.bucket.name), to_json(plan))

    def start_weights(self, total_bytes: int) -> WeightsWriter:
        """Begin the weights file; end it with `end_weights`."""
        in_parts = total_bytes > PART_BYTES
        return WeightsWriter(self._start(WEIGHTS_FILE, in_parts), total_bytes)

    def end_weights(self, writer: WeightsWriter) -> None:
        """Record the finished weights file."""
        self._members[WEIGHTS_FILE] = writer.close()

    def finish(self, manifest: Manifest) -> Manifest:
        """Write the manifest last, and rename the directory into place.

        Args:
            manifest: Its `members` are replaced by what was added.

        Returns:
            The manifest as written.

        Raises:
            ConfigError: The destination has come to exist meanwhile.
        """
        done = replace(manifest, members=dict(sorted(self._members.items())))
        check_manifest(done, str(self.destination))
        self._write_manifest(to_json(done))
        self._refuse_existing()
        # mkdtemp makes the directory private; an artifact is as public as its owner's umask says.
        self._root.chmod(0o777 & ~umask())
        for folder in (self._root, *(p for p in self._root.rglob("*") if p.is_dir())):
            _sync(folder)
        self._root.rename(self.destination)
        _sync(self.destination.parent)
        return done

    def _write_manifest(self, text: str) -> None:
        data = text.encode()
        assert len(data) <= MAX_JSON_BYTES, f"manifest has {len(data)} B, limit {MAX_JSON_BYTES}"
        member = self._create(MANIFEST_FILE)
        member.write(data)
        member.close()

    def _start(self, name: str, in_parts: bool = False) -> MemberWriter:
        assert MEMBER_NAME.fullmatch(name), f"member name {name!r} is not allowed"
        assert name not in (MANIFEST_FILE, *self._members), f"member {name} is added twice"
        return self._create(name, in_parts)

    def _create(self, name: str, in_parts: bool = False) -> MemberWriter:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        member = MemberWriter(path.open("xb"), in_parts)
        self._open.append(member)
        return member

    def _refuse_existing(self) -> None:
        # lexists, so that a dangling link counts too.
        if os.path.lexists(self.destination):
            raise ConfigError("output exists", str(self.destination), "remove it or name another")


def _full_disk(exc: OSError, destination: Path) -> DeviceFault:
    what = f"the disk is full: {exc.strerror}"
    return DeviceFault(what, str(destination), "free space; nothing was left behind")


@contextmanager
def disk_faults(destination: Path) -> Iterator[None]:
    """Turn what a disk refuses into an error that says so.

    Raises:
        ConfigError: The folder may not be written.
        DeviceFault: The disk is full or fails.
    """
    try:
        yield
    except PermissionError as exc:
        raise ConfigError("the folder may not be written", str(destination.parent)) from exc
    except OSError as exc:
        if exc.errno in _FULL:
            raise _full_disk(exc, destination) from exc
        raise DeviceFault(f"cannot write: {exc.strerror}", str(destination.parent)) from exc


def _sync(folder: Path) -> None:
    """Put a directory's own entries on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
