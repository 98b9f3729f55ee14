"""`k3c pack`: the weights of one rank, streamed from the checkpoint into the artifact's layout.

The file grows under a temporary name, beside a journal with the hash of every 16 MiB that are
done. A run that was killed goes on after the last of them that is still right. At most one weight
is held in memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from k3c.artifact import PART_BYTES, Manifest, Member, WeightEntry, to_json
from k3c.artifact_dir import PLACEMENT_FILE, check_hash, read_manifest
from k3c.artifact_ranks import rank_count
from k3c.artifact_writer import MemberWriter, WeightsWriter, disk_faults
from k3c.console import Console
from k3c.errors import CheckpointError, ConfigError
from k3c.files import write_text
from k3c.model.checkpoint import Checkpoint
from k3c.model.config import config_digest, load_config
from k3c.placement.placement import Placement, placement_from_json
from k3c.rank_weights import RankWeights, artifact_digest, note_path, weights_path
from k3c.weights import WeightPacker


def pack(model: Path, directory: Path, rank: int, console: Console) -> RankWeights:
    """Pack the weights of one rank; what an earlier run has done is not repeated.

    Args:
        model: The checkpoint that the artifact was compiled for.
        directory: The artifact.
        rank: Whose weights.
        console: Shows the progress.

    Raises:
        ArtifactError: The artifact is damaged or foreign.
        CheckpointError: The checkpoint is damaged, or of another model; nothing is written then.
        ConfigError: There is no such rank, it is packed already, or another run packs it.
        DeviceFault: The disk is full.
    """
    manifest = read_manifest(directory)
    _check_rank(manifest, directory, rank)
    checkpoint = _checkpoint_of(model, manifest)
    path, note = weights_path(directory, rank), note_path(directory, rank)
    part, journal = (p.with_name(f"{p.name}.part") for p in (path, note))
    with disk_faults(path), console.phase(f"weights of rank {rank}"):
        path.parent.mkdir(exist_ok=True)
        with _locked(part) as file:
            counter = console.count(path.name, manifest.space_bytes["weights"])
            placement = read_placement(directory, manifest)
            packer = WeightPacker(checkpoint, manifest.mesh, rank, counter.add, placement)
            member = _write(manifest, packer, file, journal)
            part.rename(path)
        made = RankWeights(rank, artifact_digest(directory), member)
        write_text(note, to_json(made))
        journal.unlink(missing_ok=True)
    return made


def read_placement(directory: Path, manifest: Manifest) -> Placement | None:
    """Return which experts every rank of an artifact holds; None: no map says it."""
    if PLACEMENT_FILE not in manifest.members:
        return None
    path = directory / PLACEMENT_FILE
    check_hash(path, PLACEMENT_FILE, manifest.members[PLACEMENT_FILE])
    return placement_from_json(path.read_text(encoding="utf-8"), str(path))


def _check_rank(manifest: Manifest, directory: Path, rank: int) -> None:
    count = rank_count(manifest.mesh)
    if not 0 <= rank < count:
        raise ConfigError(f"rank {rank} of {count}", "--rank", f"take one of 0..{count - 1}")
    if manifest.model.has_weights:
        raise ConfigError("the artifact has its weights already", str(directory))
    note = note_path(directory, rank)
    if note.exists():
        raise ConfigError(f"rank {rank} is packed already", str(note), "remove it to pack again")


def _checkpoint_of(model: Path, manifest: Manifest) -> Checkpoint:
    """Open a checkpoint, whose every tensor is checked against its config by that."""
    config = load_config(model)
    found = config_digest(config)
    if found != manifest.model.config_sha256:
        expected = manifest.model.config_sha256[:12]
        what = f"the config has digest {found[:12]}, the artifact's has {expected}"
        raise CheckpointError(what, str(model), "pack the model that was compiled")
    return Checkpoint(model, config)


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that only this process writes.

    Raises:
        ConfigError: Another one does.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with os.fdopen(handle, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("another run packs this rank", str(path)) from None
        yield file


def _write(manifest: Manifest, packer: WeightPacker, file: IO[bytes], journal: Path) -> Member:
    """Write what is missing of a file and return its `Member`."""
    total_bytes = manifest.space_bytes["weights"]
    done = _good_parts(file, journal)
    file.seek(len(done) * PART_BYTES)
    file.truncate()
    with journal.open("w") as lines:
        lines.writelines(f"{digest.hex()}\n" for digest in done)
        lines.flush()

        def note(digest: bytes) -> None:
            # First the bytes, then that they are there.
            file.flush()
            os.fsync(file.fileno())
            lines.write(f"{digest.hex()}\n")
            lines.flush()

        in_parts = total_bytes > PART_BYTES
        member = MemberWriter(file, in_parts, done, note)
        out = WeightsWriter(member, total_bytes)
        packer.write(_left(manifest.weights, out.position), out)
        return out.close()


def _left(entries: Sequence[WeightEntry], position: int) -> list[WeightEntry]:
    """Return the weights that are not wholly written before a position."""
    return [entry for entry in entries if entry.offset + entry.nbytes > position]


def _good_parts(file: IO[bytes], journal: Path) -> list[bytes]:
    """Return the hashes of the parts, from the first on, that are there and right."""
    done: list[bytes] = []
    for line in journal.read_text().splitlines() if journal.is_file() else ():
        data = file.read(PART_BYTES)
        digest = hashlib.sha256(data).digest()
        if len(data) < PART_BYTES or digest.hex() != line.strip():
            break
        done.append(digest)
    return done
