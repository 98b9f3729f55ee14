"""What the links of a group of ranks allow: its slowest way, its islands, multicast."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from k3c.targets.topology import NETWORK_TIER, TIERS, Kind, Topology


@dataclass(frozen=True)
class Group:
    """Some ranks of a topology, seen by a collective.

    Attributes:
        topology: The topology.
        ranks: The ranks, ascending.
        parts: The ranks of each island of the topology that has some.
        kind: Kind of the slowest link between two of them.
        hop_us: Time of one small write over that link, microseconds.
        rate_gbs: What the slowest rank sends the others over such links, GB/s.
        direct: A rank may read and write the memory of every other.
        multicast: The switches between them copy and add, and no path of theirs is down.
        hosts: Hosts that they are on.
    """

    topology: Topology
    ranks: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    kind: Kind
    hop_us: float
    rate_gbs: float
    direct: bool
    multicast: bool
    hosts: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def lanes(self) -> int:
        """Ranks of the smallest part: as many exchanges between the parts run side by side."""
        return min(map(len, self.parts))

    def inner(self) -> tuple[Group, ...]:
        """Return the group of each part that has two ranks or more."""
        return tuple(group_of(self.topology, part) for part in self.parts if len(part) > 1)

    def outer(self) -> Group:
        """Return one rank of each part, of the lane with the slowest links."""
        lanes = [tuple(sorted(part[i] for part in self.parts)) for i in range(self.lanes)]
        return min((group_of(self.topology, lane) for lane in lanes), key=lambda g: g.rate_gbs)


@lru_cache(maxsize=1024)
def group_of(topology: Topology, ranks: tuple[int, ...]) -> Group:
    """Return what the links between some ranks allow.

    Args:
        topology: The topology.
        ranks: Two or more of its ranks, ascending.
    """
    pairs = {pair: topology.link(*pair) for pair in combinations(ranks, 2)}
    slowest = min(pairs.values(), key=lambda link: (link.gbs, -link.us))
    members = set(ranks)
    shares = [tuple(r for r in island if r in members) for island in _islands(topology)]
    parts = tuple(part for part in shares if part)
    fabric = topology.fabric(slowest.fabric)
    one_fabric = all(link.fabric == slowest.fabric for link in pairs.values())
    rate_gbs = slowest.gbs
    if fabric.shape == "mesh" and one_fabric:
        rate_gbs = min(
            sum(link.gbs for pair, link in pairs.items() if rank in pair) for rank in ranks
        )
    near = all(TIERS[link.kind] < NETWORK_TIER for link in pairs.values())
    return Group(
        topology,
        ranks,
        parts,
        slowest.kind,
        max(link.us for link in pairs.values()),
        rate_gbs,
        # Peers across islands are reached by messages, as public libraries do; a pair may map each
        # other's memory over PCIe.
        near and (len(parts) == 1 or len(ranks) == 2),
        fabric.multicast and one_fabric and not members & set(fabric.degraded()),
        sum(bool(members & set(host)) for host in topology.hosts),
    )


@lru_cache(maxsize=64)
def _islands(topology: Topology) -> tuple[tuple[int, ...], ...]:
    return topology.islands()
