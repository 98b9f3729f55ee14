"""Fit the time of each implementation of a collective to public measurements.

    us = latency[device class] + per_peer x (ranks - 1) + steps x hop + wire bytes / (share x rate)

`latency`, `per_peer` and `share` (of the link's rate that an implementation reaches) are fitted by
least squares of relative errors to the rows of `measured/collectives.toml`; none is written down by
hand. A class of devices differs from the mean of all by as much as its rows show: few rows pull it
less. `left_out` predicts each row by a fit that has not seen it.

Source: the rows name theirs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

ROWS = Path(__file__).parent / "measured" / "collectives.toml"

# Implementations whose latency grows with the number of ranks: each waits for all others in turn.
PER_PEER = frozenset({"one_shot", "two_shot", "nvls", "one_sided"})
# How sure a row is (relative), and how far a class may well be from the mean of all classes: its
# latency in microseconds, its data time in units of the time at the link's full rate. They only say
# how strongly few rows are pulled towards the mean.
ROW_SIGMA, LATENCY_SIGMA_US, DATA_SIGMA = 0.1, 4.0, 1.0


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        kind: The collective.
        implementation: How it was done.
        target: The device that it was measured on.
        ranks: Ranks of the group.
        hosts: Hosts that a network connects; 1 inside an NVLink or xGMI domain.
        nbytes: Bytes of the whole tensor; of what a rank sends, for dispatch and combine.
        us: Time, microseconds.
        role: `fit`: the model is fitted to it; `check`: the model only predicts it; `kept`: data
            without a model.
        source: Who measured it, with what.
        gbs: What the link of a rank carries, GB/s.
        hop_us: Time of one hop of that link, microseconds.
    """

    kind: str
    implementation: str
    target: str
    ranks: int
    hosts: int
    nbytes: int
    us: float
    role: Literal["fit", "check", "kept"]
    source: str
    gbs: float
    hop_us: float

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends (or takes in, whichever is more)."""
        if self.kind in ("dispatch", "combine"):
            return float(self.nbytes)
        return wire_bytes(self.implementation, self.ranks, self.nbytes)


@dataclass(frozen=True)
class Model:
    """What a fit found for one implementation.

    Attributes:
        latency_us: Time of an empty collective less what grows with the ranks, by device class.
        per_peer_us: What each further rank adds, microseconds.
        share: Share of the link's rate that is reached, by device class.
        error: Largest relative error of a row that was left out of its fit.
        rows: The rows that it was fitted to.
    """

    latency_us: Mapping[str, float]
    per_peer_us: float
    share: Mapping[str, float]
    error: float
    rows: tuple[Row, ...]

    def latency(self, device: str, ranks: int) -> float:
        """Return the time without data, microseconds; of the mean device where it has no row."""
        known = self.latency_us
        base = known.get(device, sum(known.values()) / len(known))
        return base + self.per_peer_us * (ranks - 1)

    def share_of(self, device: str) -> float:
        """Return the share of a link's rate; the lowest known where the device has no row."""
        return self.share.get(device, min(self.share.values()))

    def max_ranks(self, device: str) -> int:
        """Return the most ranks that it was measured on with this class; 0 where on none."""
        return max((r.ranks for r in self.rows if device_class(r.target) == device), default=0)


def device_class(name: str) -> str:
    """Return the class of a device: those of one share their kernels and their generation of links.

    Args:
        name: A target's name.
    """
    for prefix, found in (("h", "hopper"), ("b", "blackwell"), ("gb", "blackwell")):
        if name.startswith(prefix):
            return found
    return "cdna4" if name.startswith("mi35") else "other"


def wire_bytes(implementation: str, ranks: int, nbytes: int) -> float:
    """Return the bytes of an all-reduce that one rank sends or takes in, whichever is more.

    Args:
        implementation: How it is done.
        ranks: Ranks of the group.
        nbytes: Bytes of the tensor.
    """
    others = ranks - 1
    return (
        nbytes
        * {
            "one_shot": others,
            "two_shot": 2 * others / ranks,
            "ring": 2 * others / ranks,
            "tree": 2.0,
            # The switches add and copy: a rank sends all of it once, and its part of the sum once.
            "nvls": 1 + 1 / ranks,
            # One write leaves a rank, but those of all others arrive.
            "nvls_one_shot": others,
        }[implementation]
    )


