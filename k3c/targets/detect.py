"""Write the topology of the machine that this runs on, from what its tools print."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networkx as nx

from k3c.errors import ConfigError, DeviceFault
from k3c.targets.machine import QUERY, Machine, read_amd, read_nvidia
from k3c.targets.target import known_targets
from k3c.targets.topology_file import parse_topology, topology_text

# Product names, the longer ones first: a GB300 is no B300.
PRODUCTS = (
    ("GB300", "gb300"),
    ("GB200", "gb200"),
    ("B300", "b300"),
    ("B200", "b200"),
    ("H200", "h200"),
    ("MI355X", "mi355x"),
)
# Links of a device, GB/s of one link and direction, microseconds of a hop. Source: the topologies.
LINKS = {
    "h200": (18, 25.0, 0.6),
    "b200": (18, 50.0, 0.6),
    "b300": (18, 50.0, 0.6),
    "gb200": (18, 50.0, 0.6),
    "gb300": (18, 50.0, 0.6),
    "mi355x": (7, 76.8, 0.8),
}
PCIE_US = {"cuda": 1.0, "hip": 2.2}
NETWORK_US = 2.7
# Their NVLink goes through switches outside the host: more trays are one domain.
TRAYS = ("gb200", "gb300")
FILES = ("topo", "gpus", "nvlink", "nics", "amd")
SYSFS = Path("/sys/class/infiniband")


def detect(folder: Path | None = None, hosts: int = 1) -> str:
    """Return the text of a topology's file for this machine.

    Args:
        folder: Recorded outputs to read instead, one file each: topo.txt, gpus.txt, nvlink.txt,
            nics.txt, amd.txt (`k3c.targets.machine` says of what).
        hosts: How many machines like it there are, joined by their network ports.

    Raises:
        DeviceFault: There is no device, or its tool fails or prints something else.
        ConfigError: The devices are of no known kind, or their links are no full mesh.
    """
    dumps = _record() if folder is None else _read(folder)
    if not {"gpus", "topo"} <= dumps.keys() and "amd" not in dumps:
        hint = "run it on the machine itself, or record its tools and name the folder with --from"
        missing = "nvidia-smi, amd-smi or rocm-smi" if folder is None else "topo.txt and gpus.txt"
        raise DeviceFault(f"no device found: {missing} is not there", str(folder or ""), hint)
    machine = read_nvidia(dumps) if "gpus" in dumps else read_amd(dumps)
    text = topology_text(describe(machine, hosts))
    parse_topology(text, "detected", "the detected topology")
    return text


def describe(machine: Machine, hosts: int = 1) -> dict[str, Any]:
    """Return the contents of a topology's file.

    Args:
        machine: What the tools of one host said.
        hosts: Number of hosts like it.

    Raises:
        ConfigError: The devices are of no known kind or of several, or an NVLink or xGMI group is
            no full mesh and has no switch.
    """
    target = _target(machine.names)
    count = len(machine.names)
    fabrics, degraded = _fast(machine, target, hosts)
    if machine.pcie_gbs and count > 1:
        fabrics.append(_pcie(machine, target))
    if machine.ports:
        fabrics.append(_network(machine))
    elif hosts > 1 and not (fabrics and fabrics[0].get("span") == "all"):
        hint = "record nics.txt: a line `mlx5_0 InfiniBand 400 Gb/sec` for each port"
        raise ConfigError(f"{hosts} hosts and no network port found", "nics", hint)
    about = f"{count} x {machine.names[0]}" + (f" on each of {hosts} hosts" if hosts > 1 else "")
    return {
        "schema": 1,
        "about": f"detected: {about}",
        "target": target,
        "ranks": count * hosts,
        "hosts": hosts,
        "ranks_per_host": count,
        "fabric": fabrics,
        "degraded": degraded,
    }


def _target(names: Sequence[str]) -> str:
    if len(set(names)) > 1:
        what = f"found {' and '.join(sorted(set(names)))}, expected devices of one kind"
        raise ConfigError(what, "the devices", "describe those of one kind in a file of your own")
    for product, target in PRODUCTS:
        if product in names[0]:
            return target
    gpus = ", ".join(name for name in known_targets() if not name.startswith("cpu"))
    what = f"found {names[0]!r}, expected one of {gpus}"
    raise ConfigError(what, "the devices", "k3c has no target for this device")


def _fast(
    machine: Machine, target: str, hosts: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the NVLink or xGMI fabric, if there is one, and what of it is degraded."""
    count = len(machine.names)
    groups = [group for group in _groups(machine) if len(group) > 1]
    if not groups:
        return [], []
    most, known_gbs, hop_us = LINKS[target]
    # Behind switches all links of a device lead to every other: their sum is more than it has.
    peers = [_links_of(machine, rank) for group in groups for rank in group]
    switched = max(peers) > most
    paths = most if switched or not machine.up else max(machine.up)
    if not switched:
        _check_mesh(machine, groups)
        paths = min(paths, max(peers))
    kind = "xgmi" if target.startswith("mi") else "nvlink"
    fabric: dict[str, Any] = {"name": kind, "kind": kind, "shape": "switch" if switched else "mesh"}
    whole = groups == [list(range(count))]
    if whole:
        fabric["span"] = "all" if target in TRAYS and hosts > 1 else "host"
    else:
        fabric["groups"] = [[h * count + r for r in g] for h in range(hosts) for g in groups]
    link_gbs = machine.link_gbs or known_gbs
    fabric |= {"gbs": round(paths * link_gbs, 1), "paths": paths, "us": hop_us}
    if switched:
        fabric["multicast"] = True
    fabric["source"] = f"detected: {paths} links of {link_gbs:g} GB/s; us: as in the topologies"
    return [fabric], _degraded(machine, kind, paths, groups, hosts)


