"""Choose how a collective is done, and estimate how long it takes.

Each implementation that the links of a group allow is estimated by a latency and a bandwidth term
for each of its phases, fitted to public measurements (`collective_fit.py`); the fastest is chosen.
The error bar is the largest error of a measurement that was left out of its fit, wider where the
estimate leaves what was measured: `STEP` for each doubling of the ranks beyond it, for another
device of the same class, and for a kind of collective without measurements; two for another class
and for links other than NVLink and xGMI.

Source: `measured/collectives.toml` for fitted constants; those below name theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2
from typing import Literal

from k3c.targets.collective_fit import Model, device_class, models, wire_bytes
from k3c.targets.collective_group import Group, group_of
from k3c.targets.topology import TIERS, Topology

CollectiveKind = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "dispatch", "combine", "send"
]

# Share of the rate that long transfers reach. PCIe: 52 of 63 GB/s for peer reads (b12x pull request
# 139); network: 46 to 48 of 50 GB/s a port (nccl-tests issue 290).
EFFICIENCY = {"pcie": 0.83, "infiniband": 0.93, "ethernet": 0.93}
# What an extrapolation adds to a relative error; a choice of ours, not a fit.
STEP = 0.25


@dataclass(frozen=True)
class Phase:
    """One part of a collective: all ranks do it at the same time, then the next begins.

    Attributes:
        name: What it does, with what, as in `reduce_scatter.direct`.
        us: Expected time, microseconds.
        spread: Relative error: the time lies between us / (1 + spread) and us x (1 + spread).
        wire_bytes: Bytes that one rank sends or takes in, whichever is more.
        source: Where the estimate comes from.
    """

    name: str
    us: float
    spread: float
    wire_bytes: float
    source: str


@dataclass(frozen=True)
class Choice:
    """One way to do a collective.

    Attributes:
        implementation: Its name; it goes into the command of a plan.
        us: Expected time, microseconds.
        low_us: Low end of the error bar, microseconds.
        high_us: High end of the error bar, microseconds.
        wire_bytes: Bytes that one rank sends or takes in over all phases, whichever is more.
        source: Where the estimate comes from, and what of it was not measured.
        phases: Its parts, in order.
    """

    implementation: str
    us: float
    low_us: float
    high_us: float
    wire_bytes: int
    source: str
    phases: tuple[Phase, ...] = ()


def choose(
    kind: CollectiveKind, nbytes: int, ranks: Sequence[int], topology: Topology, top_k: int = 16
) -> Choice:
    """Return the fastest way to do a collective.

    Args:
        kind: What is done. `dispatch` gives every rank the rows that its experts need; `combine`
            adds what the experts made and gives it back to the rank of each row; `send` moves a
            tensor from the first rank to the second.
        nbytes: Bytes of the whole tensor: what every rank holds before an all_reduce and a
            reduce_scatter, and after an all_gather; the rows of all ranks for dispatch and combine.
        ranks: The ranks that take part.
        topology: What connects them.
        top_k: Experts of a row: how many ranks a one-sided exchange sends it to.
    """
    return options(kind, nbytes, ranks, topology, top_k)[0]


def options(
    kind: CollectiveKind, nbytes: int, ranks: Sequence[int], topology: Topology, top_k: int = 16
) -> tuple[Choice, ...]:
    """Return every way that the links allow, fastest first; arguments as of `choose`."""
    return _options(kind, nbytes, tuple(sorted(set(ranks))), topology, top_k)


@lru_cache(maxsize=4096)
def _options(
    kind: CollectiveKind, nbytes: int, members: tuple[int, ...], topology: Topology, top_k: int
) -> tuple[Choice, ...]:
    assert nbytes >= 0, f"{kind} of {nbytes} bytes"
    if len(members) < 2:
        return (Choice("none", 0.0, 0.0, 0.0, 0, "one rank has nobody to talk to"),)
    group = group_of(topology, members)
    found = [_choice(name, phases) for name, phases in _ways(kind, nbytes, group, top_k)]
    return tuple(sorted(found, key=lambda c: (c.us, c.implementation)))


def _choice(name: str, phases: Sequence[Phase]) -> Choice:
    sources = list(dict.fromkeys(phase.source for phase in phases))
    return Choice(
        name,
        sum(p.us for p in phases),
        sum(p.us / (1 + p.spread) for p in phases),
        sum(p.us * (1 + p.spread) for p in phases),
        round(sum(p.wire_bytes for p in phases)),
        "; ".join(sources),
        tuple(phases),
    )


Ways = Iterator[tuple[str, list[Phase]]]


def _ways(kind: CollectiveKind, nbytes: int, group: Group, top_k: int) -> Ways:
    if kind == "send":
        yield "copy", [_send(group, nbytes)]
    elif kind in ("dispatch", "combine"):
        # The same rows can go to everybody, or only where they are needed.
        whole = "all_gather" if kind == "dispatch" else "reduce_scatter"
        for name, phases in _ways(whole, nbytes, group, top_k):
            yield f"{whole}_{name}", phases
        yield "one_sided", [_one_sided(kind, group, nbytes, top_k)]
    else:
        yield from (
            _all_reduce(group, nbytes) if kind == "all_reduce" else _half(kind, group, nbytes)
        )


def _all_reduce(group: Group, nbytes: int) -> Ways:
    kind = "all_reduce"
    if group.direct:
        yield "one_shot", [_flat(kind, "one_shot", group, nbytes)]
        yield "two_shot", [_flat(kind, "two_shot", group, nbytes)]
    if group.multicast and group.size > 2:
        yield "nvls", [_flat(kind, "nvls", group, nbytes)]
        yield "nvls_one_shot", [_flat(kind, "nvls_one_shot", group, nbytes)]
    yield "ring", [_messages(kind, group, nbytes, "ring")]
    yield "tree", [_messages(kind, group, nbytes, "tree")]
    if len(group.parts) > 1 and group.inner():
        share = ceil(nbytes / group.lanes)
        yield (
            "hierarchical",
            [
                _slowest("reduce_scatter", group, nbytes),
                *_best("all_reduce", group.outer(), share),
                _slowest("all_gather", group, nbytes),
            ],
        )
        yield (
            "hierarchical_one_shot",
            [_slowest("all_reduce", group, nbytes), *_best("all_reduce", group.outer(), nbytes)],
        )


def _half(kind: CollectiveKind, group: Group, nbytes: int) -> Ways:
    """Yield the ways of a reduce-scatter or an all-gather: half of an all-reduce."""
    if group.direct:
        yield "direct", [_flat(kind, "one_shot", group, nbytes)]
    yield "ring", [_messages(kind, group, nbytes, "ring")]
    if len(group.parts) > 1 and group.inner():
        inside = _slowest(kind, group, nbytes)
        between = _best(kind, group.outer(), ceil(nbytes / group.lanes))
        whole = [*between, inside] if kind == "all_gather" else [inside, *between]
        yield "hierarchical", whole


def _best(kind: CollectiveKind, group: Group, nbytes: int) -> tuple[Phase, ...]:
    return options(kind, nbytes, group.ranks, group.topology)[0].phases


def _slowest(kind: CollectiveKind, group: Group, nbytes: int) -> Phase:
    """Return the phase inside the parts; they do it side by side, and the slowest counts."""
    phases = [_best(kind, part, nbytes) for part in group.inner()]
    return max((phase for (phase,) in phases), key=lambda phase: phase.us)


def _flat(kind: CollectiveKind, family: str, group: Group, nbytes: int) -> Phase:
    """Return a collective in which every rank reaches every other directly."""
    model, device = models()[family], _device(group)
    half = kind != "all_reduce"
    wire = nbytes * (group.size - 1) / group.size
    if not half:
        wire = wire_bytes(family, group.size, nbytes)
    # Latency was measured on NVLink and xGMI; a slower link adds its longer way for each phase.
    longer = max(0.0, group.hop_us - _measured_hop_us(model, device))
    rounds = 2 if family == "two_shot" else 1
    latency_us = max(_across_hosts_us(group), model.latency(device, group.size))
    us = latency_us + rounds * longer + _data_us(model, group, wire)
    spread, source = _trust(model, group, 1 if half else 0)
    return Phase(f"{kind}.{'direct' if half else family}", us, spread, wire, source)


def _messages(kind: CollectiveKind, group: Group, nbytes: int, shape: str) -> Phase:
    """Return a ring or a tree of messages, which any link carries."""
    model, device = models()["ring"], _device(group)
    parts, rounds = len(group.parts), 2 if kind == "all_reduce" else 1
    inner = group.inner()
    near_us = max((part.hop_us for part in inner), default=group.hop_us)
    if shape == "ring":
        far, near = rounds * (parts - 1), rounds * (group.size - parts)
        wire = rounds * nbytes * (group.size - 1) / group.size
    else:
        widest = max(map(len, group.parts))
        far, near = 2 * ceil(log2(parts)), 2 * ceil(log2(widest))
        wire = wire_bytes("tree", group.size, nbytes)
    us = model.latency(device, group.size) + far * group.hop_us + near * near_us
    # A ring crosses from part to part on every lane at once.
    times = [_data_us(model, part, wire) for part in inner]
    if parts > 1 or not inner:
        times.append(_data_us(model, group, wire / group.lanes))
    spread, source = _trust(model, group, 0 if shape == "ring" and rounds == 2 else 1)
    return Phase(f"{kind}.{shape}", us + max(times), spread, wire, source)


def _one_sided(kind: CollectiveKind, group: Group, nbytes: int, top_k: int) -> Phase:
    """Return an exchange in which a rank writes each row to the ranks of its experts alone."""
    model, device, size = models()["one_sided"], _device(group), group.size
    reached = size * (1 - (1 - 1 / size) ** top_k) * (size - 1) / size
    wire = nbytes / size * reached
    longer = max(0.0, group.hop_us - _measured_hop_us(model, device))
    far = wire * (size - group.lanes) / (size - 1) if len(group.parts) > 1 else wire
    times = [_data_us(model, group, far)]
    times += [_data_us(model, part, wire - far) for part in group.inner() if wire > far]
    us = model.latency(device, size) + longer + max(times)
    spread, source = _trust(model, group, 0)
    return Phase(f"{kind}.one_sided", us, spread, wire, source)


def _send(group: Group, nbytes: int) -> Phase:
    """Return a copy from one rank to another."""
    device = _device(group)
    model = models()["one_shot" if group.direct else "ring"]
    longer = group.hop_us - (_measured_hop_us(model, device) if group.direct else 0.0)
    us = max(_across_hosts_us(group), model.latency(device, 2)) + max(0.0, longer)
    us += _data_us(models()["one_sided"], group, nbytes)
    spread, source = _trust(model, group, 1)
    return Phase("send.copy", us, spread, float(nbytes), source)


def _across_hosts_us(group: Group) -> float:
    """Return the least latency of direct access between hosts of one NVLink domain.

    Direct reads were measured inside a host only. The fastest that is public across trays is the
    multicast in one shot, at more than twice that; nothing is assumed to be faster.
    """
    if group.hosts == 1 or not group.direct:
        return 0.0
    return models()["nvls_one_shot"].latency(_device(group), group.size)


def _device(group: Group) -> str:
    return device_class(group.topology.target.name)


def _measured_hop_us(model: Model, device: str) -> float:
    hops = [row.hop_us for row in model.rows if device_class(row.target) == device]
    return hops[0] if hops else model.rows[0].hop_us


def _data_us(model: Model, group: Group, wire: float) -> float:
    share = EFFICIENCY.get(group.kind, model.share_of(_device(group)))
    return wire / (share * group.rate_gbs * 1e3)


def _trust(model: Model, group: Group, steps: int) -> tuple[float, str]:
    """Return the relative error of an estimate, and what it rests on."""
    target, known = group.topology.target.name, model.max_ranks(_device(group))
    beyond = [] if steps == 0 else ["another collective"]
    if not known:
        steps += 2
        beyond.append(f"no device like {target}")
    else:
        if group.size > known:
            steps += ceil(log2(group.size / known))
            beyond.append(f"{group.size} ranks where {known} were measured")
        if all(row.target != target for row in model.rows):
            steps += 1
            beyond.append(f"{target} like others of its class")
    if TIERS[group.kind] > 0:
        steps += 2
        beyond.append(f"over {group.kind}")
    return model.error + STEP * steps, _source(model, beyond)


def _source(model: Model, beyond: Sequence[str]) -> str:
    sizes = sorted({row.ranks for row in model.rows})
    targets = ", ".join(sorted({row.target for row in model.rows}))
    text = (
        f"{model.rows[0].implementation}: fitted to {len(model.rows)} public rows ({targets};"
        f" {sizes[0]}..{sizes[-1]} ranks), each predicted within {model.error:.0%} without it"
    )
    return f"{text}; extrapolated: {', '.join(beyond)}" if beyond else text
