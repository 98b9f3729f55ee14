"""Steps of peers' engines: their kernels' public times, their messages, their streams.

Published end-to-end figures are of engines whose launches we know, not ours: predicting them checks
the public rows, the collectives and the arithmetic of a step; ours are checked by our own steps.

Source: `tables/peers.toml`; each profile names its own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from k3c.planner.estimate import KindEstimate, StepEstimate, total
from k3c.planner.public import DECODE_TOKENS, lookup, smallest_us
from k3c.planner.routing import Routing
from k3c.planner.work import Phase
from k3c.targets.collectives import choose
from k3c.targets.topology import Topology

TABLE = Path(__file__).parent / "tables" / "peers.toml"
# Layers of Kimi K3: KDA, MLA, of them with routed experts, and with a dense feed-forward.
LAYERS = {"kda": 69, "mla": 24, "moe": 92, "dense": 1, "ends": 1}
_EXPERTS, _TOP_K = 896, 16
_SIZES = ("n", "k", "heads", "sources")


@dataclass(frozen=True)
class PeerStep:
    """One step of a peer.

    Attributes:
        phase: `decode`: `tokens` requests with a token each; `prefill`: one request of `tokens`.
        tokens: Rows.
        context_tokens: Tokens of each request.
        tp: Ranks of tensor parallelism.
        ep: Ranks that share the routed experts: 1 or `tp`.
    """

    phase: Phase
    tokens: int
    context_tokens: int
    tp: int
    ep: int = 1


@dataclass(frozen=True)
class Profile:
    """An engine.

    Attributes:
        name: Its name.
        parts: The items of each part of a layer.
        early_start: Share of its decode launches that start early; between 0 and 1: not known.
        skinny: It has GEMMs of its own for few rows.
        source: Where this is known from.
    """

    name: str
    parts: Mapping[str, tuple[Mapping[str, Any], ...]]
    early_start: float
    skinny: bool
    source: str


@cache
def profile(name: str, left_out: frozenset[str] = frozenset()) -> Profile:
    """Return a peer's profile.

    Args:
        name: Its name; it must exist.
        left_out: Sources whose rows it must not use.
    """
    data = _table()
    own, base = data[name], data[data[name].get("like", name)]
    used: Mapping[str, str] = own.get("replace", {})
    parts = {
        part: tuple(
            _as_used(item, used, left_out)
            for item in own.get(part, base.get(part, ()))
            if item.get("row") not in left_out
        )
        for part in LAYERS
    }
    return Profile(name, parts, own["early_start"], own["skinny"], own["source"])


def _as_used(
    item: Mapping[str, Any], used: Mapping[str, str], left_out: frozenset[str]
) -> Mapping[str, Any]:
    """Return an item with the engine's own kernel, in both phases where it stands in for a row."""
    found = {**item, "use": used[item["op"]]} if item["op"] in used else dict(item)
    if found.get("instead_of") in left_out:
        del found["phase"]
    return found


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads(TABLE.read_text("utf-8"))


def _skinny() -> float:
    """Return the share of cuBLAS's time that a GEMM for few rows takes."""
    return mean(own / cublas for cublas, own in _table()["skinny"]["measured"])


@cache
def early_start_us() -> tuple[float, float]:
    """Return what an early start saves a launch, and the deviation of single launches from it."""
    rows = _table()["early_start"]["measured"]
    saved = [alone - early for alone, early in rows]
    return mean(saved), pstdev(saved)


def peer_step(peer: Profile, step: PeerStep, topology: Topology) -> StepEstimate:
    """Estimate a step of a peer.

    Args:
        peer: The engine.
        step: Its shape.
        topology: The machine; the first `tp` ranks take part.
    """
    found: list[KindEstimate] = []
    for part, layers in LAYERS.items():
        found += _times(peer_part(peer, part, step, topology), layers)
    return total(found)


def peer_part(peer: Profile, part: str, step: PeerStep, topology: Topology) -> list[KindEstimate]:
    """Estimate one part of one layer of a peer: `kda`, `mla`, `moe`, `dense` or `ends`."""
    items = [i for i in peer.parts[part] if i.get("phase", step.phase) == step.phase]
    lanes: dict[str, list[KindEstimate]] = {}
    for item in items:
        lanes.setdefault(item.get("lane", ""), []).append(_item(peer, item, step, topology))
    beside = [lanes.pop(name) for name in ("routed", "shared") if name in lanes]
    found = [one for lane in lanes.values() for one in lane]
    hidden = _side_by_side(beside) if beside else []
    return [*found, *hidden]


def unfused_tail(step: PeerStep, topology: Topology) -> list[KindEstimate]:
    """Estimate a layer's tail where nothing is fused.

    Concatenation, all-reduce of latent and shared parts, split, copy, norm, up-projection, add.
    """
    items: list[Mapping[str, Any]] = [
        {"op": "message", "collective": "all_reduce", "width": 21504},
        {"op": "small", "launches": 4},
        {"op": "gemm", "n": 7168, "k": 3584},
    ]
    plain = Profile("plain", {}, 0.0, False, "")
    return [_item(plain, item, step, topology) for item in items]


