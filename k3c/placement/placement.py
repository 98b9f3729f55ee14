"""Which logical expert every physical expert is: the placement type, its file and its hash.

A physical expert is one slot of one rank in one layer. A logical expert has at least one; each of
its slots is a replica, and no rank holds two replicas of one expert. Rows of a token go to replica
`token number mod replicas`, in the order of `homes`.

Source: k3_serving.md section 7.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from k3c.errors import ConfigError, ParseError, PlacementError

FORMAT = "k3-placement/1"
_FIELDS = ("num_experts", "num_ranks", "slots_per_rank")


@dataclass(frozen=True)
class Placement:
    """Physical experts by layer and rank.

    Attributes:
        num_experts: Logical experts of a layer.
        num_ranks: Ranks that share them.
        slots_per_rank: Physical experts of a rank in a layer.
        layers: MoE layer (0-based model layer) -> rank -> logical expert of each slot. Ascending
            unless slots were kept from an earlier placement, so that fewer weights move.
    """

    num_experts: int
    num_ranks: int
    slots_per_rank: int
    layers: Mapping[int, tuple[tuple[int, ...], ...]]

    def __post_init__(self) -> None:
        """Check every rule of a placement.

        Raises:
            PlacementError: A count is wrong, an expert is missing or twice on a rank.
        """
        check_counts(self.num_experts, self.num_ranks, self.slots_per_rank)
        for layer, ranks in self.layers.items():
            self._check_layer(layer, ranks)

    def _check_layer(self, layer: int, ranks: tuple[tuple[int, ...], ...]) -> None:
        if len(ranks) != self.num_ranks:
            what = f"{len(ranks)} ranks, expected {self.num_ranks}"
            raise PlacementError(what, f"layer {layer}", "one list of experts for each rank")
        held: set[int] = set()
        for rank, experts in enumerate(ranks):
            where = f"layer {layer}, rank {rank}"
            if len(experts) != self.slots_per_rank:
                what = f"{len(experts)} physical experts, expected {self.slots_per_rank}"
                raise PlacementError(what, where, "every rank has the same number")
            for expert in experts:
                if not 0 <= expert < self.num_experts:
                    what = f"expert {expert}, expected 0 to {self.num_experts - 1}"
                    raise PlacementError(what, where, "name logical experts of this model")
            if len(set(experts)) != len(experts):
                twice = min(e for e in experts if experts.count(e) > 1)
                what = f"expert {twice} lies {experts.count(twice)} times on a rank, expected once"
                raise PlacementError(what, where, "put its replicas on different ranks")
            held.update(experts)
        if len(held) != self.num_experts:
            missing = min(set(range(self.num_experts)) - held)
            what = f"{len(held)} of {self.num_experts} experts have a rank, expert {missing} none"
            raise PlacementError(what, f"layer {layer}", "every expert needs a slot")

    @property
    def num_replicas(self) -> int:
        """Physical experts of a layer beyond one for each logical expert."""
        return self.num_ranks * self.slots_per_rank - self.num_experts

    @property
    def is_contiguous(self) -> bool:
        """Whether rank r holds experts r*slots to (r+1)*slots - 1 in every layer, no replicas."""
        if self.num_replicas:
            return False
        return all(ranks == _bands(self) for ranks in self.layers.values())

    def homes(self, layer: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each expert's replicas, in the order of the replica's number.

        The order starts at another rank for each expert: with few tokens, most rows go to the
        first replicas, which must not all lie on the low ranks.

        Args:
            layer: A layer of `layers`.

        Returns:
            Expert -> ranks.
        """
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, experts in enumerate(self.layers[layer]):
            for expert in experts:
                found[expert].append(rank)
        return tuple(
            tuple(sorted(ranks, key=lambda rank: (rank - expert) % self.num_ranks))
            for expert, ranks in enumerate(found)
        )

    def hash(self) -> str:
        """Return the sha256 of the file's text: what ranks compare to know that they agree."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the placement as JSON text: one deterministic form, one line a layer."""
        lines = [
            f'"{k}":{json.dumps(self.layers[k], separators=(",", ":"))}'
            for k in sorted(self.layers)
        ]
        head = "".join(f'"{name}":{getattr(self, name)},\n' for name in _FIELDS)
        return f'{{"format":"{FORMAT}",\n{head}"layers":{{\n' + ",\n".join(lines) + "\n}}\n"


