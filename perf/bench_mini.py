"""Measure the mini configuration: the engine against the machine's bandwidth and eager PyTorch.

`python perf/bench_mini.py [--threads 2] [--rounds 3]` makes a model with random weights and its
artifact under the cache folder (once, 2 GB), measures, prints a table, writes
`perf/results/<date>-<cpu>.json` and adds a line to the table in `perf/README.md`. Engine,
reference and floor run in processes of their own, in turn, `rounds` times; medians are over rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CONFIG = ROOT / "tests/data/configs/mini-config.json"
README = HERE / "README.md"
TABLE_END = "<!-- bench_mini.py adds lines above this one -->"
GOALS = {"decode over bandwidth": 0.5, "decode over reference": 5, "prefill 512 over reference": 3}


def cache_folder() -> Path:
    """Return where the model and its artifact are kept between runs."""
    chosen = os.environ.get("K3C_CACHE_DIR")
    base = Path(chosen) if chosen else Path.home() / ".cache" / "k3c"
    return base / "bench"


def make_model(folder: Path) -> Path:
    """Write the random checkpoint, unless it is there."""
    from k3c.model.random_weights import write_random_model

    model = folder / "mini"
    if not (model / "complete").exists():
        print(f"writing random weights to {model}", file=sys.stderr)
        write_random_model(model, CONFIG, seed=0)
        (model / "complete").touch()
    return model


def make_artifact(folder: Path, model: Path) -> Path:
    """Compile anew, so that the artifact is this source's; kernels come from the cache."""
    artifact = folder / "mini-artifact"
    if artifact.exists():
        shutil.rmtree(artifact)
    command = ["-m", "k3c", "compile", str(model), "--target", "cpu", "-o", str(artifact)]
    subprocess.run([sys.executable, *command, "--max-model-len", "2048"], check=True, cwd=ROOT)
    return artifact


def run_part(threads: int, script: str, *args: object) -> dict[str, Any]:
    """Run one part in a process of its own and return what it printed."""
    env = {**os.environ, "TVM_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, str(HERE / script), *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def measure(threads: int, rounds: int) -> dict[str, Any]:
    """Run all parts in turn; return every round and the medians that are compared."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(folder)
    artifact = make_artifact(folder, model)
    # Once without counting: the weights come into the page cache.
    run_part(threads, "parts.py", "engine", artifact, CONFIG)
    found: dict[str, list[dict[str, Any]]] = {"floor": [], "engine": [], "reference": []}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        found["floor"].append(run_part(threads, "floor.py", threads))
        found["engine"].append(run_part(threads, "parts.py", "engine", artifact, CONFIG))
        found["reference"].append(run_part(threads, "parts.py", "reference", model, threads))
    return {**found, "summary": summarize(found)}


def median_of(rounds: list[dict[str, Any]], *path: str) -> float:
    """Return the median over rounds of one number."""
    values = []
    for value in rounds:
        for key in path:
            value = value[key]
        values.append(value)
    return statistics.median(values)  # type: ignore[type-var]


def summarize(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the numbers of the issue's goals."""
    engine, reference = found["engine"], found["reference"]
    floor_gbs = median_of(found["floor"], "gbs")
    active = engine[0]["active_weight_bytes"]
    decode_ms = median_of(engine, "buckets", "decode.b1", "median_ms")
    prompt_ms = median_of(engine, "prompt_512", "median_ms")
    decode_gbs = active / decode_ms / 1e6
    names = engine[0]["buckets"]
    return {
        "floor_gbs": floor_gbs,
        "active_weight_mb": round(active / 1e6, 1),
        "decode_b1_ms": round(decode_ms, 2),
        "decode_gbs": round(decode_gbs, 2),
        "decode over bandwidth": round(decode_gbs / floor_gbs, 3),
        "reference_decode_ms": median_of(reference, "decode_b1", "median_ms"),
        "decode over reference": round(
            median_of(reference, "decode_b1", "median_ms") / decode_ms, 2
        ),
        "prompt_512_ms": prompt_ms,
        "reference_prompt_512_ms": median_of(reference, "prompt_512", "median_ms"),
        "prefill 512 over reference": round(
            median_of(reference, "prompt_512", "median_ms") / prompt_ms, 2
        ),
        "tokens_per_s": {
            n: round(median_of(engine, "buckets", n, "tokens_per_s"), 1) for n in names
        },
    }


def cpu_name() -> str:
    """Return the CPU's name as the system reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def git_commit() -> str:
    """Return the commit that was measured; with a + where files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def write_results(report: dict[str, Any]) -> Path:
    """Write the JSON file and the table's line."""
    slug = re.sub(r"[^a-z0-9]+", "-", report["cpu"].lower()).strip("-")
    path = HERE / "results" / f"{report['date']}-{slug}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    s = report["summary"]
    line = (
        f"| {report['date']} | {report['commit']} | {report['cpu']}, {report['threads']} threads "
        f"| {s['floor_gbs']:.1f} | {s['decode_b1_ms']:.1f} ms = {s['decode_gbs']:.1f} GB/s "
        f"| {s['decode over bandwidth']:.2f} | {s['decode over reference']:.1f} "
        f"| {s['prompt_512_ms']:.0f} ms | {s['prefill 512 over reference']:.1f} |"
    )
    text = README.read_text()
    assert TABLE_END in text, f"perf/README.md lacks {TABLE_END}"
    README.write_text(text.replace(TABLE_END, f"{line}\n{TABLE_END}"))
    return path


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry", action="store_true", help="print only, record nothing")
    options = parser.parse_args()
    report = {
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "cpu": cpu_name(),
        "threads": options.threads,
        "load_average": os.getloadavg()[0],
        **measure(options.threads, options.rounds),
    }
    for name, value in report["summary"].items():
        goal = f"  (goal {GOALS[name]})" if name in GOALS else ""
        print(f"{name:<28}{value}{goal}")
    if not options.dry:
        print(f"written to {write_results(report).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
