"""What the tools of a machine say of its devices and links: parsers of their output.

Dumps, by name: `topo` (nvidia-smi topo -m), `gpus` (nvidia-smi --query-gpu=... as in `QUERY`),
`nvlink` (nvidia-smi nvlink -s), `nics` (a line `name layer rate` for each port, as sysfs has it),
`amd` (amd-smi topology and static --asic, or rocm-smi --showtopo --showproductname).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from k3c.errors import DeviceFault

QUERY = "index,name,pcie.link.gen.max,pcie.link.width.max"

# GB/s of one lane and direction by generation, after line coding.
PCIE_LANE_GBS = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
# Rates of one link and direction, less framing: NVLink 2 to 4, NVLink 5.
NVLINK_GBS = (25.0, 50.0)

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NVLINK_CELL = re.compile(r"^NV(\d+)$")


@dataclass(frozen=True)
class Port:
    """A network port: its link layer (InfiniBand or Ethernet) and what it carries, GB/s."""

    layer: str
    gbs: float


@dataclass(frozen=True)
class Machine:
    """Devices of one machine, numbered as its tools do.

    Attributes:
        names: Product name of each device.
        links: Direct or switched links between two devices, by pair (lower number first).
        up: Links that are up on each device; empty where no tool says it.
        link_gbs: What one of those links carries in one direction, GB/s; 0 where unknown.
        pcie_gbs: What the PCIe slot of the slowest device carries, GB/s; 0 where unknown.
        ports: Network ports.
    """

    names: tuple[str, ...]
    links: Mapping[tuple[int, int], int]
    up: tuple[int, ...] = ()
    link_gbs: float = 0.0
    pcie_gbs: float = 0.0
    ports: tuple[Port, ...] = ()


def read_nvidia(dumps: Mapping[str, str]) -> Machine:
    """Return what nvidia-smi says.

    Args:
        dumps: Outputs `gpus` and `topo`; `nvlink` and `nics` where there are any.

    Raises:
        DeviceFault: An output is not what nvidia-smi prints.
    """
    names, pcie = _gpus(dumps["gpus"])
    up, link_gbs = _nvlink_status(dumps.get("nvlink", ""), len(names))
    links = _matrix(dumps["topo"], len(names))
    return Machine(names, links, up, link_gbs, pcie, _ports(dumps.get("nics", "")))


def read_amd(dumps: Mapping[str, str]) -> Machine:
    """Return what amd-smi or rocm-smi says.

    Args:
        dumps: Output `amd`; `nics` where there is any.

    Raises:
        DeviceFault: The output has no product names or no table of link types.
    """
    text = _ANSI.sub("", dumps["amd"])
    names = re.findall(r"(?:Card Series|MARKET_NAME)\s*:\s*(\S.*?)\s*$", text, re.MULTILINE)
    cells = _link_types(text)
    if not names or len(names) != len(cells):
        what = f"found {len(names)} product names and a table of {len(cells)} devices"
        hint = "record amd-smi topology and amd-smi static --asic, one after the other"
        raise DeviceFault(what, "amd", hint)
    links = {
        (a, b): 1
        for a, row in enumerate(cells)
        for b, cell in enumerate(row)
        if a < b and cell == "XGMI"
    }
    return Machine(tuple(names), links, ports=_ports(dumps.get("nics", "")))


def _gpus(text: str) -> tuple[tuple[str, ...], float]:
    names: list[str] = []
    rates: list[float] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4 or fields[0] != str(len(names)):
            what = f"found {line!r}, expected {len(names)}, name, PCIe generation, PCIe width"
            raise DeviceFault(what, "gpus", f"nvidia-smi --query-gpu={QUERY} --format=csv,noheader")
        names.append(fields[1])
        if fields[2].isdecimal() and fields[3].isdecimal():
            rates.append(PCIE_LANE_GBS.get(int(fields[2]), 0.0) * int(fields[3]))
    if not names:
        raise DeviceFault("found no GPU, expected one or more", "gpus", "check the driver")
    return tuple(names), round(min(rates, default=0.0), 1)


def _matrix(text: str, count: int) -> dict[tuple[int, int], int]:
    """Return the NVLinks of each pair of the table of `nvidia-smi topo -m`."""
    links: dict[tuple[int, int], int] = {}
    seen: set[int] = set()
    for line in _ANSI.sub("", text).splitlines():
        words = line.split()
        # The header also begins with GPU0, but its second word is a name and not a cell.
        found = re.match(r"^GPU(\d+)$", words[0]) if len(words) > 1 else None
        if found is None or re.match(r"^(GPU|NIC|mlx)", words[1]):
            continue
        row = int(found[1])
        if len(words) <= count:
            what = f"row GPU{row} has {len(words) - 1} cells, expected {count} or more"
            raise DeviceFault(what, "topo", "record nvidia-smi topo -m of the same machine")
        seen.add(row)
        for column, cell in enumerate(words[1 : count + 1]):
            nvlinks = _NVLINK_CELL.match(cell)
            if nvlinks and column != row:
                links[min(row, column), max(row, column)] = int(nvlinks[1])
    if seen != set(range(count)):
        what = f"found rows of {len(seen)} GPUs, expected {count}"
        raise DeviceFault(what, "topo", "record nvidia-smi topo -m of the same machine")
    return links


def _nvlink_status(text: str, count: int) -> tuple[tuple[int, ...], float]:
    """Return the links up on each device, and the rate of one; nothing where there are none."""
    up = [0] * count
    gpu, best = -1, 0.0
    for line in _ANSI.sub("", text).splitlines():
        if head := re.match(r"^GPU (\d+):", line):
            gpu = int(head[1])
        elif rate := re.match(r"^\s+Link \d+: ([0-9.]+) GB/s", line):
            if not 0 <= gpu < count:
                what = f"found a link of GPU {gpu}, expected 0..{count - 1}"
                raise DeviceFault(what, "nvlink", "record nvidia-smi nvlink -s of the same machine")
            up[gpu] += 1
            best = max(best, float(rate[1]))
    if not any(up):
        return (), 0.0
    return tuple(up), max((gbs for gbs in NVLINK_GBS if gbs <= best), default=best)


def _ports(text: str) -> tuple[Port, ...]:
    found = re.findall(r"^\S+ (InfiniBand|Ethernet) (\d+) Gb/sec", text, re.MULTILINE)
    return tuple(Port(layer, int(gbits) / 8) for layer, gbits in found)


def _link_types(text: str) -> list[list[str]]:
    """Return the cells of the table of link types: SELF or 0, XGMI, PCIE."""
    start = re.search(r"^.*link type.*$", text, re.IGNORECASE | re.MULTILINE)
    rows: list[list[str]] = []
    for line in text[start.end() :].splitlines()[1:] if start else []:
        cells = [word for word in line.split() if word in ("SELF", "0", "XGMI", "PCIE")]
        if cells and len(cells) == len(rows[0] if rows else cells):
            rows.append(cells)
        elif rows:
            break
    return rows
