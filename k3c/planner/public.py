"""Public measurements of kernels: looked up as they are, or to move our own to another device.

Source: `tables/public.json`, each series with its own: CUDA-graph times of the aiconfigurator
database, pull requests, and peers measured on one H200.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log
from pathlib import Path
from typing import Any

from k3c.planner.fit import Fit, Row, fit
from k3c.planner.work import Phase
from k3c.targets.collective_fit import device_class
from k3c.targets.target import Target, load_target

TABLE = Path(__file__).parent / "tables" / "public.json"
# Tokens up to which a public row counts as one of a decode step.
DECODE_TOKENS = 64
# Bytes of a KDA head: state read and written in float32, convolution tail, activations.
_KDA_DECODE_BYTES, _KDA_PREFILL_BYTES, _KDA_CONV_BYTES = 137_250, 1_298, 1_536
_HIDDEN, _LATENT, _ROPE, _HEAD, _VALUE = 7168, 512, 64, 192, 128
_EXPERTS, _TOP_K, _EXPERT_BYTES, _EXPERT_FLOPS = 896, 16, 17_547_264, 2 * 3 * 3584 * 3072

# The public kernels that change from device to device as ours do, by our template.
FAMILIES: Mapping[str, Mapping[Phase, str]] = {
    "linear_decode": {"decode": "gemm", "prefill": "gemm"},
    "linear_gemm": {"decode": "gemm", "prefill": "gemm"},
    "norm_linear_decode": {"decode": "gemm", "prefill": "gemm"},
    "norm_linear_gemm": {"decode": "gemm", "prefill": "gemm"},
    "grouped_gemm_decode": {"decode": "moe", "prefill": "moe"},
    "grouped_gemm_prefill": {"decode": "moe", "prefill": "moe"},
    "kda_decode": {"decode": "kda_decode"},
    "kda_prefill_gpu": {"prefill": "kda_prefill"},
    "mla_attend": {"decode": "mla_decode", "prefill": "mla_prefill"},
    "mla_absorb_q": {"decode": "mla_bmm", "prefill": "mla_bmm"},
    "mla_absorb_v": {"decode": "mla_bmm", "prefill": "mla_bmm"},
}


@dataclass(frozen=True)
class Series:
    """One kernel on one device over a number of tokens or requests.

    Attributes:
        family: What it computes.
        device: What it ran on.
        implementation: Whose kernel it is.
        keys: Its other sizes.
        points: Tokens (requests of a decode kernel) and microseconds, ascending.
        source: Who measured it.
    """

    family: str
    device: str
    implementation: str
    keys: tuple[tuple[str, int], ...]
    points: tuple[tuple[int, float], ...]
    source: str

    def floor_us(self, tokens: int, target: Target) -> float:
        """Return what a point could not be faster than, microseconds."""
        nbytes, flops = _COSTS[self.family](dict(self.keys), tokens)
        return max(nbytes / (target.bandwidth_gbs * 1e3), flops / (target.peak_gflops * 1e3))

    def us(self, tokens: float) -> float:
        """Return the time at any number of tokens: between points straight in both logarithms."""
        if len(self.points) == 1:
            return self.points[0][1]
        pairs = list(zip(self.points, self.points[1:], strict=False))
        (a, low), (b, high) = next((p for p in pairs if tokens <= p[1][0]), pairs[-1])
        at = max(tokens, self.points[0][0])
        return exp(log(low) + (log(high) - log(low)) * (log(at) - log(a)) / (log(b) - log(a)))


@dataclass(frozen=True)
class Transfer:
    """How a kind of kernel changes from one device to another.

    Attributes:
        latency: Factor of the latency.
        share: Factor of the share of the device's best.
        spread: Relative error of both.
        source: What it rests on.
    """

    latency: float
    share: float
    spread: float
    source: str


@cache
def series() -> tuple[Series, ...]:
    """Return all of them."""
    return tuple(map(_series, json.loads(TABLE.read_text("utf-8"))["series"]))


@cache
def transfer(
    device: str, other: str, family: str, phase: Phase, left_out: frozenset[str]
) -> Transfer:
    """Return how our kernels change between two devices: as public ones that ran on both.

    Args:
        device: Where ours were measured.
        other: Where they are to run.
        family: Our template.
        phase: Of the bucket.
        left_out: Sources that may not be used.
    """
    like = next((s.device for s in series() if device_class(s.device) == device_class(other)), "")
    known = {kinds[phase] for kinds in FAMILIES.values() if phase in kinds} if like else set[str]()
    kind = FAMILIES.get(family, {}).get(phase, "")
    changes = {k: _change(device, like, k, phase, left_out) for k in sorted(known)}
    found = [c for c in (changes.get(kind),) if c is not None]
    if found:
        return found[0]
    others = [c for c in changes.values() if c is not None]
    if others:
        return _mean(others, like)
    # A device without public rows may change as much as any device does; nothing says which way.
    seen = _all_changes(left_out)
    assert seen, "no public kernel ran on two devices"
    widest = max(max(c.latency, 1 / c.latency, c.share, 1 / c.share) for c in seen)
    return Transfer(1.0, 1.0, widest - 1, f"no public kernel ran on {device} and {other}")


def lookup(
    device: str, family: str, implementation: str, keys: Mapping[str, int], tokens: float
) -> tuple[float, float, str]:
    """Return the time of a public kernel, its relative error and its source.

    A shape that was not measured is estimated by a fit over all shapes of the implementation.
    """
    like = device_class(device)
    rows = [
        s
        for s in series()
        if (s.family, s.implementation) == (family, implementation)
        and device_class(s.device) == like
    ]
    assert rows, f"no public rows of {implementation} {family} like {device}"
    target = load_target(device)
    exact = [s for s in rows if dict(s.keys) == dict(keys)]
    general = _fit(rows, tokens <= DECODE_TOKENS, target)
    if exact:
        return exact[0].us(tokens), _between(family, implementation, like), exact[0].source
    shape = Series(family, device, implementation, tuple(sorted(keys.items())), (), "")
    floor_us = shape.floor_us(round(tokens), target)
    # From the nearest shape, as much as the fit says that it changes.
    near = min(rows, key=lambda s: _distance(dict(s.keys), keys))
    ratio = general.us(floor_us) / general.us(near.floor_us(round(tokens), target))
    source = f"fitted to {len(rows)} shapes: {rows[0].source}"
    return near.us(tokens) * ratio, general.spread, source


def _distance(a: Mapping[str, int], b: Mapping[str, int]) -> float:
    return sum(abs(log(a[key] / b[key])) for key in b)


@cache
def _between(family: str, implementation: str, like: str) -> float:
    """Return the relative error of points that their neighbours alone would give."""
    errors = [
        log(
            replace(s, points=(s.points[i - 1], s.points[i + 1])).us(s.points[i][0])
            / s.points[i][1]
        )
        for s in series()
        if (s.family, s.implementation) == (family, implementation)
        and device_class(s.device) == like
        for i in range(1, len(s.points) - 1)
    ]
    return _relative(errors) if errors else 0.0


def _relative(errors: Sequence[float]) -> float:
    """Return the root mean square of logarithms as a relative error."""
    return exp((sum(e * e for e in errors) / len(errors)) ** 0.5) - 1


def smallest_us(device: str) -> float:
    """Return the time of the shortest public launch on devices like this one, microseconds."""
    like = device_class(device)
    return min(us for s in series() if device_class(s.device) == like for _, us in s.points)


def _fit(rows: Sequence[Series], decode: bool, target: Target) -> Fit:
    found = [
        Row(s.floor_us(x, target), us, s.source)
        for s in rows
        for x, us in s.points
        if (x <= DECODE_TOKENS) == decode
    ]
    return fit(
        found or [Row(s.floor_us(x, target), us, s.source) for s in rows for x, us in s.points]
    )


@cache
def _change(
    device: str, other: str, family: str, phase: Phase, left_out: frozenset[str]
) -> Transfer | None:
    """Return the change of a family, from implementations that ran on both devices."""
    here = [s for s in series() if (s.family, s.device) == (family, device)]
    there = {
        (s.implementation, s.keys): s
        for s in series()
        if (s.family, s.device) == (family, other) and s.source not in left_out
    }
    pairs = [
        (s, there[s.implementation, s.keys])
        for s in here
        if s.source not in left_out and (s.implementation, s.keys) in there
    ]
    if not pairs:
        return None
    decode = phase == "decode"
    a = _fit([s for s, _ in pairs], decode, load_target(device))
    b = _fit([s for _, s in pairs], decode, load_target(other))
    latency = b.latency_us / a.latency_us if a.latency_us and b.latency_us else 1.0
    source = f"{pairs[0][0].source}, {len(pairs)} {family} kernels on {device} and {other}"
    here_target, there_target = load_target(device), load_target(other)
    # How far the change of one point is from the change of the fits.
    errors = [
        log(
            dict(t.points)[x]
            / us
            * a.us(s.floor_us(x, here_target))
            / b.us(t.floor_us(x, there_target))
        )
        for s, t in pairs
        for x, us in s.points
        if (x <= DECODE_TOKENS) == decode and x in dict(t.points)
    ]
    return Transfer(latency, b.share / a.share, _relative(errors), source)


def _mean(changes: Sequence[Transfer], like: str) -> Transfer:
    """Return the geometric mean of changes; its error covers the largest of them."""
    latency, share = (
        exp(sum(log(v) for v in values) / len(values))
        for values in ([c.latency for c in changes], [c.share for c in changes])
    )
    off = max(abs(log(v / m)) for c in changes for v, m in ((c.latency, latency), (c.share, share)))
    return Transfer(
        latency, share, exp(off) - 1, f"mean of public kernels of other kinds on {like}"
    )


def _all_changes(left_out: frozenset[str]) -> list[Transfer]:
    kinds = {(k, p) for kinds in FAMILIES.values() for p, k in kinds.items()}
    found = [_change("h200", "gb300", kind, phase, left_out) for kind, phase in sorted(kinds)]
    return [c for c in found if c is not None]


def _series(data: dict[str, Any]) -> Series:
    named = {"family", "device", "implementation", "points", "source"}
    keys = tuple(sorted((k, v) for k, v in data.items() if k not in named))
    points = tuple(sorted((int(x), float(us)) for x, us in data["points"]))
    return Series(
        data["family"], data["device"], data["implementation"], keys, points, data["source"]
    )


Keys = Mapping[str, int]


def _gemm(k: Keys, tokens: int) -> tuple[float, float]:
    weights = k["n"] * k["k"]
    return 2 * (weights + tokens * (k["n"] + k["k"])), 2 * tokens * weights


def _moe(k: Keys, tokens: int) -> tuple[float, float]:
    """Balanced routing, as the rows have it: no expert twice while there are enough."""
    parts, local = k["tp"] * k["ep"], _EXPERTS / k["ep"]
    needed = min(local, tokens * _TOP_K / k["ep"])
    flops = _EXPERT_FLOPS * tokens * _TOP_K / parts
    return needed * _EXPERT_BYTES / k["tp"], flops


def _mla_decode(k: Keys, requests: int) -> tuple[float, float]:
    positions = requests * k["context"]
    flops = 2 * positions * k["heads"] * (2 * _LATENT + _ROPE)
    return 2 * positions * (_LATENT + _ROPE), flops


_COSTS = {
    "gemm": _gemm,
    "moe": _moe,
    "mla_decode": _mla_decode,
    "mla_prefill": lambda k, t: (
        2 * t * k["heads"] * (_HEAD + _VALUE),
        t * t * k["heads"] * (_HEAD + _VALUE),
    ),
    "mla_bmm": lambda k, t: (
        4 * k["heads"] * _VALUE * _LATENT,
        4 * t * k["heads"] * _VALUE * _LATENT,
    ),
    "kda_decode": lambda k, t: (_KDA_DECODE_BYTES * k["heads"] * t, 0),
    "kda_prefill": lambda k, t: (_KDA_PREFILL_BYTES * k["heads"] * t, 0),
    "kda_conv": lambda k, t: (_KDA_CONV_BYTES * k["heads"] * t, 0),
    "moe_tail": lambda k, t: (0, 0),
    "attn_res": lambda k, t: (2 * _HIDDEN * (k["sources"] + 3) * t, 0),
}
