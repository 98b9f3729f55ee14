"""How many rows each logical expert got: what a placement is planned from, and its file.

The format is described in docs/howto/placement.md. Padding rows and warm-up steps do not belong in
it: the counts say what users sent.

Source: k3_serving.md section 7 (rules of load statistics).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3c.errors import ConfigError, ParseError

FORMAT = "k3-expert-load/1"
Floats = NDArray[np.float64]
_HINT = "docs/howto/placement.md describes the file"


@dataclass(frozen=True)
class ExpertLoad:
    """Rows by layer and logical expert.

    Attributes:
        layers: MoE layers, ascending; the first axis of every array.
        experts_per_token: Experts that the router chooses for a token.
        rows: f64[L, E]; every layer has rows.
        pairs: f64[L, E, E] or None: tokens that chose both experts; symmetric, zero diagonal.
        pairs_of: How many of a token's experts `pairs` looked at: 2 for the two best.
        steps: f64[L, N, E] or None: rows of N parts of the traffic, seen apart: steps or domains.
    """

    layers: tuple[int, ...]
    experts_per_token: int
    rows: Floats
    pairs: Floats | None = None
    pairs_of: int = 2
    steps: Floats | None = None

    @property
    def num_experts(self) -> int:
        """Logical experts of a layer."""
        return self.rows.shape[1]

    @property
    def token_shares(self) -> Floats:
        """f64[L, E]: the share of tokens that choose an expert, at most 1."""
        shares = self.rows * (self.experts_per_token / self.rows.sum(axis=1, keepdims=True))
        return np.minimum(shares, 1.0)


def check_model(load: ExpertLoad, num_experts: int, top_k: int, layers: Sequence[int]) -> None:
    """Check that a load was counted on this model.

    Raises:
        ConfigError: Another number of experts, or other MoE layers.
    """
    found = load.num_experts, load.experts_per_token
    for what, have, want in zip(
        ("experts", "experts a token"), found, (num_experts, top_k), strict=True
    ):
        if have != want:
            raise ConfigError(f"the load has {have} {what}, the model {want}", "--load", _HINT)
    odd = sorted(set(load.layers) ^ set(layers))
    if odd:
        side = "the load" if odd[0] in load.layers else "the model"
        what = f"{len(load.layers)} MoE layers in the load, {len(layers)} in the model"
        raise ConfigError(f"{what}; layer {odd[0]} is only in {side}", "--load", _HINT)


def load_to_json(load: ExpertLoad) -> str:
    """Return the text of a load file."""
    raw: dict[str, Any] = {
        "format": FORMAT,
        "num_experts": load.num_experts,
        "experts_per_token": load.experts_per_token,
        "moe_layers": list(load.layers),
        "load_total": _by_layer(load.layers, load.rows),
    }
    if load.steps is not None:
        raw["steps"] = _by_layer(load.layers, load.steps)
    if load.pairs is not None:
        key = "top2_coactivation" if load.pairs_of == 2 else "coactivation"
        raw[key] = _by_layer(load.layers, np.triu(load.pairs, 1))
    return json.dumps(raw, separators=(",", ":")) + "\n"


def _by_layer(layers: Sequence[int], values: Floats) -> dict[str, Any]:
    whole = bool(np.all(values == np.round(values)))
    plain = values.astype(np.int64) if whole else values
    return {str(layer): plain[at].tolist() for at, layer in enumerate(layers)}


def load_from_json(text: str, where: str) -> ExpertLoad:
    """Parse a load file.

    Args:
        text: JSON text.
        where: File name for error messages.

    Raises:
        ParseError: The text is no load file; the message names layer, expert and both numbers.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ParseError(f"not valid JSON: {exc}", where, _HINT) from exc
    return _Reader(raw, where).load()


