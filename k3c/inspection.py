"""`k3c inspect`: what an artifact is, what the passes did, where every byte lies."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from k3c import artifact_dir
from k3c.artifact import Manifest, Plan
from k3c.memory_report import memory_report, totals


def inspect_artifact(artifact: Path, as_json: bool, passes: bool, memory: bool) -> None:
    """Print a report of an artifact; weights are not read, their size is checked.

    Args:
        artifact: The artifact directory.
        as_json: Print one JSON object instead of text.
        passes: Add matches, refusals and node counts of every pass.
        memory: Add every segment of every space of every bucket.

    Raises:
        ArtifactError: The artifact is damaged, foreign or newer than this version.
    """
    manifest = artifact_dir.read_manifest(artifact)
    artifact_dir.verify(artifact, manifest, "quick")
    plans = [artifact_dir.read_plan(artifact, bucket.name) for bucket in manifest.buckets]
    report = _summary(manifest, plans)
    if passes:
        report["passes"] = artifact_dir.read_pass_report(artifact)
    if memory:
        report["memory"] = {p.bucket.name: _memory(p, manifest) for p in plans}
    print(json.dumps(report, sort_keys=True, indent=1) if as_json else _text(report))


def _summary(manifest: Manifest, plans: list[Plan]) -> dict[str, Any]:
    return {
        "format": f"{manifest.format} {manifest.major}.{manifest.minor}",
        "k3c_version": manifest.k3c_version,
        "toolchain": dict(manifest.toolchain),
        "model": asdict(manifest.model),
        "target": asdict(manifest.target),
        "mesh": dict(manifest.mesh),
        "rank": manifest.rank,
        "cache": asdict(manifest.cache),
        "space_bytes": dict(manifest.space_bytes),
        "padding_bytes": sum(w.padding_bytes for w in manifest.weights),
        "kernels": dict(sorted(Counter(k.template for k in manifest.kernels).items())),
        "buckets": [_bucket(plan) for plan in plans],
    }


def _bucket(plan: Plan) -> dict[str, Any]:
    return {
        "name": plan.bucket.name,
        "dims": dict(plan.bucket.dims),
        "arena_bytes": plan.space_bytes["arena"],
        "arena_lower_bound_bytes": plan.arena_lower_bound_bytes,
        **plan.estimates,
    }


def _memory(plan: Plan, manifest: Manifest) -> dict[str, Any]:
    segments = memory_report(plan, manifest.weights)
    return {"segments": [asdict(s) for s in segments], "totals": totals(segments)}


def _text(report: dict[str, Any]) -> str:
    model, target, cache = report["model"], report["target"], report["cache"]
    lines = [
        f"{report['format']}, made by k3c {report['k3c_version']}",
        f"model    {model['name']}: {model['num_layers']} layers, "
        f"vocabulary {model['vocab_size']}, compute {model['compute']}, "
        f"stop ids {list(model['stop_ids'])}, "
        f"{'with' if model['has_tokenizer'] else 'no'} tokenizer"
        f"{'' if model['has_weights'] else ', no weights'}",
        _target_line(target),
        *([_rank_line(report)] if report["mesh"] else []),
        f"state    {cache['max_requests']} requests of {cache['max_context_tokens']} tokens; "
        f"{cache['slots']} slots, {cache['pages']} pages of {cache['page_tokens']} tokens",
        "",
        f"{'space':<14}{'bytes':>16}",
        *(f"{name:<14}{size:>16,}" for name, size in report["space_bytes"].items()),
        f"{'(padding)':<14}{report['padding_bytes']:>16,}",
        "",
        *_bucket_lines(report["buckets"]),
        "",
        "kernels  " + ", ".join(f"{name} x{count}" for name, count in report["kernels"].items()),
    ]
    lines += _pass_lines(report.get("passes", []))
    for bucket, memory in report.get("memory", {}).items():
        lines += _memory_lines(bucket, memory)
    return "\n".join(lines)


def _target_line(target: dict[str, Any]) -> str:
    needs = " ".join(target["features"]) or f"driver {target['min_driver']}"
    return f"target   {target['name']} ({target['arch']}): needs {needs}"


def _rank_line(report: dict[str, Any]) -> str:
    axes = ", ".join(f"{axis}={size}" for axis, size in sorted(report["mesh"].items()))
    return f"rank     {report['rank']} of {axes}"


def _bucket_lines(buckets: list[dict[str, Any]]) -> list[str]:
    head = (
        f"{'bucket':<14}{'launches':>9}{'arena':>12}{'/ bound':>9}"
        f"{'MB read':>10}{'GFLOP':>9}{'floor ms':>10}"
    )
    return [
        head,
        *(
            f"{b['name']:<14}{b['launches']:>9}{b['arena_bytes']:>12,}"
            f"{b['arena_bytes'] / max(b['arena_lower_bound_bytes'], 1):>9.3f}"
            f"{b['read_bytes'] / 1e6:>10.1f}{b['flops'] / 1e9:>9.3f}"
            f"{b.get('floor_us', 0) / 1e3:>10.2f}"
            for b in buckets
        ),
    ]


def _pass_lines(passes: list[dict[str, Any]]) -> list[str]:
    if not passes:
        return []
    lines = ["", f"{'pass':<20}{'nodes':>12}{'expected':>10}{'matched':>9}{'refused':>9}"]
    for row in passes:
        nodes = f"{row['nodes_before']} -> {row['nodes_after']}"
        expected = "-" if row["expected"] is None else row["expected"]
        matched, refused = sum(row["matches"].values()), len(row["refusals"])
        lines.append(f"{row['name']:<20}{nodes:>12}{expected:>10}{matched:>9}{refused:>9}")
        lines += [f"    {rule}: {count}" for rule, count in row["matches"].items()]
        lines += [
            f"    {r['rule']} refused at {r['graph']} %{r['value']}: {r['reason']}"
            for r in row["refusals"]
        ]
    return lines


def _memory_lines(bucket: str, memory: dict[str, Any]) -> list[str]:
    lines = ["", f"memory of {bucket}"]
    for s in memory["segments"]:
        owners = " ".join(s["owners"]) or s["kind"]
        lines.append(
            f"  {s['space']:<12}{s['offset']:>14}{s['nbytes']:>12} {s['kind']:<8} {owners}"
        )
    for space, kinds in memory["totals"].items():
        shares = ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in kinds.items())
        lines.append(f"  {space:<12} {sum(kinds.values()):>14,} bytes: {shares}")
    return lines
