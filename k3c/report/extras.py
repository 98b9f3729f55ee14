"""What belongs to an artifact and is not in it: its topology, and where its experts are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from k3c.errors import ConfigError
from k3c.placement.loads import load_from_json
from k3c.placement.placement import Placement, placement_from_json
from k3c.targets.topology import load_topology
from k3c.topology_report import describe

Facts = dict[str, Any]


def topology_facts(name: str) -> Facts:
    """Return what a topology's picture shows.

    Raises:
        ConfigError: There is none of the name, or its file is wrong.
    """
    return {"name": name, **describe(load_topology(name))}


def placement_facts(placement: Path, load: Path | None) -> Facts:
    """Return the share of a layer's rows that every rank gets: 1 is the mean.

    Args:
        placement: A file of `k3c place`.
        load: Tokens per expert and layer; None: every expert gets as many.

    Raises:
        ConfigError: A file is missing or wrong, or the two are of different models.
    """
    found = placement_from_json(_text(placement), str(placement))
    layers = sorted(found.layers)
    if load is None:
        rows = np.ones((len(layers), found.num_experts))
    else:
        counted = load_from_json(_text(load), str(load))
        if list(counted.layers) != layers or counted.rows.shape[1] != found.num_experts:
            what = f"a load of {len(counted.layers)} layers and {counted.rows.shape[1]} experts"
            there = f"a placement of {len(layers)} layers and {found.num_experts} experts"
            raise ConfigError(f"{what} for {there}", str(load))
        rows = np.asarray(counted.rows, np.float64)
    shares = [_shares(found, layer, row) for layer, row in zip(layers, rows, strict=True)]
    return {
        "layers": layers,
        "ranks": found.num_ranks,
        "slots_per_rank": found.slots_per_rank,
        "experts": found.num_experts,
        "shares": [[round(float(x), 3) for x in row] for row in shares],
        "worst": round(float(max(row.max() for row in shares)), 3),
    }


def _shares(placement: Placement, layer: int, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return each rank's rows over the mean; an expert's rows are split over its replicas."""
    ranks = placement.layers[layer]
    copies = np.bincount([e for slots in ranks for e in slots], minlength=placement.num_experts)
    each = rows / np.maximum(copies, 1)
    taken = np.array([each[list(slots)].sum() for slots in ranks])
    return taken / max(taken.mean(), 1e-30)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", str(path)) from None
