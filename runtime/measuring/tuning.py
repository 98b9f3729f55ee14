"""`k3c tune`: measures the candidate configurations of an artifact, writes the table of the best.

Needs the runtime and the device only. The artifact was compiled with `--candidates`: each bucket is
there several times, each time with another candidate in every kernel, and `candidates.json` says
which.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3c.artifact import Candidate, CandidateList, from_json
from k3c.artifact_dir import CANDIDATES_FILE
from k3c.errors import ArtifactError, ConfigError
from k3c.runtime.measuring.standalone import Standalone
from k3c.runtime.measuring.timing import time_launches
from k3c.runtime.measuring.workload import fill_inputs

ROUNDS = 5

Config = Mapping[str, int]
Entry = dict[str, object]


@dataclass(frozen=True)
class _Measured:
    """Microseconds of one configuration, the mean over all nodes and layers of its key."""

    candidate: Candidate
    us: float


def tune(directory: Path, table: Path, context_tokens: int, say: Callable[[str], None]) -> int:
    """Measure every candidate and write the table.

    Args:
        directory: An artifact compiled with `--candidates`.
        table: The JSON file to write; entries of other nodes that it holds already are kept.
        context_tokens: Tokens that each request has before a decode step.
        say: Takes a line of progress.

    Returns:
        The number of nodes measured.

    Raises:
        ArtifactError: The artifact has no candidates, or is damaged or foreign.
        ConfigError: The artifact's state is too small for the context.
        DeviceFault: The device fails.
    """
    path = directory / CANDIDATES_FILE
    if not path.is_file():
        what = "the artifact has no candidates to measure"
        raise ArtifactError(what, str(directory), "compile with --candidates")
    listed = from_json(CandidateList, path.read_text("utf-8"), CANDIDATES_FILE)
    measured: list[_Measured] = []
    with Standalone.open(directory, say) as rank:
        for bucket in rank.manifest.buckets:
            named = [c for c in listed.candidates if c.bucket == bucket.name]
            measured += _measure(rank, bucket.name, named, context_tokens)
            say(f"{bucket.name}: {len(named)} nodes")
        device = rank.driver.api.device_name(rank.driver.device)
    best = _best(measured, device)
    _write(table, best)
    return len(best)


def _measure(
    rank: Standalone, name: str, named: Sequence[Candidate], context: int
) -> list[_Measured]:
    """Time the launches of one variant of a bucket."""
    candidates = {(c.graph, c.label): c for c in named}
    plan = rank.plan(name)
    before = context if plan.bucket.phase == "decode" else 0
    planned = rank.manifest.cache.max_context_tokens
    if before + 1 > planned:
        what = f"{before} tokens of context and one more, planned {planned}"
        raise ConfigError(what, "--context", "compile with a larger --max-model-len")
    commands = rank.prepare(plan, lambda io: fill_inputs(io, plan.bucket, before, rank.manifest))
    taken = time_launches(rank.driver, commands, ROUNDS)
    # All nodes of a key together: layers differ in what they do, as in the number of sources.
    sums: dict[tuple[str, str], float] = {}
    calls: dict[tuple[str, str], set[str]] = {}
    for bound, us in zip(commands, taken, strict=True):
        _, call, label = bound.label.split(", ", 2)
        candidate = candidates.get((call.partition(" ")[0], label))
        if candidate is not None:
            key = candidate.template, candidate.key
            sums[key] = sums.get(key, 0.0) + us
            calls.setdefault(key, set()).add(f"{call} {label}")
    by_key = {(c.template, c.key): c for c in named}
    return [_Measured(by_key[key], total / len(calls[key])) for key, total in sums.items()]


def _best(measured: Sequence[_Measured], device: str) -> list[Entry]:
    """Return an entry for each node: the fastest configuration, the first of equal ones."""
    today = datetime.date.today().isoformat()
    found: dict[tuple[str, str], _Measured] = {}
    counts: dict[tuple[str, str], int] = {}
    for m in measured:
        key = m.candidate.template, m.candidate.key
        counts[key] = counts.get(key, 0) + 1
        if key not in found or m.us < found[key].us:
            found[key] = m
    return [
        {
            "template": template,
            "key": key,
            "config": dict(m.candidate.config),
            "us": round(m.us, 2),
            "measured": counts[template, key],
            "device": device,
            "date": today,
        }
        for (template, key), m in sorted(found.items())
    ]


def _write(table: Path, entries: Sequence[Entry]) -> None:
    """Write the table, with the entries of other nodes that it had, beside its place first."""
    kept: dict[tuple[object, object], Entry] = {}
    if table.is_file():
        old = json.loads(table.read_text("utf-8"))["entries"]
        kept = {(e["template"], e["key"]): e for e in old}
    kept |= {(e["template"], e["key"]): e for e in entries}
    ordered = [kept[key] for key in sorted(kept, key=str)]
    lines = ",\n".join("  " + json.dumps(e, sort_keys=True) for e in ordered)
    new = table.with_name(table.name + ".new")
    new.write_text('{"entries": [\n' + lines + "\n]}\n", "utf-8")
    new.replace(table)
