"""What a report says, as data: read from an artifact, and from files that belong to it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from k3c import artifact_dir
from k3c.artifact import SPACES, Command, Manifest, Plan
from k3c.memory_report import Segment, memory_report, totals

Facts = dict[str, Any]


def artifact_facts(directory: Path) -> Facts:
    """Return everything that a report says of an artifact; the same bytes for the same artifact.

    Raises:
        ArtifactError: It is damaged, foreign or newer.
    """
    manifest = artifact_dir.read_manifest(directory)
    artifact_dir.verify(directory, manifest, "quick", (artifact_dir.WEIGHTS_FILE,))
    plans = [artifact_dir.read_plan(directory, bucket.name) for bucket in manifest.buckets]
    return {
        "manifest": _manifest(manifest),
        "buckets": [_bucket(plan) for plan in plans],
        "memory": _memory(manifest, plans),
        "kernels": [_kernel(kernel) for kernel in manifest.kernels],
        "passes": artifact_dir.read_pass_report(directory),
        "ir": _ir(directory, manifest),
    }


def _manifest(manifest: Manifest) -> Facts:
    return {
        "model": asdict(manifest.model),
        "target": asdict(manifest.target),
        "mesh": dict(manifest.mesh),
        "rank": manifest.rank,
        "cache": asdict(manifest.cache),
        "space_bytes": dict(manifest.space_bytes),
        "toolchain": dict(manifest.toolchain),
        "format": f"{manifest.format} {manifest.major}.{manifest.minor}",
        "k3c_version": manifest.k3c_version,
        "members": {name: member.nbytes for name, member in sorted(manifest.members.items())},
    }


def _kernel(kernel: Any) -> Facts:
    constants = ", ".join(f"{key}={value}" for key, value in sorted(kernel.constants.items()))
    return {
        "template": kernel.template,
        "symbol": kernel.symbol,
        "constants": constants,
        "arch": kernel.arch,
        "min_driver": kernel.min_driver,
        "threads": kernel.threads,
        "shared_bytes": kernel.shared_bytes,
        "early_start": kernel.pdl,
        "key": kernel.key,
    }


def _bucket(plan: Plan) -> Facts:
    """Return a bucket's step by kind of node, in the order of the first command."""
    kinds: dict[str, Facts] = {}
    for call in plan.calls:
        for command in plan.commands[call.graph]:
            row = kinds.setdefault(
                command.label,
                {"label": command.label, "kind": command.kind, "launches": 0, "floor_us": 0.0,
                 "message_bytes": 0, "graphs": []},
            )  # fmt: skip
            row["launches"] += 1
            row["floor_us"] += command.floor_ns / 1e3
            row["message_bytes"] += _message_bytes(command)
            if call.graph not in row["graphs"]:
                row["graphs"].append(call.graph)
    return {
        "name": plan.bucket.name,
        "dims": dict(plan.bucket.dims),
        "space_bytes": dict(plan.space_bytes),
        "arena_lower_bound_bytes": plan.arena_lower_bound_bytes,
        "estimates": dict(plan.estimates),
        "kinds": list(kinds.values()),
        "layers": len(plan.calls),
    }


def _message_bytes(command: Command) -> int:
    return command.args[2].value if command.kind == "collective" else 0


def _memory(manifest: Manifest, plans: Sequence[Plan]) -> Facts:
    """Return segments by space; what is the same in every bucket stands once, under `all`."""
    by_bucket = {plan.bucket.name: memory_report(plan, manifest.weights) for plan in plans}
    spaces: Facts = {}
    for space in SPACES:
        rows = {name: _rows(found, space) for name, found in by_bucket.items()}
        first = next(iter(rows.values()), [])
        spaces[space] = {"all": first} if all(r == first for r in rows.values()) else rows
    return {
        "spaces": spaces,
        "totals": {name: totals(found) for name, found in by_bucket.items()},
    }


def _rows(segments: Sequence[Segment], space: str) -> list[list[Any]]:
    return [
        [s.offset, s.nbytes, s.kind, list(s.owners[:4]), len(s.owners)]
        for s in segments
        if s.space == space
    ]


def _ir(directory: Path, manifest: Manifest) -> list[Facts]:
    """Return what each pass left of the IR, and what it changed."""
    names = sorted(name for name in manifest.members if name.startswith("ir/"))
    found: list[Facts] = []
    before: list[str] = []
    for name in names:
        lines = (directory / name).read_text().splitlines()
        changes = list(_changes(before, lines)) if found else []
        found.append({"name": name[3:-3], "text": "\n".join(lines), "changes": changes})
        before = lines
    return found


def _changes(before: list[str], after: list[str]) -> Iterator[str]:
    """Yield the lines of a unified diff, without its two file names."""
    for number, line in enumerate(difflib.unified_diff(before, after, lineterm="", n=2)):
        if number > 1:
            yield line
