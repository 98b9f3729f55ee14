"""Where every packed weight lies in space weights, the same for all buckets.

A graph that is called for many layers has one relative layout and a base per layer. A graph that is
called once (prologue, heads) has absolute places, and equal tensors of such graphs are stored once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from k3c.artifact import SourceRange, WeightEntry, aligned
from k3c.errors import PassError
from k3c.ir.graph import Call, Graph, Shard, Weight
from k3c.ir.types import TensorType
from k3c.passes.select_kernels import Selected, check_agreement

PackedBytes = Callable[[TensorType], int]


@dataclass(frozen=True)
class WeightPlace:
    """Bytes of a weight: from the layer's base where `per_layer`, else from the space's start."""

    offset: int
    nbytes: int
    per_layer: bool


@dataclass(frozen=True)
class WeightTable:
    """Every weight of every layer.

    Attributes:
        entries: What to pack where, by ascending offset.
        total_bytes: Size of space weights.
        bases: Base of each (graph, layer).
        places: Place of each (graph, value).
    """

    entries: tuple[WeightEntry, ...]
    total_bytes: int
    bases: Mapping[tuple[str, int], int]
    places: Mapping[tuple[str, str], WeightPlace]


def weight_table(selections: Sequence[Selected], packed_bytes: PackedBytes) -> WeightTable:
    """Lay out the weights of all buckets together, the same way on every rank.

    Args:
        selections: One for each bucket; their weights must agree.
        packed_bytes: Bytes of a weight in its type's layout, padding included.

    Raises:
        PassError: Two buckets want a weight in different layouts.
    """
    check_agreement(selections)
    graphs: dict[str, Graph] = {}
    calls: dict[tuple[str, int], Call] = {}
    for selected in selections:
        graphs |= {graph.name: graph for graph in selected.module.graphs}
        for call in selected.module.schedule:
            calls.setdefault((call.graph, call.layer), call)
    times = Counter(graph for graph, _ in calls)
    work = _Table(packed_bytes)
    for call in calls.values():
        work.add(graphs[call.graph], call.layer, times[call.graph] > 1)
    return WeightTable(tuple(work.entries), work.cursor, work.bases, work.places)


# The key is global: which tensors, which part of each, in which layout.
_Key = tuple[tuple[tuple[str, Shard | None], ...], TensorType]
_Stored = dict[_Key, WeightPlace]


@dataclass
class _Table:
    """The table while it grows."""

    packed_bytes: PackedBytes
    cursor: int = 0
    entries: list[WeightEntry] = field(default_factory=list[WeightEntry])
    bases: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    places: dict[tuple[str, str], WeightPlace] = field(
        default_factory=dict[tuple[str, str], WeightPlace]
    )
    once: _Stored = field(default_factory=_Stored)

    def add(self, graph: Graph, layer: int, per_layer: bool) -> None:
        """Add the weights of one call."""
        base = self.cursor if per_layer else 0
        self.bases[graph.name, layer] = base
        stored = _Stored() if per_layer else self.once
        for weight in graph.weights:
            parts = tuple((_of_layer(s, layer, graph.name), shard) for s, shard in weight.parts)
            key = parts, weight.value.type
            if key not in stored:
                stored[key] = self._store(graph, weight, layer, per_layer)
            self.places[graph.name, weight.value.name] = stored[key]

    def _store(self, graph: Graph, weight: Weight, layer: int, per_layer: bool) -> WeightPlace:
        kind = weight.value.type
        nbytes = self.packed_bytes(kind)
        entry = WeightEntry(
            name=f"{graph.name}.{weight.value.name}",
            layer=layer,
            sources=weight.sources,
            dtype=kind.dtype.name,
            shape=kind.sizes,
            layout=kind.layout.name,
            offset=self.cursor,
            nbytes=nbytes,
            padding_bytes=max(0, nbytes - kind.nbytes),
            ranges=tuple(map(weight_range, weight.shards)),
        )
        self.entries.append(entry)
        base = self.bases[graph.name, layer]
        self.cursor += aligned(nbytes)
        return WeightPlace(entry.offset - base, nbytes, per_layer)


def weight_range(shard: Shard | None) -> SourceRange:
    """Return what the first rank of a shard's axis reads of a source."""
    if shard is None:
        return SourceRange(-1, 0, 0)
    return SourceRange(shard.dim, 0, shard.size, shard.axis, shard.placed)


def _of_layer(source: str, layer: int, graph: str) -> str:
    if "*" in source and layer < 0:
        raise PassError(f"weight {source} is of a layer, the call is not", f"graph {graph}")
    return source.replace("*", str(layer), 1)
