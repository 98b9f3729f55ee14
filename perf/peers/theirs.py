"""Measure the peers of one section, a JSON row a line.

A section is a process of its own: a peer that faults the device takes only its section with it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import torch

from perf.peers.case import Case, measure

Cases = Callable[[], Iterator[Case]]
# Section: module and function.
SECTIONS: Mapping[str, tuple[str, str]] = {
    "gemm": ("gemm", "cases"),
    "moe": ("moe", "cases"),
    "kda_decode": ("kda", "decode_cases"),
    "kda_prefill": ("kda", "prefill_cases"),
    "mla_decode": ("mla", "cases"),
    "attn_res": ("attn_res", "cases"),
    "layer": ("block", "cases"),
}


def rows(folder: Path, section: str) -> Iterator[dict[str, object]]:
    """Yield a row for each case; one that the peer refuses has `error` instead of times."""
    name, function = SECTIONS[section]
    sys.path.insert(0, str(folder / "py"))
    module = importlib.import_module(f"perf.peers.{name}")
    _load(folder, module)
    torch.manual_seed(0)
    for case in getattr(module, function)():
        try:
            yield asdict(measure(case))
        except RuntimeError as error:
            line = str(error).splitlines()[0]
            yield {"op": case.op, "shape": case.shape, "peer": case.peer, "error": line}


def _load(folder: Path, module: ModuleType) -> None:
    for library in module.LIBRARIES:
        torch.ops.load_library(str(folder / "so" / f"{library}.so"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("section", choices=sorted(SECTIONS))
    arguments = parser.parse_args()
    for line in rows(arguments.folder, arguments.section):
        print(json.dumps(line), flush=True)
