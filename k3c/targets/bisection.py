"""The least rate between two equal halves of a topology."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations

from k3c.targets.topology import Fabric, Topology

# Every split of this many kinds of rank is tried: 2^12 x 12 splits.
MAX_CLASSES = 12


def bisection_gbs(topology: Topology) -> float:
    """Return the least that two halves of the ranks can send each other, one direction, GB/s.

    Ranks with the same wiring are interchangeable, and the rate across a cut is concave in how
    many of each kind are on one side: the least is where at most one kind is split. All such cuts
    are tried; above `MAX_CLASSES` kinds only those that keep the order of hosts and of rates, which
    is exact where hosts are alike. An odd rank is on the larger side.

    Args:
        topology: Two ranks or more; one rank has no halves and gives 0.
    """
    if topology.ranks < 2:
        return 0.0
    fabrics = list(topology.used_fabrics())
    return min(sum(_across(f, half) for f in fabrics) for half in _halves(topology, fabrics))


def _across(fabric: Fabric, half: frozenset[int]) -> float:
    """Return what a fabric carries from one half to the other, GB/s."""
    total = 0.0
    for index, group in enumerate(fabric.groups):
        inside = [r for r in group if r in half]
        outside = [r for r in group if r not in half]
        if fabric.shape == "switch":
            sides = [sum(fabric.rates_gbs[r] for r in side) for side in (inside, outside)]
            total += min(sides)
        else:
            wires = fabric.wires[index]
            total += sum(
                min(fabric.rates_gbs[a], fabric.rates_gbs[b]) / wires
                for a in inside
                for b in outside
            )
    return total


def _halves(topology: Topology, fabrics: list[Fabric]) -> Iterator[frozenset[int]]:
    size = topology.ranks // 2
    classes: dict[tuple[tuple[str, int, float], ...], list[int]] = defaultdict(list)
    for rank in range(topology.ranks):
        wiring = tuple(
            (f.name, index, f.rates_gbs[rank])
            for f in fabrics
            for index, group in enumerate(f.groups)
            if rank in group
        )
        classes[wiring].append(rank)
    kinds = [classes[key] for key in sorted(classes)]
    if len(kinds) > MAX_CLASSES:
        ordered = [rank for host in topology.hosts for rank in host]
        slow = sorted(ordered, key=lambda r: sum(f.rates_gbs.get(r, 0.0) for f in fabrics))
        yield frozenset(ordered[:size])
        yield frozenset(slow[:size])
        return
    for count in range(len(kinds) + 1):
        for whole in combinations(range(len(kinds)), count):
            taken = [rank for index in whole for rank in kinds[index]]
            for index, kind in enumerate(kinds):
                need = size - len(taken)
                if index not in whole and 0 <= need <= len(kind):
                    yield frozenset([*taken, *kind[:need]])
            if len(taken) == size:
                yield frozenset(taken)
