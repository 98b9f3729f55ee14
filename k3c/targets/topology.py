"""Several devices and what connects them: hosts, ranks, switches and links.

A topology is read from a toml file (`k3c/targets/topologies/`, or a user's own; the format stands
in `docs/howto/topology.md`). Rates are GB/s (10^9 bytes) in one direction, latencies microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from k3c.errors import ConfigError
from k3c.targets.target import Target, known_targets, load_target

if TYPE_CHECKING:
    import networkx as nx

FOLDER = Path(__file__).parent / "topologies"

Kind = Literal["nvlink", "xgmi", "pcie", "infiniband", "ethernet"]
Shape = Literal["switch", "mesh"]

# Ranks that reach each other over a kind of the lowest tier that a topology has are one island.
TIERS: Mapping[str, int] = {"nvlink": 0, "xgmi": 0, "pcie": 1, "infiniband": 2, "ethernet": 2}
NETWORK_TIER = 2


@dataclass(frozen=True)
class Link:
    """The way from one rank to another.

    Attributes:
        kind: What it is made of.
        gbs: What one direction carries, GB/s.
        us: Time that a small write takes to arrive, microseconds.
        fabric: Name of the fabric in the topology's file.
    """

    kind: Kind
    gbs: float
    us: float
    fabric: str


@dataclass(frozen=True)
class Fabric:
    """One kind of wiring.

    Attributes:
        name: Its name in the file.
        kind: What it is made of.
        shape: `switch`: a rank may spend its whole rate on any other rank of its group; `mesh`: a
            rank's rate is split evenly over direct wires to every other rank of its group.
        groups: Ranks that reach each other, each group ascending; no rank twice.
        wires: Ways that a rank's rate is split into, for each group: the other ranks that a mesh
            was built for; 1 for a switch.
        rates_gbs: What each rank sends with the paths that are up, GB/s.
        full_gbs: What a rank sends with all paths up, GB/s.
        paths: Links or lanes of a rank that make up `full_gbs`.
        us: Time that a small write takes to arrive, microseconds.
        multicast: The switches copy one write to many ranks, and add many into one.
        switches: Switch chips that the paths are spread over; 0 where there are none or unknown.
        source: Where the figures come from.
    """

    name: str
    kind: Kind
    shape: Shape
    groups: tuple[tuple[int, ...], ...]
    wires: tuple[int, ...]
    rates_gbs: Mapping[int, float]
    full_gbs: float
    paths: int
    us: float
    multicast: bool = False
    switches: int = 0
    source: str = ""

    @cached_property
    def group_of(self) -> Mapping[int, int]:
        """Index of the group that each rank is in; a rank with no path up is in none."""
        return {
            rank: index
            for index, group in enumerate(self.groups)
            for rank in group
            if self.rates_gbs[rank] > 0
        }

    def pair_gbs(self, a: int, b: int) -> float:
        """Return what one direction between two ranks carries, GB/s; 0 where it does not lead."""
        group = self.group_of.get(a)
        if group is None or group != self.group_of.get(b):
            return 0.0
        return min(self.rates_gbs[a], self.rates_gbs[b]) / self.wires[group]

    def degraded(self) -> tuple[int, ...]:
        """Return the ranks with fewer paths up than there are, ascending."""
        return tuple(sorted(r for r, gbs in self.rates_gbs.items() if gbs < self.full_gbs))


@dataclass(frozen=True, eq=False)
class Topology:
    """Ranks of one kind of device, and the fabrics between them. Two are equal if they are one.

    Attributes:
        name: Name of its file, without the ending.
        target: The device that every rank is.
        hosts: The ranks of each host, ascending; ranks count from 0 over the hosts.
        fabrics: What connects them, in the order of the file.
        host_ids: Each host's number in the file, which counts missing hosts too.
        rank_ids: Each rank's number in the file, which counts missing ranks too.
        missing: What the file says is not there, in words; empty where nothing is missing.
        about: What the file says it is.
    """

    name: str
    target: Target
    hosts: tuple[tuple[int, ...], ...] = ((0,),)
    fabrics: tuple[Fabric, ...] = ()
    host_ids: tuple[int, ...] = (0,)
    rank_ids: tuple[int, ...] = (0,)
    missing: str = ""
    about: str = ""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.hosts))

    def host_of(self, rank: int) -> int:
        """Return the index in `hosts` of a rank's host."""
        return next(index for index, ranks in enumerate(self.hosts) if rank in ranks)

    def link(self, a: int, b: int) -> Link:
        """Return the way from rank `a` to rank `b`: over the fabric that carries most.

        Raises:
            ConfigError: A rank is not there, or both are the same.
        """
        if a == b or not {a, b} <= set(range(self.ranks)):
            what = f"no link between ranks {a} and {b}"
            raise ConfigError(what, self.name, f"two different ranks of 0..{self.ranks - 1}")
        pair = (min(a, b), max(a, b))
        if pair not in self._links:
            best = max(self.fabrics, key=lambda f: (f.pair_gbs(*pair), -f.us))
            self._links[pair] = Link(best.kind, best.pair_gbs(*pair), best.us, best.name)
        return self._links[pair]

    def bandwidth_gbs(self, a: int, b: int) -> float:
        """Return what one direction from rank `a` to rank `b` carries, GB/s."""
        return self.link(a, b).gbs

    def fabric(self, name: str) -> Fabric:
        """Return a fabric by its name."""
        return next(f for f in self.fabrics if f.name == name)

    @cached_property
    def graph(self) -> nx.Graph[int | str]:
        """Ranks (numbers), switches (strings), and an edge for each wire that some pair uses.

        Edges carry `gbs`, `us`, `kind` and `fabric`; a wire to a switch carries a rank's rate.
        """
        # Its import takes 0.2 s, which a plan that draws nothing need not pay.
        import networkx as nx

        graph: nx.Graph[int | str] = nx.Graph()
        graph.add_nodes_from(range(self.ranks))
        for fabric in self.used_fabrics():
            _add_wires(graph, fabric)
        return graph

    def used_fabrics(self) -> tuple[Fabric, ...]:
        """Return the fabrics that carry most between some pair, in the order of the file.

        A rank that uses none of a fabric's wires sends nothing there.
        """
        used = {(link.fabric, r) for pair, link in self._all_links().items() for r in pair}
        return tuple(
            replace(f, rates_gbs={r: g * ((f.name, r) in used) for r, g in f.rates_gbs.items()})
            for f in self.fabrics
            if any(name == f.name for name, _ in used)
        )

    def islands(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that reach each other over the best kind of link there is.

        NVLink and xGMI are best, PCIe next, a network last. A rank without such a link is an
        island of its own. Islands and their ranks ascend.
        """
        links = self._all_links()
        best = min((TIERS[link.kind] for link in links.values()), default=0)
        near = [pair for pair, link in links.items() if TIERS[link.kind] == best]
        island = {rank: {rank} for rank in range(self.ranks)}
        for a, b in near:
            if island[a] is not island[b]:
                island[a] |= island[b]
                island.update(dict.fromkeys(island[b], island[a]))
        return tuple(sorted({tuple(sorted(part)) for part in island.values()}))

    def bisection_gbs(self) -> float:
        """Return the least that two equal halves can send each other, GB/s; 0 for one rank."""
        from k3c.targets.bisection import bisection_gbs

        return bisection_gbs(self)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What makes it slower than it was built, and what to do; empty where it is whole."""
        from k3c.targets.topology_warnings import warnings_of

        return warnings_of(self)

    def degraded(self) -> tuple[int, ...]:
        """Return the ranks with paths down on a fabric of the best kind, ascending."""
        best = min((TIERS[f.kind] for f in self.fabrics), default=0)
        fabrics = [f for f in self.fabrics if TIERS[f.kind] == best]
        return tuple(sorted({rank for f in fabrics for rank in f.degraded()}))

    def reduced(self) -> Topology | None:
        """Return the topology without hosts that have degraded ranks; None where there is none.

        On one host the degraded ranks themselves go.
        """
        bad = set(self.degraded())
        if len(self.hosts) > 1:
            bad = {rank for ranks in self.hosts if bad & set(ranks) for rank in ranks}
        keep = [rank for rank in range(self.ranks) if rank not in bad]
        return self.subset(keep) if bad and keep else None

    def subset(self, ranks: Sequence[int]) -> Topology:
        """Return the topology of some of the ranks, counted from 0 again in ascending order."""
        new = {rank: index for index, rank in enumerate(sorted(set(ranks)))}
        hosts = [tuple(new[r] for r in host if r in new) for host in self.hosts]
        kept = [index for index, host in enumerate(hosts) if host]
        return replace(
            self,
            hosts=tuple(hosts[index] for index in kept),
            host_ids=tuple(self.host_ids[index] for index in kept),
            rank_ids=tuple(self.rank_ids[rank] for rank in sorted(new)),
            fabrics=tuple(_renumbered(f, new) for f in self.fabrics),
            missing="",
        )

    @cached_property
    def _links(self) -> dict[tuple[int, int], Link]:
        """Links that were asked for, by pair; filled by `link`."""
        return {}

    def _all_links(self) -> dict[tuple[int, int], Link]:
        ranks = range(self.ranks)
        return {(a, b): self.link(a, b) for a in ranks for b in ranks if a < b}


def known_topologies() -> tuple[str, ...]:
    """Return the names that `load_topology` takes: of files and of single devices, sorted."""
    files = {path.stem for path in FOLDER.glob("*.toml")}
    return tuple(sorted(files | set(known_targets())))


def load_topology(name_or_path: str | Path) -> Topology:
    """Read a topology.

    Args:
        name_or_path: A name of `known_topologies`, or the path of a toml file (a name that ends in
            .toml or holds a slash). A device's name is the topology of one.

    Raises:
        ConfigError: The name is unknown, or the file cannot be read or does not hold a topology.
        DeviceFault: The name is `cpu` on a machine that no target fits.
    """
    text = str(name_or_path)
    if text.endswith(".toml") or "/" in text or isinstance(name_or_path, Path):
        return _from_file(Path(name_or_path), shipped=False)
    path = FOLDER / f"{text}.toml"
    if path.is_file():
        return _from_file(path, shipped=True)
    if text in known_targets():
        return Topology(text, load_target(text), about="one device")
    hint = f"known topologies: {', '.join(known_topologies())}; or the path of your own .toml"
    raise ConfigError(f"unknown target or topology {text!r}", "--target", hint)


def _from_file(path: Path, shipped: bool) -> Topology:
    from k3c.targets.topology_file import read_topology

    return read_topology(path, shipped)


def _add_wires(graph: nx.Graph[int | str], fabric: Fabric) -> None:
    for index, group in enumerate(fabric.groups):
        members = [rank for rank in group if fabric.rates_gbs[rank] > 0]
        if len(members) < 2:
            continue
        wire = {"us": fabric.us, "kind": fabric.kind, "fabric": fabric.name}
        if fabric.shape == "switch":
            for rank in members:
                graph.add_edge(rank, f"{fabric.name}#{index}", gbs=fabric.rates_gbs[rank], **wire)
            continue
        for a, b in _pairs(members):
            graph.add_edge(a, b, gbs=fabric.pair_gbs(a, b), **wire)


def _pairs(ranks: Sequence[int]) -> Iterable[tuple[int, int]]:
    return ((a, b) for i, a in enumerate(ranks) for b in ranks[i + 1 :])


def _renumbered(fabric: Fabric, new: Mapping[int, int]) -> Fabric:
    kept = [tuple(new[rank] for rank in group if rank in new) for group in fabric.groups]
    return replace(
        fabric,
        groups=tuple(group for group in kept if group),
        wires=tuple(count for count, group in zip(fabric.wires, kept, strict=True) if group),
        rates_gbs={new[rank]: gbs for rank, gbs in fabric.rates_gbs.items() if rank in new},
    )
