"""Where every byte of every space goes: data for `k3c inspect --memory`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from k3c.artifact import ALIGN_BYTES, SPACES, Plan, WeightEntry

Kind = Literal["used", "padding", "gap"]
KINDS: tuple[Kind, ...] = ("used", "padding", "gap")


@dataclass(frozen=True)
class Segment:
    """Bytes of one space with the same owners.

    Attributes:
        space: The space.
        offset: First byte.
        nbytes: Size in bytes.
        kind: `used`; `padding`: bytes that a weight's layout or an alignment adds; `gap`: nothing.
        owners: Who uses them; several in the arena, at different times. `kda_moe.w_in@3` is of
            layer 3.
    """

    space: str
    offset: int
    nbytes: int
    kind: Kind
    owners: tuple[str, ...]


@dataclass(frozen=True)
class _Piece:
    first: int
    last: int
    owner: str
    kind: Kind = "used"


def memory_report(plan: Plan, weights: Sequence[WeightEntry]) -> tuple[Segment, ...]:
    """Return segments that cover every byte of every space exactly once, in order.

    Args:
        plan: The plan of one bucket.
        weights: The manifest's weights, which know the padding of their layouts.
    """
    found: list[Segment] = []
    for space in SPACES:
        size = plan.space_bytes.get(space, 0)
        pieces = _weights(weights) if space == "weights" else list(_buffers(plan, space))
        found += _segments(space, size, pieces)
    return tuple(found)


def totals(segments: Sequence[Segment]) -> dict[str, dict[str, int]]:
    """Return bytes by space and kind; the kinds of a space sum to its size."""
    table: dict[str, dict[str, int]] = {space: dict.fromkeys(KINDS, 0) for space in SPACES}
    for segment in segments:
        table[segment.space][segment.kind] += segment.nbytes
    return table


def _weights(weights: Sequence[WeightEntry]) -> list[_Piece]:
    pieces: list[_Piece] = []
    for entry in weights:
        owner = f"{entry.name}@{entry.layer}" if entry.layer >= 0 else entry.name
        end = entry.offset + entry.nbytes
        pieces.append(_Piece(entry.offset, end - entry.padding_bytes, owner))
        if entry.padding_bytes:
            pieces.append(_Piece(end - entry.padding_bytes, end, owner, "padding"))
    return pieces


def _buffers(plan: Plan, space: str) -> Iterator[_Piece]:
    for b in plan.buffers:
        if b.space != space:
            continue
        if not b.per_layer:
            yield _Piece(b.offset, b.offset + b.nbytes, b.id)
            continue
        for call in plan.calls:
            if call.graph == b.graph:
                first = call.bases[space] + b.offset
                yield _Piece(first, first + b.nbytes, f"{b.id}@{call.layer}")


def _segments(space: str, size: int, pieces: Sequence[_Piece]) -> Iterator[Segment]:
    """Cut the space wherever a piece begins or ends."""
    cuts = {0, size, *(p.first for p in pieces), *(p.last for p in pieces)}
    edges = sorted(c for c in cuts if c <= size)
    starts = _by_edge(pieces, first=True)
    ends = _by_edge(pieces, first=False)
    # Insertion order is that of the pieces: reports are reproducible.
    live: dict[_Piece, None] = {}
    for first, last in pairwise(edges):
        for piece in ends.get(first, []):
            live.pop(piece, None)
        live |= dict.fromkeys(p for p in starts.get(first, []) if p.last > first)
        yield Segment(space, first, last - first, *_describe(list(live), first, last))


def _by_edge(pieces: Sequence[_Piece], first: bool) -> Mapping[int, list[_Piece]]:
    table: dict[int, list[_Piece]] = {}
    for piece in pieces:
        table.setdefault(piece.first if first else piece.last, []).append(piece)
    return table


def _describe(live: list[_Piece], first: int, last: int) -> tuple[Kind, tuple[str, ...]]:
    owners = tuple(piece.owner for piece in live)
    if not live:
        # What rounds a buffer up to the next cache line is alignment.
        aligned = last % ALIGN_BYTES == 0 and last - first < ALIGN_BYTES
        return ("padding" if aligned else "gap"), ()
    return ("padding" if all(p.kind == "padding" for p in live) else "used"), owners