@cache
def rows() -> tuple[Row, ...]:
    """Return all public measurements, in the order of the file."""
    data = tomllib.loads(ROWS.read_text(encoding="utf-8"))
    links = data["link"]
    return tuple(
        Row(
            series["kind"],
            series["implementation"],
            series["target"],
            series["ranks"],
            series.get("hosts", 1),
            nbytes,
            us,
            series["role"],
            series["source"],
            links[series["target"]]["gbs"],
            links[series["target"]]["us"],
        )
        for series in data["series"]
        for nbytes, us in series["points"]
    )


@cache
def models() -> Mapping[str, Model]:
    """Return the fitted model of each implementation that has rows of role `fit`."""
    used = [row for row in rows() if row.role == "fit"]
    names = sorted({row.implementation for row in used})
    return {name: _fitted(tuple(r for r in used if r.implementation == name)) for name in names}


def left_out(used: Sequence[Row]) -> list[tuple[Row, float]]:
    """Return each row of one implementation with the time that a fit without it predicts, us."""
    return [(row, predict(fit([r for r in used if r is not row]), row)) for row in used]


def predict(model: Model, row: Row) -> float:
    """Return what a model says of a row's collective inside one domain, microseconds."""
    device = device_class(row.target)
    data_us = row.wire_bytes / (model.share_of(device) * row.gbs * 1e3)
    return model.latency(device, row.ranks) + _steps_us(row) + data_us


def fit(used: Sequence[Row]) -> Model:
    """Return the model of some rows of one implementation; its error is left at 0."""
    classes = sorted({device_class(row.target) for row in used})
    peers = ["peer"] if used[0].implementation in PER_PEER else []
    columns = ["latency", *peers, "data"]
    columns += [f"{word} {name}" for word in ("latency", "data") for name in classes]
    found = _solve([_features(row) for row in used], columns, used)
    slopes = {name: found["data"] + found[f"data {name}"] for name in classes}
    return Model(
        {name: max(0.0, found["latency"] + found[f"latency {name}"]) for name in classes},
        max(0.0, found.get("peer", 0.0)),
        {name: 1 / max(1.0, slope) for name, slope in slopes.items()},
        0.0,
        tuple(used),
    )


def _fitted(used: tuple[Row, ...]) -> Model:
    model = fit(used)
    error = max(abs(us / row.us - 1) for row, us in left_out(used))
    return Model(model.latency_us, model.per_peer_us, model.share, error, used)


def _steps_us(row: Row) -> float:
    """Return the hops of a ring one after another, which are known and not fitted."""
    return 2 * (row.ranks - 1) * row.hop_us if row.implementation == "ring" else 0.0


def _features(row: Row) -> dict[str, float]:
    device = device_class(row.target)
    data_us = row.wire_bytes / (row.gbs * 1e3)
    return {
        "latency": 1.0,
        f"latency {device}": 1.0,
        "peer": float(row.ranks - 1),
        "data": data_us,
        f"data {device}": data_us,
    }


def _solve(
    features: Sequence[Mapping[str, float]], columns: Sequence[str], used: Sequence[Row]
) -> dict[str, float]:
    """Return the least squares of relative errors, classes being pulled to their mean."""
    table = [
        [f.get(c, 0.0) / row.us for c in columns] for f, row in zip(features, used, strict=True)
    ]
    right = [1 - _steps_us(row) / row.us for row in used]
    for index, column in enumerate(columns):
        word, _, name = column.partition(" ")
        if name:
            sigma = LATENCY_SIGMA_US if word == "latency" else DATA_SIGMA
            table.append([ROW_SIGMA / sigma if i == index else 0.0 for i in range(len(columns))])
            right.append(0.0)
    return dict(zip(columns, _normal_equations(table, right), strict=True))


def _normal_equations(table: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Solve A'A x = A'b by elimination; the tables have a dozen rows and five columns."""
    size = len(table[0])
    rows_ = [
        [sum(r[i] * r[j] for r in table) for j in range(size)]
        + [sum(r[i] * b for r, b in zip(table, right, strict=True))]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows_[r][i]))
        rows_[i], rows_[pivot] = rows_[pivot], rows_[i]
        for r in range(size):
            if r != i and rows_[i][i]:
                ratio = rows_[r][i] / rows_[i][i]
                rows_[r] = [a - ratio * b for a, b in zip(rows_[r], rows_[i], strict=True)]
    return [row[-1] / row[i] if row[i] else 0.0 for i, row in enumerate(rows_)]