class _Reader:
    """Reads the parsed JSON of a load file."""

    def __init__(self, raw: Any, where: str) -> None:
        self.where = where
        if not isinstance(raw, dict):
            raise self._error(f"found a {type(raw).__name__}, expected an object")
        self.raw: dict[str, Any] = raw
        if raw.get("format") != FORMAT:
            raise self._error(f"format is {raw.get('format')!r}, expected {FORMAT!r}")
        self.experts = self._number("num_experts")
        self.top_k = self._number("experts_per_token")
        self.layers = self._layers()

    def load(self) -> ExpertLoad:
        if self.top_k > self.experts:
            what = f"experts_per_token is {self.top_k}, num_experts only {self.experts}"
            raise self._error(what)
        domains = self._domains()
        if "load_total" in self.raw:
            rows = self._by_layer("load_total", self.raw["load_total"])
            self._check_sum(rows, domains)
        elif domains:
            rows = np.sum(list(domains.values()), axis=0)
        else:
            raise self._error("neither load_total nor load is there, expected one")
        for at, total in enumerate(rows.sum(axis=1)):
            if total == 0:
                what = f"all {self.experts} experts have 0 rows, expected some"
                raise self._error(what, f"layer {self.layers[at]}")
        pairs, pairs_of = self._pairs()
        return ExpertLoad(self.layers, self.top_k, rows, pairs, pairs_of, self._steps(domains))

    def _domains(self) -> dict[str, Floats]:
        raw = self.raw.get("load", {})
        if not isinstance(raw, dict):
            raise self._error(f"found a {type(raw).__name__}, expected an object", "load")
        return {name: self._by_layer(f"load.{name}", raw[name]) for name in sorted(raw)}

    def _check_sum(self, rows: Floats, domains: Mapping[str, Floats]) -> None:
        if not domains:
            return
        total = np.sum(list(domains.values()), axis=0)
        wrong = np.argwhere(~np.isclose(rows, total, rtol=1e-9, atol=0))
        if len(wrong):
            at, expert = (int(n) for n in wrong[0])
            what = f"load_total says {rows[at, expert]:g}, load adds up to {total[at, expert]:g}"
            raise self._error(what, f"layer {self.layers[at]}, expert {expert}")

    def _steps(self, domains: Mapping[str, Floats]) -> Floats | None:
        raw = self.raw.get("steps")
        if raw is None:
            return np.stack(list(domains.values()), axis=1) if len(domains) > 1 else None
        lists = [self._grid("steps", layer, self._of(raw, "steps", layer)) for layer in self.layers]
        counts = {len(each) for each in lists}
        if len(counts) > 1:
            what = f"{min(counts)} steps in one layer, {max(counts)} in another, expected the same"
            raise self._error(what, "steps")
        steps = np.stack(lists)
        empty = np.argwhere(steps.sum(axis=2) == 0)
        if len(empty):
            at, step = (int(n) for n in empty[0])
            what = f"step {step} has 0 rows, expected some"
            raise self._error(what, f"steps, layer {self.layers[at]}")
        return steps

    def _pairs(self) -> tuple[Floats | None, int]:
        keys = {"top2_coactivation": 2, "coactivation": self.top_k}
        for key, of in keys.items():
            if key not in self.raw:
                continue
            each: list[Floats] = []
            for layer in self.layers:
                grid = self._grid(key, layer, self._of(self.raw[key], key, layer))
                if len(grid) != self.experts:
                    what = f"{len(grid)} rows of pairs, expected {self.experts}"
                    raise self._error(what, f"{key}, layer {layer}")
                upper = np.triu(grid, 1)
                each.append(upper + upper.T)
            return np.stack(each), of
        return None, 2

    def _layers(self) -> tuple[int, ...]:
        raw: Any = self.raw.get("moe_layers")
        good = isinstance(raw, list) and raw and all(type(n) is int and n >= 0 for n in raw)
        if not good or len(set(raw)) != len(raw):
            raise self._error(
                f"found {str(raw)[:60]}, expected different layer numbers", "moe_layers"
            )
        return tuple(sorted(raw))

    def _by_layer(self, key: str, raw: Any) -> Floats:
        lines = [self._line(self._of(raw, key, n), f"{key}, layer {n}") for n in self.layers]
        return np.array(lines, dtype=np.float64)

    def _of(self, raw: Any, key: str, layer: int) -> Any:
        if not isinstance(raw, dict) or str(layer) not in raw:
            have = len(raw) if isinstance(raw, dict) else 0
            what = f"{have} layers, expected {len(self.layers)}; layer {layer} is missing"
            raise self._error(what, key)
        return raw[str(layer)]

    def _grid(self, key: str, layer: int, raw: Any) -> Floats:
        if not isinstance(raw, list) or not raw:
            raise self._error("expected a list of lists", f"{key}, layer {layer}")
        where = f"{key}, layer {layer}"
        lines = [self._line(line, f"{where}, row {at}") for at, line in enumerate(raw)]
        return np.array(lines, dtype=np.float64)

    def _line(self, raw: Any, place: str) -> list[float]:
        if not isinstance(raw, list) or len(raw) != self.experts:
            have = len(raw) if isinstance(raw, list) else type(raw).__name__
            raise self._error(f"{have} experts, expected {self.experts}", place)
        for expert, value in enumerate(raw):
            if type(value) not in (int, float) or not 0 <= value < float("inf"):
                what = f"found {value!r}, expected a count from 0 on"
                raise self._error(what, f"{place}, expert {expert}")
        return raw

    def _number(self, name: str) -> int:
        value = self.raw.get(name)
        if type(value) is not int or value < 1:
            raise self._error(f"found {value!r}, expected a number from 1 on", name)
        return value

    def _error(self, what: str, place: str = "") -> ParseError:
        return ParseError(what, f"{self.where}: {place}" if place else self.where, _HINT)
