"""The arrays that the search works on: all layers at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from k3c.placement.loads import Floats
from k3c.placement.placement import Placement

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]
Indices = NDArray[np.intp]


@dataclass
class State:
    """Physical experts of all layers; the search changes it in place.

    Attributes:
        load: f64[L, E]: rows of an expert, in units of the mean rows of a rank.
        count: i32[L, E]: replicas of an expert.
        slots: i32[L, R, S]: logical expert of each slot.
    """

    load: Floats
    count: Ints
    slots: Ints

    @property
    def each(self) -> Floats:
        """f64[L, E]: the load of one replica."""
        return self.load / self.count

    def gather(self, values: Floats) -> Floats:
        """Return [L, R, S] values of the slots' experts from [L, E] values."""
        layers, ranks, slots = self.slots.shape
        flat = np.take_along_axis(values, self.slots.reshape(layers, -1), axis=1)
        return flat.reshape(layers, ranks, slots)

    def rank_loads(self) -> Floats:
        """f64[L, R]: what every rank gets; 1 is the mean."""
        return self.gather(self.each).sum(axis=2)

    def worst(self) -> Floats:
        """f64[L]: the busiest rank over the mean."""
        return self.rank_loads().max(axis=1)

    def held(self) -> Bools:
        """bool[L, R, E]: whether a rank holds an expert."""
        layers, ranks, _ = self.slots.shape
        found = np.zeros((layers, ranks, self.load.shape[1]), np.bool_)
        np.put_along_axis(found, self.slots, True, axis=2)
        return found

    def copy(self) -> State:
        """Return a state that shares no array that changes."""
        return State(self.load, self.count.copy(), self.slots.copy())

    def part(self, layers: NDArray[np.intp] | slice) -> State:
        """Return a state of some layers, with arrays of its own."""
        return State(self.load[layers], self.count[layers].copy(), self.slots[layers].copy())


def normalised(rows: Floats, ranks: int) -> Floats:
    """Return rows in units of a rank's mean: f64[L, E] that sums to `ranks`."""
    return rows * (ranks / rows.sum(axis=1, keepdims=True))


def of_placement(placement: Placement, layers: tuple[int, ...], rows: Floats) -> State:
    """Return the state of a placement under a load.

    Args:
        placement: Must hold `layers`.
        layers: Which, in the order of `rows`.
        rows: f64[L, E].
    """
    slots = np.array([placement.layers[layer] for layer in layers], dtype=np.int32)
    return State(normalised(rows, placement.num_ranks), counts(slots, rows.shape[1]), slots)


def counts(slots: Ints, experts: int) -> Ints:
    """Return i32[L, E]: how many slots hold each expert."""
    flat = slots.reshape(len(slots), -1)
    keys = flat + np.arange(len(slots), dtype=np.int64)[:, None] * experts
    found = np.bincount(keys.ravel(), minlength=len(slots) * experts)
    return found.reshape(len(slots), experts).astype(np.int32)


def to_placement(state: State, layers: tuple[int, ...], *, ascending: bool = True) -> Placement:
    """Return the placement of a state; `ascending` sorts the slots of every rank."""
    slots = np.sort(state.slots, axis=2) if ascending else state.slots
    _, ranks, size = slots.shape
    rows = {layer: tuple(map(tuple, slots[at].tolist())) for at, layer in enumerate(layers)}
    return Placement(state.load.shape[1], ranks, size, rows)
