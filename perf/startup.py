"""Measure start-up on an artifact, page cache warm: load, and process start to the first token.

`python perf/startup.py ARTIFACT [--rounds 9]` prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

PROMPT = "def add(a, b):"
LOAD = """
import time
start_s = time.perf_counter()
import sys, k3c
k3c.load(sys.argv[1])
print(time.perf_counter() - start_s)
"""


def load_s(artifact: Path) -> float:
    """Return the seconds of `import k3c` and `k3c.load`, without the interpreter's own start."""
    command = [sys.executable, "-c", LOAD, str(artifact)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def first_token_s(artifact: Path) -> float:
    """Return the seconds from starting the process `k3c generate` to its first byte of text."""
    command = [str(Path(sys.executable).with_name("k3c")), "generate", str(artifact)]
    start_s = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--prompt", PROMPT, "--max-tokens", "16"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 1), "no text"
    seconds = time.perf_counter() - start_s
    process.stdout.read()
    assert process.wait() == 0
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    report = {}
    for name, measure in (("load_s", load_s), ("first_token_s", first_token_s)):
        measure(options.artifact)
        seconds = [measure(options.artifact) for _ in range(options.rounds)]
        report[name] = {
            "median": round(statistics.median(seconds), 3),
            "min": round(min(seconds), 3),
            "max": round(max(seconds), 3),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
