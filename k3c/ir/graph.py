"""The IR: values, nodes, graphs and modules. Immutable; a pass returns a new module.

A `Graph` is the body of one block kind. Its inputs carry a role: `carry` flows from layer to layer,
`state` lives in the cache and is updated in place once buffers exist, `io` is filled by the runtime
each step. `Module.schedule` lists the calls in order; what differs between two calls of one graph
are the layer index in its weight names and the call's layer attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from k3c.ir.types import SymDim, TensorType

Role = Literal["carry", "state", "io"]


@dataclass(frozen=True)
class LayerAttr:
    """An attribute value that each call of the graph supplies; printed `layer.<name>`."""

    name: str

    def __str__(self) -> str:
        """Return the reference as the IR text writes it."""
        return f"layer.{self.name}"


Attr = int | float | str | bool | tuple[int, ...] | tuple[str, ...] | LayerAttr


@dataclass(frozen=True)
class Value:
    """A named tensor; names are unique within a graph."""

    name: str
    type: TensorType


@dataclass(frozen=True)
class Input:
    """A graph input and where it comes from."""

    value: Value
    role: Role


@dataclass(frozen=True)
class Shard:
    """The part of a checkpoint tensor that a rank reads; printed `axis*size` in dimension `dim`.

    It is `size` indices, from `size` times the rank's coordinate along mesh axis `axis` on; those
    past the tensor's end are zero. A `placed` one, printed `axis@size`, is those `size` indices
    that a placement of experts gives to the rank, in its order.
    """

    axis: str
    dim: int
    size: int
    placed: bool = False


@dataclass(frozen=True)
class Weight:
    """A weight: checkpoint tensors whose rows are concatenated in order.

    `sources` are checkpoint names; the first `*` stands for the layer index of the call, a second
    one for the expert index, over which tensors are stacked before rows are concatenated.
    `shards` says what a rank reads of each source, None: all of it; empty: all of every one.
    """

    value: Value
    sources: tuple[str, ...]
    shards: tuple[Shard | None, ...] = ()

    @property
    def parts(self) -> tuple[tuple[str, Shard | None], ...]:
        """Each source and what a rank reads of it."""
        return tuple(zip(self.sources, self.shards or (None,) * len(self.sources), strict=True))


def weight_of(value: Value, parts: Iterable[tuple[str, Shard | None]]) -> Weight:
    """Return the weight of some parts; the only place where parts become a weight."""
    sources, shards = zip(*parts, strict=True)
    return Weight(value, sources, shards if any(shards) else ())


@dataclass(frozen=True)
class Node:
    """One operation. `loc` is the line of the model source that it came from."""

    op: str
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    attrs: Mapping[str, Attr] = field(default_factory=dict[str, Attr])
    loc: str = ""


@dataclass(frozen=True)
class Graph:
    """A body in execution order; `outputs` names the carry, state or io value a result becomes."""

    name: str
    inputs: tuple[Input, ...]
    weights: tuple[Weight, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, Value], ...]


@dataclass(frozen=True)
class Call:
    """One entry of the schedule: run `graph` as layer `layer` (-1: prologue or epilogue).

    `rank_attrs` are layer attributes that differ from rank to rank: mesh axis and factor of the
    rank's coordinate along it, printed `ep*56`.
    """

    graph: str
    layer: int
    attrs: Mapping[str, int] = field(default_factory=dict[str, int])
    rank_attrs: Mapping[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])

    def at(self, place: Mapping[str, int]) -> dict[str, int]:
        """Return the layer attributes of the rank with coordinates `place`, by mesh axis."""
        own = {name: factor * place[axis] for name, (axis, factor) in self.rank_attrs.items()}
        return {**self.attrs, **own}


@dataclass(frozen=True)
class Module:
    """A whole model at one level of the pipeline."""

    level: Literal["model", "mesh", "kernel"]
    dims: tuple[SymDim, ...]
    graphs: tuple[Graph, ...]
    schedule: tuple[Call, ...]
    mesh: tuple[tuple[str, int], ...] = ()

    def graph(self, name: str) -> Graph:
        """Return the graph called `name`; it must exist."""
        found = [g for g in self.graphs if g.name == name]
        assert len(found) == 1, f"graph {name!r}: found {len(found)}, need exactly 1"
        return found[0]