def _item(
    peer: Profile, item: Mapping[str, Any], step: PeerStep, topology: Topology
) -> KindEstimate:
    rows = step.tokens
    if item.get("rows") == "requests" and step.phase == "prefill":
        rows = 1
    if item["op"] == "message":
        nbytes = item["width"] * rows
        taken = choose(item["collective"], nbytes, range(step.tp), topology)
        return KindEstimate(
            item["collective"], taken.us, taken.low_us, taken.high_us, 0.0, 1,
            "public measurements of collectives", taken.source,
        )  # fmt: skip
    return _launch(peer, item, step, (topology.target.name, rows))


def _launch(
    peer: Profile, item: Mapping[str, Any], step: PeerStep, where: tuple[str, int]
) -> KindEstimate:
    device, rows = where
    count = int(item.get("launches", 1))
    if item["op"] == "small":
        us, spread, source = smallest_us(device) * count, 0.0, "the shortest public launch"
    else:
        us, spread, source = _public(item, step, device, rows)
    low_us, high_us = us / (1 + spread), us * (1 + spread)
    if item["op"] == "gemm" and peer.skinny and rows <= _table()["skinny"]["rows"]:
        us, low_us, high_us = (t * _skinny() for t in (us, low_us, high_us))
    if peer.early_start and step.phase == "decode" and item["op"] != "moe_tail":
        us, low_us, high_us = _early(peer, count, (us, low_us, high_us))
    return KindEstimate(item["op"], us, low_us, high_us, 0.0, count, "public kernels", source)


def _early(
    peer: Profile, count: int, times: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Return a launch's time and its bar where it starts before its producer has ended."""
    saved, off = early_start_us()
    us, low_us, high_us = times
    surest = saved - off if peer.early_start == 1 else 0.0
    # None starts earlier than two thirds of its own time.
    return (
        max(us - peer.early_start * saved * count, us / 3),
        max(low_us - (saved + off) * count, low_us / 3),
        max(high_us - max(0.0, surest) * count, high_us / 3),
    )


def _public(
    item: Mapping[str, Any], step: PeerStep, device: str, rows: int
) -> tuple[float, float, str]:
    keys = {size: int(item[size]) for size in _SIZES if size in item}
    if "split" in item:
        keys[item["split"]] //= step.tp
    if "extra" in item:
        keys["n"] += item["extra"]
    tokens: float = rows
    if item["op"] == "moe_tail":
        # The only row: of 8 ranks and one token; more tokens cost what their messages do.
        keys = {"tp": 8}
    if item["op"] == "moe":
        keys = {"tp": step.tp if step.ep == 1 else 1, "ep": step.ep}
        tokens = _balanced_tokens(rows, step.ep)
    if item["op"] in ("mla_decode", "mla_prefill"):
        return _attention(item, step, device, keys)
    return lookup(device, item["op"], item.get("use", "cublas"), keys, tokens)


def _attention(
    item: Mapping[str, Any], step: PeerStep, device: str, keys: Mapping[str, int]
) -> tuple[float, float, str]:
    """Return attention at the nearest head count with rows (powers of two), at any context."""
    heads = max(8, 1 << (keys["heads"] - 1).bit_length())
    if step.phase == "prefill":
        return lookup(device, item["op"], item["use"], {"heads": heads}, step.tokens)
    known = (1024, 8192, 32768, 131072)
    below = max((c for c in known if c <= step.context_tokens), default=known[0])
    above = min((c for c in known if c > step.context_tokens), default=known[-1])
    (low, spread, source), (high, _, _) = (
        lookup(device, item["op"], item["use"], {"heads": heads, "context": c}, step.tokens)
        for c in (below, above)
    )
    at = (step.context_tokens - below) / (above - below) if above > below else 0.0
    return low + (high - low) * max(0.0, at), spread, source


def _balanced_tokens(tokens: int, ep: int) -> float:
    """Return the tokens that need as many experts, of the busiest rank, as a uniform router does.

    The rows' routing is balanced: no expert is chosen twice while another one is free. Above
    `DECODE_TOKENS` rows, every expert is needed and the number of rows counts.
    """
    if tokens > DECODE_TOKENS:
        return tokens
    needed = Routing().experts(tokens, _TOP_K, _EXPERTS, _EXPERTS // ep)
    return max(1.0, needed * ep / _TOP_K)


def _side_by_side(lanes: Sequence[Sequence[KindEstimate]]) -> list[KindEstimate]:
    """Return the longer of two lanes: the shorter one hides behind it."""
    return list(max(lanes, key=lambda lane: sum(one.us for one in lane)))


def _times(parts: Sequence[KindEstimate], count: int) -> list[KindEstimate]:
    return [
        replace(
            p, us=p.us * count, low_us=p.low_us * count, high_us=p.high_us * count,
            launches=p.launches * count,
        )
        for p in parts
    ]  # fmt: skip