def placement_from_json(text: str, where: str) -> Placement:
    """Parse the text of a placement file.

    Args:
        text: What `Placement.to_json` writes.
        where: File name for error messages.

    Raises:
        ParseError: The text is not a placement file, or breaks a rule of placements.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ParseError(f"not valid JSON: {exc}", where, "write it with k3c place") from exc
    found = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
    if found != FORMAT:
        raise ParseError(f"format is {found!r}, expected {FORMAT!r}", where, "see k3c place")
    experts, ranks, slots = (_count(raw, name, where) for name in _FIELDS)
    layers = raw.get("layers")
    if not isinstance(layers, dict):
        raise ParseError("layers is missing or not an object", where, "write it with k3c place")
    try:
        by_layer = {_layer(key): _ranks(key, layers[key]) for key in layers}
        return Placement(experts, ranks, slots, by_layer)
    except (ParseError, PlacementError) as exc:
        raise ParseError(exc.what, f"{where}: {exc.where}", exc.hint) from None


def _count(raw: Mapping[str, Any], name: str, where: str) -> int:
    value = raw.get(name)
    if type(value) is not int:
        raise ParseError(
            f"{name} is {value!r}, expected a number", where, "write it with k3c place"
        )
    return value


def _layer(key: str) -> int:
    if not (key.isascii() and key.isdecimal()):
        raise ParseError(f"found {key!r}", "layers", "name a layer by its number")
    return int(key)


def _ranks(key: str, raw: Any) -> tuple[tuple[int, ...], ...]:
    lists = isinstance(raw, list) and all(isinstance(experts, list) for experts in raw)
    if not lists or any(type(expert) is not int for experts in raw for expert in experts):
        raise ParseError("not a list of lists of experts", f"layer {key}", "one list a rank")
    return tuple(tuple(experts) for experts in raw)


def slots_for(num_experts: int, num_ranks: int, spare: int = 0) -> int:
    """Return the physical experts of a rank: as few as hold all experts, and `spare` more.

    Raises:
        ConfigError: A number is not positive.
        PlacementError: A rank would hold an expert twice.
    """
    if min(num_experts, num_ranks) < 1 or spare < 0:
        what = f"{num_experts} experts, {num_ranks} ranks, {spare} spare slots"
        raise ConfigError(what, "placement", "at least one expert and one rank; spare from 0 on")
    slots = -(-num_experts // num_ranks) + spare
    check_counts(num_experts, num_ranks, slots)
    return slots


def check_counts(num_experts: int, num_ranks: int, slots_per_rank: int) -> None:
    """Check that every expert can have a slot and no rank needs to hold one twice.

    Raises:
        PlacementError: Too few or too many slots; the hint names the nearest legal number.
    """
    fewest = -(-num_experts // max(num_ranks, 1))
    if num_ranks < 1 or not fewest <= slots_per_rank <= num_experts:
        what = f"{slots_per_rank} slots on each of {num_ranks} ranks for {num_experts} experts"
        nearest = min(max(slots_per_rank, fewest), num_experts)
        raise PlacementError(
            what, "placement", f"{fewest} to {num_experts} work; nearest: {nearest}"
        )


def contiguous(
    num_experts: int, num_ranks: int, layers: Iterable[int], spare: int = 0
) -> Placement:
    """Place experts in bands by number; slots that are left hold the first experts again.

    Args:
        num_experts: Logical experts of a layer.
        num_ranks: Ranks.
        layers: MoE layers.
        spare: Slots of a rank beyond the fewest that hold all experts.

    Raises:
        ConfigError: A number is not positive.
        PlacementError: A rank would hold an expert twice.
    """
    slots = slots_for(num_experts, num_ranks, spare)
    bands = tuple(
        tuple(sorted((rank * slots + slot) % num_experts for slot in range(slots)))
        for rank in range(num_ranks)
    )
    return Placement(num_experts, num_ranks, slots, dict.fromkeys(layers, bands))


def _bands(placement: Placement) -> tuple[tuple[int, ...], ...]:
    size = placement.slots_per_rank
    return tuple(tuple(range(r * size, (r + 1) * size)) for r in range(placement.num_ranks))
