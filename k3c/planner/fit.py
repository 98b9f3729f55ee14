"""Fit measured launches: us = latency + floor / share, by least squares of relative errors.

`floor` is the time of a launch's bytes or operations, whichever is more, at the device's best;
`latency` is what it costs whatever it does, `share` what a long launch reaches of the best rate.
Its efficiency, floor / us, thus grows with the work of a launch, as measured ones do. The spread is
the root mean square of relative errors, each of a row that its fit has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

# A time that rounds to nothing has no relative error: the events measure 0.1 us.
LEAST_US = 0.1
# Fewer rows than this say nothing of the spread.
_FEW = 3
# Rows whose work differs by less than this factor cannot tell latency from share.
_LEVER = 4.0
# No kernel of a decode step whose rows can tell has more latency, microseconds.
_MOST_LATENCY_US = 10.0


@dataclass(frozen=True)
class Row:
    """A measured launch: its floor and its time, microseconds, and what was measured."""

    floor_us: float
    us: float
    source: str


@dataclass(frozen=True)
class Fit:
    """Launches of one kind.

    Attributes:
        latency_us: Time of a launch that does nothing, microseconds.
        share: What a long launch reaches of the device's best.
        spread: Relative error: the time lies between us / (1 + spread) and us x (1 + spread).
        rows: Measurements that it is fitted to.
    """

    latency_us: float
    share: float
    spread: float
    rows: int

    def us(self, floor_us: float) -> float:
        """Return the expected time of a launch, microseconds."""
        return self.latency_us + floor_us / self.share


@dataclass(frozen=True)
class _Sums:
    """What least squares needs of rows; those of one row can be taken out again."""

    oo: float
    of: float
    ff: float
    o: float
    f: float
    rows: int

    def minus(self, other: _Sums) -> _Sums:
        return _Sums(
            self.oo - other.oo, self.of - other.of, self.ff - other.ff,
            self.o - other.o, self.f - other.f, self.rows - other.rows,
        )  # fmt: skip

    def line(self) -> tuple[float, float]:
        """Return latency and slope, neither negative, with the least squares."""
        determinant = self.oo * self.ff - self.of * self.of
        if self.rows > 1 and determinant > 1e-9 * self.oo * self.ff:
            latency_us = (self.o * self.ff - self.f * self.of) / determinant
            slope = (self.f * self.oo - self.o * self.of) / determinant
            if latency_us >= 0 and slope > 0:
                return latency_us, slope
            if slope <= 0:
                # More work was not slower: it goes at the device's best, the rest is latency.
                return max(0.0, (self.o - self.of) / self.oo), 1.0
        return 0.0, self.f / self.ff if self.ff else 1.0


def fit(rows: Sequence[Row], parent: Fit | None = None) -> Fit:
    """Fit rows.

    Args:
        rows: At least one.
        parent: A fit of more kinds of launches. Where the rows' work hardly differs they cannot
            tell latency from share: then its share counts; and where they are too few to leave one
            out, its spread.
    """
    total = _sums(rows)
    floors = [row.floor_us for row in rows]
    if parent is not None and max(floors) < _LEVER * min(floors):
        latency_us, slope = _shifted(rows, parent)
    else:
        latency_us, slope = total.line()
    few = len(rows) < _FEW and parent is not None
    spread = parent.spread if few and parent is not None else _left_out(rows, total)
    return Fit(latency_us, 1 / slope, spread, len(rows))


def _shifted(rows: Sequence[Row], parent: Fit) -> tuple[float, float]:
    """Return latency and slope of rows whose work hardly differs.

    What they take beyond the parent's share is latency, up to the most that a launch may have; the
    rest is a smaller share.
    """
    weights = [1 / max(row.us, LEAST_US) ** 2 for row in rows]
    us, floor_us = (
        sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
        for values in ([row.us for row in rows], [row.floor_us for row in rows])
    )
    latency_us = min(max(0.0, us - floor_us / parent.share), _MOST_LATENCY_US, us)
    slope = (us - latency_us) / floor_us if floor_us else 1 / parent.share
    return (latency_us, slope) if slope > 0 else (us, 1 / parent.share)


def _sums(rows: Sequence[Row]) -> _Sums:
    pairs = [(1 / max(r.us, LEAST_US), r.floor_us / max(r.us, LEAST_US)) for r in rows]
    return _Sums(
        sum(a * a for a, _ in pairs), sum(a * b for a, b in pairs), sum(b * b for _, b in pairs),
        sum(a for a, _ in pairs), sum(b for _, b in pairs), len(pairs),
    )  # fmt: skip


def _left_out(rows: Sequence[Row], total: _Sums) -> float:
    """Return the root mean square of logarithmic errors of rows left out, as a relative error."""
    squares = 0.0
    for row in rows:
        latency_us, slope = total.minus(_sums([row])).line() if len(rows) > 1 else (0.0, 1.0)
        guess = max(latency_us + slope * row.floor_us, LEAST_US)
        squares += log(guess / max(row.us, LEAST_US)) ** 2
    return exp((squares / len(rows)) ** 0.5) - 1
