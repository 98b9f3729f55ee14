"""The weights of one rank beside an artifact of several: names, and what says they belong to it.

    weights/rank-003.safetensors   one U8 tensor, as `weights.safetensors` of one rank alone
    weights/rank-003.json          its `RankWeights`, written last: without it there are none

While they are made, `.part` stands behind their names. Both are made by `k3c pack`; the manifest
does not list them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from k3c.artifact import Manifest, Member, from_json
from k3c.artifact_dir import MANIFEST_FILE, file_bytes, member_of_parts
from k3c.errors import ArtifactError

FOLDER = "weights"
_AGAIN = "remove both files and run k3c pack again"


@dataclass(frozen=True)
class RankWeights:
    """What a file of packed weights is.

    Attributes:
        rank: Whose weights.
        artifact: The sha256 of the manifest that they were packed for.
        member: Size and hashes of the file.
    """

    rank: int
    artifact: str
    member: Member


def weights_path(directory: Path, rank: int) -> Path:
    """Return where the weights of a rank lie."""
    return directory / FOLDER / f"rank-{rank:03}.safetensors"


def note_path(directory: Path, rank: int) -> Path:
    """Return where their `RankWeights` lies."""
    return directory / FOLDER / f"rank-{rank:03}.json"


def artifact_digest(directory: Path) -> str:
    """Return the sha256 of an artifact's manifest, which names everything else by its hash."""
    return hashlib.sha256((directory / MANIFEST_FILE).read_bytes()).hexdigest()


def read_rank_weights(directory: Path, manifest: Manifest, rank: int) -> RankWeights:
    """Read what is said of a rank's weights, and hold it against the artifact.

    Raises:
        ArtifactError: They are not there, of another artifact, or of another size.
    """
    path = note_path(directory, rank)
    if not path.is_file():
        what = f"the weights of rank {rank} are not packed"
        raise ArtifactError(what, str(path), f"k3c pack MODEL {directory} --rank {rank}")
    found = from_json(RankWeights, path.read_text(), str(path))
    if found.rank != rank or found.artifact != artifact_digest(directory):
        what = f"these are weights of rank {found.rank} of artifact {found.artifact[:12]}"
        raise ArtifactError(f"{what}, not of this one", str(path), _AGAIN)
    return _checked(found, manifest, weights_path(directory, rank))


def _checked(found: RankWeights, manifest: Manifest, path: Path) -> RankWeights:
    there = path.stat().st_size if path.is_file() else -1
    expected = file_bytes(manifest)
    if not there == expected == found.member.nbytes:
        what = f"{there} bytes of packed weights, planned {expected}"
        raise ArtifactError(what, str(path), _AGAIN)
    digests = [bytes.fromhex(part) for part in found.member.parts]
    if digests and member_of_parts(found.member.nbytes, digests) != found.member:
        raise ArtifactError("the hashes of its parts do not make up the whole", str(path), _AGAIN)
    return found
