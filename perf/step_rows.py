"""Turn measured steps into rows of the efficiency tables: what each node moves, computes and took.

`python perf/step_rows.py RESULTS CONFIG CONFIG8` reads a result file of `k3c bench --workload`, the
config.json of the whole model and that of its first 8 layers, and prints the table as JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3c.artifact import CacheInfo
from k3c.buckets import bucket_sizes, make_buckets
from k3c.export.exporter import export_model
from k3c.ir.graph import Module
from k3c.ir.ops import COLLECTIVES
from k3c.kernels import catalogue_of
from k3c.model.config import load_config
from k3c.passes import select_kernels
from k3c.passes.context import PassContext
from k3c.passes.pipeline import run_pipeline
from k3c.passes.select_kernels import Selected
from k3c.planner.routing import Routing
from k3c.planner.work import Conditions, Work, node_work
from k3c.targets.mesh import parse_mesh
from k3c.targets.target import load_target

DEVICE = "h200"


@dataclass(frozen=True)
class Shape:
    """How the artifact of a workload was compiled, as perf/README.md says."""

    mesh: str
    latent: str
    requests: int
    tokens: int
    layers: int


SHAPES = {
    "W1": Shape("tp=16,ep=16", "replicated", 64, 8448, 93),
    "W1L": Shape("tp=16,ep=16", "replicated", 8, 131328, 93),
    "W1S": Shape("tp=16,ep=16", "sharded", 64, 8448, 93),
    "W2": Shape("tp=16,ep=16", "replicated", 64, 8448, 93),
    "W3": Shape("", "replicated", 64, 8448, 8),
}


def rows(step: dict[str, Any], selected: Selected) -> list[dict[str, Any]]:
    """Return a row for each label of a step: mean work of its nodes, launches and time."""
    tokens = step["context_tokens"] + (1 if selected.bucket.phase == "decode" else 0)
    if selected.bucket.phase != "decode":
        tokens = selected.bucket.dims["T"]
    # One rank alone, and its collectives are copies of its own part: the mean, not the busiest.
    conditions = Conditions(tokens, Routing(busiest=False))
    calls = Counter(call.graph for call in selected.module.schedule)
    found: dict[str, list[Work]] = {}
    for graph in selected.module.graphs:
        for node in graph.nodes:
            count = calls[graph.name]
            if node.op in COLLECTIVES:
                nbytes = sum(v.type.nbytes for v in (*node.operands, *node.results))
                work = Work(node.op, f"local_{node.op}", "decode", True, nbytes, 0, count)
            else:
                work = node_work(selected, graph, node, conditions, count)
            found.setdefault(f"{node.op} -> %{node.results[0].name}", []).append(work)
    assert found.keys() == step["nodes"].keys(), found.keys() ^ step["nodes"].keys()
    return [_row(works, step["nodes"][label]) for label, works in found.items()]


def _row(works: list[Work], measured: dict[str, Any]) -> dict[str, Any]:
    count = sum(work.count for work in works)
    first = works[0]
    return {
        "kind": first.kind,
        "family": first.family,
        "phase": first.phase,
        "tuned": first.tuned,
        "nbytes": round(sum(w.nbytes * w.count for w in works) / count),
        "flops": round(sum(w.flops * w.count for w in works) / count),
        "count": count,
        "launches": measured["launches"],
        "us_with_events": measured["us_with_events"],
    }


def _module(config: Path, shape: Shape) -> Module:
    target = load_target(DEVICE)
    module = export_model(load_config(config), "bf16", None, bucket_sizes(target).page_tokens)
    mesh = parse_mesh(shape.mesh, shape.latent)
    return run_pipeline(module, PassContext(target, catalogue_of(target), mesh=mesh)).module


def _select(module: Module, shape: Shape, name: str) -> Selected:
    target = load_target(DEVICE)
    pages = -(-shape.tokens // bucket_sizes(target).page_tokens)
    page_tokens = bucket_sizes(target).page_tokens
    cache = CacheInfo(
        shape.requests, shape.tokens, page_tokens, shape.requests * pages + 1, shape.requests + 1
    )
    bucket = next(b for b in make_buckets(cache, target, 8192) if b.name == name)
    return select_kernels.run(module, bucket, catalogue_of(target), target)


def main(results: Path, config: Path, config8: Path) -> None:
    """Print the table."""
    measured = json.loads(results.read_text("utf-8"))
    modules: dict[Shape, Module] = {}
    lines: list[str] = []
    for step in measured["workloads"]:
        shape = SHAPES[step["workload"]]
        if shape not in modules:
            modules[shape] = _module(config if shape.layers == 93 else config8, shape)
        fixed = "whole sectors" in step["commit"]
        head = {
            "step": f"{step['workload']} {step['bucket']}",
            "experts": "whole_sectors" if fixed else "first",
            "median_us": round(step["median_ms"] * 1e3),
            "min_us": round(step["min_ms"] * 1e3),
            "max_us": round(step["max_ms"] * 1e3),
        }
        nodes = rows(step, _select(modules[shape], shape, step["bucket"]))
        body = ",\n   ".join(json.dumps(row) for row in nodes)
        lines.append(json.dumps(head)[:-1] + f', "nodes": [\n   {body}]}}')
    source = f"perf/results/{results.name}"
    print(f'{{"device": "{DEVICE}", "source": "{source}", "steps": [')
    print(",\n".join(lines))
    print("]}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
