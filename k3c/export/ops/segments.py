"""Segments: which rows of a step belong to which request.

Segment s owns the consecutive rows `seg_start[s] .. seg_start[s] + seg_tokens[s] - 1`; the request
has `context[s]` tokens in its state already. Rows that no segment owns are padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """One live segment: its index, its rows and the tokens already in the state."""

    index: int
    rows: slice
    context: int

    @property
    def tokens(self) -> int:
        """Number of rows."""
        return self.rows.stop - self.rows.start


def live_segments(seg_start: Tensor, seg_tokens: Tensor, context: Tensor) -> Iterator[Segment]:
    """Yield the segments that own at least one row, in order."""
    triples = zip(seg_start.tolist(), seg_tokens.tolist(), context.tolist(), strict=True)
    for index, (start, tokens, seen) in enumerate(triples):
        if tokens > 0:
            yield Segment(index, slice(start, start + tokens), seen)
