"""Topology files for tests: small texts, and random ones for properties."""

from pathlib import Path

from hypothesis import strategies as st

from k3c.targets.topology_file import parse_topology

MACHINES = Path(__file__).parents[1] / "data/machines"

ISLANDS = """
schema = 1
target = "h200"
ranks = 8
hosts = 1
ranks_per_host = 8

[[fabric]]
name = "bridge"
kind = "nvlink"
shape = "mesh"
groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
gbs = 450.0
paths = 18
us = 0.6
source = "two 4-way bridges"

[[fabric]]
name = "pcie"
kind = "pcie"
shape = "switch"
span = "host"
gbs = 63.0
us = 1.0
source = "16 lanes of PCIe 5"
"""

PCIE_ONLY = """
schema = 1
target = "h200"
ranks = 8
hosts = 1
ranks_per_host = 8

[[fabric]]
name = "pcie"
kind = "pcie"
shape = "switch"
span = "host"
gbs = 63.0
us = 1.0
source = "16 lanes of PCIe 5"
"""


def parse(text, name="mine"):
    """Return the topology of a text."""
    return parse_topology(text, name, f"{name}.toml")


def rack(paths=8, degraded="", missing="", ranks=72):
    """Return the text of a rack of 18 trays of 4 GPUs behind NVLink switches."""
    return f"""
schema = 1
target = "gb300"
ranks = {ranks}
hosts = 18
ranks_per_host = 4
{missing}

[[fabric]]
name = "nvlink"
kind = "nvlink"
shape = "switch"
span = "all"
gbs = 900.0
paths = {paths}
us = 0.6
multicast = true
source = "made up"

[[fabric]]
name = "network"
kind = "infiniband"
shape = "switch"
span = "all"
gbs = 100.0
us = 2.7
source = "made up"

{degraded}
"""


@st.composite
def texts(draw, max_hosts=3, max_per_host=4):
    """Draw the text of a topology: hosts with switches, meshes or islands, some links degraded."""
    hosts = draw(st.integers(1, max_hosts))
    per_host = draw(st.integers(1, max_per_host))
    total = hosts * per_host
    lines = ["schema = 1", 'target = "h200"', f"hosts = {hosts}", f"ranks_per_host = {per_host}"]
    gone = draw(st.sets(st.integers(0, total - 1), max_size=max(0, min(2, total - 1))))
    lines += [f"ranks = {total - len(gone)}", f"missing_ranks = {sorted(gone)}"]
    if draw(st.booleans()):
        lines += _fabric("nvlink", "nvlink", draw(st.sampled_from(["switch", "mesh"])), 450.0)
        # Islands never cross hosts: each host's ranks are cut in two where the draw says so.
        cut = draw(st.integers(0, per_host))
        groups = []
        for host in range(hosts):
            ranks = list(range(host * per_host, (host + 1) * per_host))
            groups += [part for part in (ranks[:cut], ranks[cut:]) if part]
        lines.append(f"groups = {groups}")
    lines += [*_fabric("pcie", "pcie", "switch", 63.0), 'span = "host"']
    lines += [*_fabric("network", "infiniband", "switch", 50.0), 'span = "all"']
    for name in ("nvlink", "pcie"):
        if f'name = "{name}"' in lines and draw(st.booleans()):
            bad = draw(st.sets(st.integers(0, total - 1), min_size=1, max_size=total))
            lines += ["[[degraded]]", f'fabric = "{name}"', f"ranks = {sorted(bad)}"]
            lines.append(f"paths_up = {draw(st.integers(0, 16))}")
    return "\n".join(lines)


def _fabric(name, kind, shape, gbs):
    return [
        "[[fabric]]",
        f'name = "{name}"',
        f'kind = "{kind}"',
        f'shape = "{shape}"',
        f"gbs = {gbs}",
        "paths = 16",
        "us = 1.0",
        'source = "drawn"',
    ]