def _degraded(
    machine: Machine, kind: str, paths: int, groups: list[list[int]], hosts: int
) -> list[dict[str, Any]]:
    """Return an entry for each number of links that some devices have up and others have not.

    What is down on one machine says nothing of the others that it stands for.
    """
    if not machine.up or hosts > 1:
        return []
    counts = {rank: min(paths, machine.up[rank]) for group in groups for rank in group}
    return [
        {"fabric": kind, "ranks": [r for r, n in sorted(counts.items()) if n == up], "paths_up": up}
        for up in sorted(set(counts.values()))
        if up < paths
    ]


def _links_of(machine: Machine, rank: int) -> int:
    return sum(number for pair, number in machine.links.items() if rank in pair)


def _groups(machine: Machine) -> list[list[int]]:
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(len(machine.names)))
    graph.add_edges_from(machine.links)
    return sorted(sorted(part) for part in nx.connected_components(graph))


def _check_mesh(machine: Machine, groups: list[list[int]]) -> None:
    for group in groups:
        for a in group:
            for b in group:
                if a < b and (a, b) not in machine.links:
                    what = f"devices {a} and {b} of {len(group)} are joined over others only"
                    hint = "a partial mesh is not described by detect: write the file by hand"
                    raise ConfigError(what, "the links", hint)


def _pcie(machine: Machine, target: str) -> dict[str, Any]:
    return {
        "name": "pcie",
        "kind": "pcie",
        "shape": "switch",
        "span": "host",
        "gbs": machine.pcie_gbs,
        "us": PCIE_US["hip" if target.startswith("mi") else "cuda"],
        "source": "detected: generation and width of the slowest slot; us: as in the topologies",
    }


def _network(machine: Machine) -> dict[str, Any]:
    total = sum(port.gbs for port in machine.ports)
    ethernet = any(port.layer == "Ethernet" for port in machine.ports)
    return {
        "name": "network",
        "kind": "ethernet" if ethernet else "infiniband",
        "shape": "switch",
        "span": "all",
        "gbs": round(total / len(machine.names), 1),
        "us": NETWORK_US,
        "source": f"detected: {len(machine.ports)} ports of {total:g} GB/s together, shared by"
        " the devices; us: as in the topologies",
    }


def _read(folder: Path) -> dict[str, str]:
    if not folder.is_dir():
        hint = "name the folder that holds topo.txt and gpus.txt, or amd.txt"
        raise ConfigError("no such folder", str(folder), hint)
    files = {name: folder / f"{name}.txt" for name in FILES}
    return {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.exists()}


def _record() -> dict[str, str]:
    dumps: dict[str, str] = {}
    if shutil.which("nvidia-smi"):
        query = [f"--query-gpu={QUERY}", "--format=csv,noheader"]
        dumps["gpus"] = _run(["nvidia-smi", *query])
        dumps["topo"] = _run(["nvidia-smi", "topo", "-m"])
        dumps["nvlink"] = _run(["nvidia-smi", "nvlink", "-s"], may_fail=True)
    elif shutil.which("amd-smi"):
        dumps["amd"] = _run(["amd-smi", "topology"]) + _run(["amd-smi", "static", "--asic"])
    elif shutil.which("rocm-smi"):
        dumps["amd"] = _run(["rocm-smi", "--showtopo", "--showproductname"])
    if ports := _sysfs_ports(SYSFS):
        dumps["nics"] = ports
    return dumps


def _run(command: list[str], may_fail: bool = False) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode and not may_fail:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it prints nothing"]
        what = f"{' '.join(command)} exits with {done.returncode}: {lines[0]}"
        raise DeviceFault(what, "", "repair the driver, or use --from with recorded outputs")
    return done.stdout


def _sysfs_ports(root: Path) -> str:
    """Return a line for each network port that is up: its name, link layer and rate."""
    lines: list[str] = []
    for port in sorted(root.glob("*/ports/*")):
        words = [(port / name).read_text().strip() for name in ("link_layer", "rate", "state")]
        if "ACTIVE" in words[2]:
            lines.append(f"{port.parts[-3]} {words[0]} {words[1]}")
    return "\n".join(lines)
