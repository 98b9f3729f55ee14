"""Peers and k3c in one run: ours, theirs, ours again; the table, and a file for `perf/results/`.

`python -m perf.peers.run --peers out/peers --artifact W1=out/w1 --artifact W2=out/w1 -o rows.json`
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SECTION_LIMIT_S = 240
SECTIONS = ("gemm", "moe", "kda_decode", "kda_prefill", "mla_decode", "attn_res", "layer")
Row = Mapping[str, object]


@dataclass(frozen=True)
class Compared:
    """A row of ours beside the best peer of the same run, microseconds.

    Attributes:
        shape: What was measured.
        floor_us: Ours cannot be faster.
        ours_us: Median; the slower of the two runs.
        peer: Who the best peer is; several where the row is a sum.
        peer_us: Its median; None where no peer does it.
    """

    shape: str
    floor_us: float
    ours_us: float
    peer: str
    peer_us: float | None


def lines_of(command: Sequence[str], limit_s: float) -> list[Row]:
    """Run a measuring process and return its rows; what it printed before it failed counts."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            stdout=subprocess.PIPE,
            text=True,
            timeout=limit_s,
            check=False,
        )
        text, problem = done.stdout, f"exit {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        text, problem = (late.stdout or b"").decode(), f"no end after {limit_s} s"
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if problem:
        rows.append(
            {"op": command[0], "shape": " ".join(command[1:]), "peer": "", "error": problem}
        )
    return rows


def best_of(rows: Iterable[Row]) -> dict[tuple[str, str], tuple[str, float]]:
    """Return the fastest peer of each section and shape: name and median."""
    best: dict[tuple[str, str], tuple[str, float]] = {}
    for row in rows:
        if "median_us" not in row:
            continue
        key, found = (str(row["op"]), str(row["shape"])), float(str(row["median_us"]))
        if key not in best or found < best[key][1]:
            best[key] = str(row["peer"]), found
    return best


def compared(ours: Sequence[Row], theirs: Sequence[Row]) -> list[Compared]:
    """Set each row of ours beside the sum of the best peers that do the same."""
    best, table = best_of(theirs), {}
    for row in ours:
        if "median_us" not in row:
            continue
        keys = [(str(op), str(shape)) for op, shape in row["sum_of"]]  # type: ignore[attr-defined]
        found = [best[key] for key in keys if key in best]
        whole = len(found) == len(keys)
        names = " + ".join(dict.fromkeys(name for name, _ in found)) if whole else ""
        shape, us = str(row["shape"]), float(str(row["median_us"]))
        before = table.get(shape)
        slower = max(us, before.ours_us) if before else us
        total = sum(us for _, us in found) if whole else None
        table[shape] = Compared(shape, float(str(row["floor_us"])), slower, names, total)
    return list(table.values())


def show(table: Iterable[Compared]) -> None:
    """Print the comparison."""
    print(f"{'what':<76}{'floor':>8}{'k3c':>9}{'peer':>9}{'ratio':>7}  best peer")
    for row in table:
        peer = (
            f"{row.peer_us:9.2f}{row.peer_us / row.ours_us:7.2f}"
            if row.peer_us
            else f"{'-':>9}{'-':>7}"
        )
        print(f"{row.shape[:75]:<76}{row.floor_us:8.2f}{row.ours_us:9.2f}{peer}  {row.peer}")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="folder that fetch.py filled")
    parser.add_argument("--artifact", action="append", default=[], help="WORKLOAD=DIR")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    artifacts = [item.split("=", 1) for item in arguments.artifact]

    def ours() -> list[Row]:
        return [
            row
            for workload, folder in artifacts
            for row in lines_of(("perf.peers.ours", folder, workload), SECTION_LIMIT_S)
        ]

    first = ours()
    theirs = [
        row
        for section in arguments.sections.split(",")
        for row in lines_of(("perf.peers.theirs", str(arguments.peers), section), SECTION_LIMIT_S)
    ]
    mine = [*first, *ours()]
    show(compared(mine, theirs))
    for row in (*mine, *theirs):
        if "error" in row:
            print(f"{row['op']} {row['shape']} {row['peer']}: {row['error']}")
    arguments.output.write_text(json.dumps({"k3c": mine, "peers": theirs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
