"""`k3c topology list` and `show`: what a topology holds, as tables or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from k3c.errors import ConfigError
from k3c.targets.collectives import CollectiveKind, choose
from k3c.targets.topology import Fabric, Topology, known_topologies, load_topology
from k3c.targets.topology_warnings import rank_ranges

KINDS: tuple[CollectiveKind, ...] = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "dispatch",
    "combine",
)
# From a row of a decode step to a chunk of prefill.
SIZES_BYTES = (2**14, 2**17, 2**20, 2**23, 2**27)


def list_topologies(as_json: bool) -> None:
    """Print every name that `--target` takes, with its ranks and links.

    Args:
        as_json: Print JSON instead of a table.
    """
    rows: list[dict[str, Any]] = []
    # `cpu` stands for one of the other two, whichever this machine runs.
    for name in (name for name in known_topologies() if name != "cpu"):
        topology = load_topology(name)
        links = ", ".join(f"{f.kind} {f.full_gbs:g} GB/s" for f in topology.fabrics)
        size = {"ranks": topology.ranks, "hosts": len(topology.hosts)}
        rows.append({"name": name, **size, "device": topology.target.name, "links": links})
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'name':<14}{'ranks':>6}{'hosts':>6}  {'device':<12}links of a rank, one direction")
    for row in rows:
        print(
            f"{row['name']:<14}{row['ranks']:>6}{row['hosts']:>6}  {row['device']:<12}"
            f"{row['links'] or '-'}"
        )


def show_topology(name: str, as_json: bool) -> None:
    """Print one topology.

    Args:
        name: A name of `known_topologies`, or the path of a file.
        as_json: Print JSON instead of text.
    """
    topology = load_topology(name)
    report = describe(topology)
    if as_json:
        print(json.dumps(report, indent=1))
        return
    memory = topology.target.memory_bytes / 2**30
    print(f"{topology.name}: {topology.about}" if topology.about else topology.name)
    print(f"device     {topology.target.name}, {memory:.1f} GiB for a plan")
    print(f"ranks      {topology.ranks} on {len(topology.hosts)} hosts ({report['per_host']} each)")
    print(f"islands    {len(topology.islands())}: {'; '.join(report['islands'])}")
    print(f"bisection  {report['bisection_gbs']:g} GB/s between the weakest halves")
    if topology.fabrics:
        print(
            f"\n{'fabric':<12}{'kind':<12}{'shape':<8}{'GB/s':>8}{'a pair':>9}{'us':>6}"
            f"{'paths':>7}  groups"
        )
    for fabric in report["fabrics"]:
        print(
            f"{fabric['name']:<12}{fabric['kind']:<12}{fabric['shape']:<8}{fabric['gbs']:>8g}"
            f"{fabric['pair_gbs']:>9g}{fabric['us']:>6g}{fabric['paths']:>7}"
            f"  {fabric['groups']}{', multicast' if fabric['multicast'] else ''}"
        )
    for fabric in topology.fabrics:
        print(f"source of {fabric.name}: {fabric.source}")
    for line in topology.warnings:
        print(f"warning: {line}")


def describe(topology: Topology) -> dict[str, Any]:
    """Return what `show` prints, as JSON values."""
    sizes = sorted({len(host) for host in topology.hosts})
    return {
        "name": topology.name,
        "about": topology.about,
        "target": topology.target.name,
        "ranks": topology.ranks,
        "hosts": len(topology.hosts),
        "per_host": " or ".join(map(str, sizes)),
        "islands": [rank_ranges(island) for island in topology.islands()],
        "bisection_gbs": round(topology.bisection_gbs(), 1),
        "fabrics": [_fabric(fabric) for fabric in topology.fabrics],
        "warnings": list(topology.warnings),
    }


def _fabric(fabric: Fabric) -> dict[str, Any]:
    pairs = [fabric.full_gbs / wires for wires in fabric.wires]
    return {
        "name": fabric.name,
        "kind": fabric.kind,
        "shape": fabric.shape,
        "gbs": fabric.full_gbs,
        "pair_gbs": round(min(pairs), 1),
        "us": fabric.us,
        "paths": fabric.paths,
        "multicast": fabric.multicast,
        "groups": _groups(fabric),
        "source": fabric.source,
    }


def _groups(fabric: Fabric) -> str:
    if len(fabric.groups) > 4:
        sizes = sorted({len(group) for group in fabric.groups})
        return f"{len(fabric.groups)} of {' or '.join(map(str, sizes))} ranks"
    return "; ".join(rank_ranges(group) for group in fabric.groups)


def show_collectives(name: str, ranks: int, as_json: bool) -> None:
    """Print what is chosen for each kind and size of collective.

    Args:
        name: A name of `known_topologies`, or the path of a file.
        ranks: How many ranks take part, from rank 0; 0: all.
        as_json: Print JSON instead of a table.

    Raises:
        ConfigError: The topology has fewer ranks.
    """
    topology = load_topology(name)
    if ranks > topology.ranks:
        what = f"{ranks} ranks, of {topology.ranks} that {topology.name} has"
        raise ConfigError(what, "--ranks", f"1 to {topology.ranks}, or 0 for all")
    members = range(ranks or topology.ranks)
    rows = [
        {"kind": kind, "bytes": nbytes, **asdict(choose(kind, nbytes, members, topology))}
        for kind in KINDS
        for nbytes in SIZES_BYTES
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{topology.name}: {len(members)} ranks; microseconds, and their error bar")
    print(f"{'collective':<15}{'KiB':>8}  {'implementation':<30}{'us':>9}{'low':>9}{'high':>9}")
    for row in rows:
        print(
            f"{row['kind']:<15}{row['bytes'] // 1024:>8}  {row['implementation']:<30}"
            f"{row['us']:>9.1f}{row['low_us']:>9.1f}{row['high_us']:>9.1f}"
        )
    for line in sorted({row["source"] for row in rows}):
        print(f"source: {line}")
