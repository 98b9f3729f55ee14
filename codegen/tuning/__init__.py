"""Measured configurations of kernels: one JSON table a device, written by `k3c tune`.

The compiler reads them and never measures. An entry whose configuration is no longer a candidate
is not used: the template has changed since.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

Config = Mapping[str, int]

FOLDER = Path(__file__).parent


def tuned(device: str, template: str, key: str, candidates: Sequence[Config]) -> Config:
    """Return the measured best of `candidates`, or the first where none was measured.

    Args:
        device: Name of the target.
        template: Name of the template.
        key: What names the node, from `TritonTemplate.tuning_key`.
        candidates: The configurations that the template can run, the rule's choice first.
    """
    found = table(device).get(f"{template} {key}")
    if found is not None and found in [dict(c) for c in candidates]:
        return found
    return candidates[0]


def is_tuned(device: str, template: str, key: str) -> bool:
    """Whether the table has an entry for a node."""
    return f"{template} {key}" in table(device)


@cache
def table(device: str) -> Mapping[str, Config]:
    """Return the configuration of every measured node; empty for a device without a table."""
    path = FOLDER / f"{device}.json"
    if not path.is_file():
        return {}
    entries = json.loads(path.read_text("utf-8"))["entries"]
    return {f"{e['template']} {e['key']}": e["config"] for e in entries}
