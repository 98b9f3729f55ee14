"""What a topology lacks, in words: degraded ranks, missing ones, islands, no fast link."""

from __future__ import annotations

from itertools import groupby, pairwise

from k3c.targets.topology import TIERS, Fabric, Topology


def warnings_of(topology: Topology) -> tuple[str, ...]:
    """Return one sentence for each thing that makes a topology slower than its wiring could be."""
    found = [line for fabric in topology.fabrics for line in _degraded(topology, fabric)]
    if found:
        found.append(_reduced(topology))
    if topology.missing:
        found.append(f"{topology.missing} missing: {topology.ranks} ranks are left")
    return (*found, *_islands(topology))


def rank_ranges(ranks: tuple[int, ...]) -> str:
    """Return numbers as ranges: `0..3, 8`."""
    parts: list[str] = []
    for _, run in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        span = f"{numbers[0]}..{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
        parts.append(span)
    return ", ".join(parts)


def _degraded(topology: Topology, fabric: Fabric) -> list[str]:
    lines: list[str] = []
    for index, host in enumerate(topology.hosts):
        bad = [rank for rank in host if rank in fabric.degraded()]
        for gbs in sorted({fabric.rates_gbs[rank] for rank in bad}):
            ranks = tuple(rank for rank in bad if fabric.rates_gbs[rank] == gbs)
            up = round(fabric.paths * gbs / fabric.full_gbs)
            lines.append(
                f"host {topology.host_ids[index]} (ranks {rank_ranges(ranks)}): {up} of"
                f" {fabric.paths} {fabric.name} paths are up, {gbs:g} of {fabric.full_gbs:g} GB/s"
            )
    return lines


def _reduced(topology: Topology) -> str:
    smaller = topology.reduced()
    if smaller is None:
        return "every host is degraded: no smaller domain is whole"
    text = f"a domain without the degraded ranks has {smaller.ranks} of {topology.ranks} ranks"
    gone = sorted(set(topology.host_ids) - set(smaller.host_ids))
    key = "missing_hosts"
    if not gone:
        gone = sorted(set(topology.rank_ids) - set(smaller.rank_ids))
        key = "missing_ranks"
    numbers = ", ".join(map(str, gone))
    return f"{text} at full rate: add {numbers} to {key} and set ranks = {smaller.ranks}"


def _islands(topology: Topology) -> list[str]:
    if topology.ranks < 2:
        return []
    islands = topology.islands()
    inside = [(a, b) for island in islands for a, b in pairwise(island)]
    lines: list[str] = []
    if all(TIERS[topology.link(a, b).kind] > 0 for a, b in inside):
        best = max(
            (topology.link(a, b) for a, b in inside), key=lambda link: link.gbs, default=None
        )
        if best is not None:
            lines.append(
                f"no NVLink or xGMI: ranks of a host talk over {best.kind} at {best.gbs:g} GB/s"
            )
    # Hosts that meet over a network are as they were built; a host in two parts is worth a word.
    if any(
        len(set(island) & set(host)) < len(host)
        for island in islands
        for host in topology.hosts
        if set(island) & set(host)
    ):
        lines.append(_between(topology, islands))
    return lines


def _between(topology: Topology, islands: tuple[tuple[int, ...], ...]) -> str:
    link = topology.link(islands[0][0], islands[1][0])
    sizes = sorted({len(island) for island in islands})
    words = " or ".join(map(str, sizes))
    text = f"{len(islands)} islands of {words} ranks: {link.kind} at {link.gbs:g} GB/s between them"
    pairs = [(a, b) for island in islands for a, b in pairwise(island)]
    if pairs:
        near = topology.link(*pairs[0])
        text += f", {near.kind} at {near.gbs:g} GB/s inside"
    return f"{text}; collectives of more than an island go in two levels"
