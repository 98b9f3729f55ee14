"""The numbers of every plan, held to what was agreed: launches, bytes, operations, memory, time.

    python perf/budgets.py                     compare; every number that moved is printed, exit 1
    python perf/budgets.py --bless "reason"    take the numbers as they are; the file keeps why

No device is needed: a plan is what a device would run. `budgets/*.json` hold what was agreed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3c.artifact import CacheInfo, Plan
from k3c.buckets import make_buckets
from k3c.model.config import load_config
from k3c.passes.select_kernels import Selected
from k3c.planner.estimate import estimate_step
from k3c.planner.exact import Planner, StagePlans, make_planner
from k3c.targets.mesh import Mesh, parse_mesh
from k3c.targets.topology import Topology, load_topology

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "perf/budgets"
K3 = ROOT / "tests/data/configs/kimi-k3-config.json"
DEMO = ROOT / "models/k3-demo/config.json"
SHOWN = 12  # moved numbers that the log of a file names; the others are counted

Numbers = dict[str, int]
Budget = dict[str, Numbers]


@dataclass(frozen=True)
class Case:
    """One compilation whose numbers are held.

    Attributes:
        name: Name of its file.
        config: The model.
        machine: Target or topology; no name may depend on the machine that runs this.
        mesh: As the command line takes it; empty: one rank.
        max_num_seqs: Requests of a data-parallel rank.
        max_model_len: Tokens of one request.
    """

    name: str
    config: Path
    machine: str
    mesh: str
    max_num_seqs: int
    max_model_len: int


CASES = (
    Case("demo-cpu", DEMO, "cpu-avx2", "", 8, 8192),
    Case("k3-h200-tep16", K3, "hgx-h200-x2", "TEP16", 64, 8448),
    Case("k3-gb300-nvl72-tep8", K3, "gb300-nvl72", "TEP8", 64, 131328),
)


def measure(case: Case, planner: Planner | None = None) -> Budget:
    """Return the numbers of every bucket of a case.

    Args:
        case: What is compiled.
        planner: Of the case's model and target; None: a fresh one.
    """
    machine, mesh = load_topology(case.machine), parse_mesh(case.mesh)
    config = load_config(case.config)
    planner = planner or make_planner(config, machine.target, "bfloat16")
    page = planner_page(planner)
    pages = case.max_num_seqs * -(-case.max_model_len // page) + 1
    slots = case.max_num_seqs + 1
    cache = CacheInfo(case.max_num_seqs, case.max_model_len, page, pages, slots)
    buckets = make_buckets(cache, machine.target, 8192)
    found = planner.plan(mesh or Mesh(), 0, buckets)
    return _numbers(found, mesh, machine)


def planner_page(planner: Planner) -> int:
    """Return the positions of a page of the MLA cache that a planner's module has."""
    shapes = [
        item.value.type.shape
        for graph in planner.module.graphs
        for item in graph.inputs
        if item.value.name == "kv_cache"
    ]
    page = shapes[0][1]
    assert isinstance(page, int), f"kv_cache has pages of {page}"
    return page


def _numbers(found: StagePlans, mesh: Mesh | None, machine: Topology) -> Budget:
    pairs = zip(found.selections, found.plans, strict=True)
    return {plan.bucket.name: _bucket(plan, s, mesh, machine) for s, plan in pairs}


def _bucket(plan: Plan, selected: Selected, mesh: Mesh | None, machine: Topology) -> Numbers:
    times = Counter(call.graph for call in plan.calls)
    commands = [(times[g], c) for g, listed in plan.commands.items() for c in listed]
    moved = plan.estimates["read_bytes"] + plan.estimates["write_bytes"]
    return {
        "launches": sum(n for n, c in commands if c.kind == "launch"),
        "bytes_moved": moved,
        "flops": plan.estimates["flops"],
        "collectives": sum(n for n, c in commands if c.kind == "collective"),
        "collective_bytes": sum(n * c.args[2].value for n, c in commands if c.kind == "collective"),
        "arena_bytes": plan.space_bytes["arena"],
        "kernels": len({c.kernel for _, c in commands if c.kind == "launch"}),
        "estimated_us": round(estimate_step(selected, mesh, machine).us),
    }


def moved(agreed: Mapping[str, Numbers], now: Mapping[str, Numbers]) -> list[str]:
    """Return a line for each number that differs, with both values; sorted."""
    lines: list[str] = []
    for bucket in sorted(agreed.keys() | now.keys()):
        before, after = agreed.get(bucket, {}), now.get(bucket, {})
        for name in sorted(before.keys() | after.keys()):
            old, new = before.get(name), after.get(name)
            if old != new:
                lines.append(f"{bucket} {name}: {_shown(old)} -> {_shown(new)}{_share(old, new)}")
    return lines


def _shown(value: int | None) -> str:
    return "none" if value is None else f"{value:,}"


def _share(old: int | None, new: int | None) -> str:
    return f" ({(new - old) / old:+.2%})" if old and new is not None else ""


def path_of(case: Case, folder: Path = FOLDER) -> Path:
    """Return the file of a case."""
    return folder / f"{case.name}.json"


def read(case: Case, folder: Path = FOLDER) -> dict[str, Any]:
    """Return what was agreed: `buckets` and `log`; empty ones where there is no file."""
    path = path_of(case, folder)
    return json.loads(path.read_text("utf-8")) if path.is_file() else {"buckets": {}, "log": []}


def bless(case: Case, now: Budget, why: str, folder: Path = FOLDER) -> list[str]:
    """Take numbers as agreed, with the reason; return what moved.

    A case of which nothing moved is left alone, so that its log tells of its own changes only.
    """
    assert why.strip(), "a reason is needed: why did the numbers move?"
    kept = read(case, folder)
    lines = moved(kept["buckets"], now)
    if not lines:
        return []
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    entry = {"why": why.strip(), "moved": [*lines[:SHOWN], *more]}
    first = {"why": why.strip(), "moved": ["every number: the case is new"]}
    log = [*kept["log"], entry if kept["buckets"] else first]
    text = json.dumps({"buckets": now, "log": log}, indent=1, sort_keys=True)
    path_of(case, folder).write_text(text + "\n", "utf-8")
    return lines


def main(args: Sequence[str]) -> int:
    """Compare or bless all cases; return the exit code."""
    why = args[1] if len(args) == 2 and args[0] == "--bless" else ""
    if args and not why.strip():
        print('usage: budgets.py [--bless "why the numbers move"]', file=sys.stderr)
        return 2
    found = 0
    for case in CASES:
        now = measure(case)
        lines = bless(case, now, why) if why else moved(read(case)["buckets"], now)
        print(f"{case.name}: {len(lines)} numbers moved" if lines else f"{case.name}: as agreed")
        for line in lines:
            print(f"  {line}")
        found += len(lines)
    return 1 if found and not why else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
