"""Decide which buffer each value of a graph lives in, before anything has an offset.

A result that an op overwrites in place shares its operand's buffer. A value that is returned as a
carry or an io field is written straight into that buffer where nothing reads the old contents
later; elsewhere a copy is made at the end. Both `schedule` and `build_plan` ask here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from k3c.artifact import Space
from k3c.errors import PassError
from k3c.ir.graph import Graph, Module, Node, Role
from k3c.ir.ops import OPS
from k3c.ir.types import TensorType

T = TypeVar("T")

_NEVER = -1


@dataclass(frozen=True)
class Storage:
    """A buffer without an offset. `graph` is empty for one that lives through the whole step."""

    id: str
    type: TensorType
    space: Space
    graph: str

    @property
    def per_layer(self) -> bool:
        """Say whether each layer has a copy of its own."""
        return self.space in ("kv_pages", "state_slots")


@dataclass(frozen=True)
class Assignment:
    """Where the values of one graph live.

    Attributes:
        owner: Value name to storage id.
        storages: Every storage that the graph touches, by id.
        copies: (to, from) storage ids to copy after the last node, in order.
        lost: Carries whose contents the graph overwrites without returning them.
    """

    owner: Mapping[str, str]
    storages: Mapping[str, Storage]
    copies: tuple[tuple[str, str], ...]
    lost: frozenset[str]


@dataclass(frozen=True)
class Boundary:
    """What the graphs of a module share: the role and type of every carry, state and io name."""

    roles: Mapping[str, Role]
    types: Mapping[str, TensorType]
    state_spaces: Mapping[str, Space]

    @classmethod
    def of(cls, module: Module, state_spaces: Mapping[str, Space]) -> Boundary:
        """Gather the names that cross graphs.

        Raises:
            PassError: A name has two roles, or two shapes, in two graphs.
        """
        roles: dict[str, Role] = {}
        types: dict[str, TensorType] = {}
        for graph in module.graphs:
            for item in graph.inputs:
                _agree(roles, item.value.name, item.role, graph.name)
                _agree(types, item.value.name, item.value.type, graph.name)
        for graph in module.graphs:
            for name, value in graph.outputs:
                _agree(types, name, value.type, graph.name)
                roles.setdefault(name, "io")
        return cls(roles, types, state_spaces)

    def storage(self, name: str, graph: str) -> Storage:
        """Return the storage of a shared name, as `graph` sees it."""
        role, kind = self.roles[name], self.types[name]
        if role == "state":
            return Storage(f"{graph}.{name}", kind, self.state_spaces[name], graph)
        return Storage(name, kind, "arena" if role == "carry" else "io", "")


def in_place(node: Node) -> Mapping[int, int]:
    """Return the results that overwrite an operand: result index to operand index."""
    return OPS[node.op].in_place if node.op in OPS else {}


def assign(graph: Graph, boundary: Boundary) -> Assignment:
    """Assign a storage to every value of a graph.

    Raises:
        PassError: A value is read after it was overwritten, or an op would overwrite a weight or
            an input field.
    """
    work = _Work(graph, boundary)
    for index, node in enumerate(graph.nodes):
        work.visit(index, node)
    for name, value in graph.outputs:
        work.check_current(value.name, f"output {name}")
    for name, value in graph.outputs:
        work.deliver(name, value.name)
    return Assignment(work.owner, work.storages, work.ordered_copies(), work.lost())


class _Work:
    """The state of `assign` on one graph."""

    def __init__(self, graph: Graph, boundary: Boundary) -> None:
        self.graph, self.boundary = graph, boundary
        self.owner: dict[str, str] = {}
        self.storages: dict[str, Storage] = {}
        self.copies: list[tuple[str, str]] = []
        # By storage: the value it holds now, and the first and last node that touched it.
        self.current: dict[str, str] = {}
        self.touched: dict[str, tuple[int, int]] = {}
        for item in graph.inputs:
            self._hold(item.value.name, boundary.storage(item.value.name, graph.name))
        for weight in graph.weights:
            self._hold(
                weight.value.name, self._own(weight.value.name, weight.value.type, "weights")
            )

    def visit(self, index: int, node: Node) -> None:
        """Assign the results of a node."""
        for operand in node.operands:
            self.check_current(operand.name, f"{node.op} -> %{node.results[0].name}")
            self._touch(self.owner[operand.name], index)
        shared = in_place(node)
        for i, result in enumerate(node.results):
            if i in shared:
                self._overwrite(node, result.name, node.operands[shared[i]].name)
            else:
                self._hold(result.name, self._own(result.name, result.type, "arena"))
            self._touch(self.owner[result.name], index)

    def check_current(self, name: str, reader: str) -> None:
        """Check that a value has not been overwritten.

        Raises:
            PassError: It has.
        """
        held = self.current[self.owner[name]]
        if held != name:
            what = f"{reader} reads %{name} after %{held} has overwritten it"
            raise PassError(what, f"graph {self.graph.name}", "read it earlier, or copy it")

    def deliver(self, output: str, value: str) -> None:
        """Bring a returned value to the storage of its output name."""
        to = self.boundary.storage(output, self.graph.name)
        source = self.owner[value]
        self.storages.setdefault(to.id, to)
        if source == to.id:
            return
        if self._may_write_directly(output, source, to.id):
            self._rename(source, to.id)
        else:
            self.copies.append((to.id, source))

    def ordered_copies(self) -> tuple[tuple[str, str], ...]:
        """Return the copies such that none reads what an earlier one has overwritten."""
        targets = {to for to, _ in self.copies}
        first: list[tuple[str, str]] = []
        then: list[tuple[str, str]] = []
        for to, source in self.copies:
            if source not in targets:
                then.append((to, source))
                continue
            kept = replace(
                self.storages[source],
                id=f"{self.graph.name}.{source.rpartition('.')[2]}.kept",
                space="arena",
                graph=self.graph.name,
            )
            self.storages[kept.id] = kept
            if (kept.id, source) not in first:
                first.append((kept.id, source))
            then.append((to, kept.id))
        return (*first, *then)

    def lost(self) -> frozenset[str]:
        """Return the carries that are overwritten here and not returned."""
        returned = {name for name, _ in self.graph.outputs}
        carries = [i.value.name for i in self.graph.inputs if i.role == "carry"]
        return frozenset(c for c in carries if self.current[c] != c and c not in returned)

    def _may_write_directly(self, output: str, source: str, to: str) -> bool:
        # Only scratch of this graph can move; what was delivered already, or came in, stays put.
        if self.storages[source].graph != self.graph.name or self.storages[source].space != "arena":
            return False
        # An old value that is itself returned under another name is read at the very end.
        if any(self.owner[v.name] == to for name, v in self.graph.outputs if name != output):
            return False
        return self.touched.get(to, (0, _NEVER))[1] < self.touched[source][0]

    def _rename(self, source: str, to: str) -> None:
        del self.storages[source]
        for name, storage in self.owner.items():
            if storage == source:
                self.owner[name] = to
        self.current[to] = self.current.pop(source)
        first, last = self.touched.pop(source)
        self.touched[to] = (self.touched.get(to, (first, 0))[0], last)

    def _overwrite(self, node: Node, result: str, operand: str) -> None:
        storage = self.storages[self.owner[operand]]
        fixed = ("weights",) if OPS[node.op].updates_io else ("weights", "io")
        if storage.space in fixed:
            what = f"{node.op} -> %{result} would overwrite %{operand} of {storage.space}"
            raise PassError(what, f"graph {self.graph.name}", "it must stay as it is")
        self.owner[result] = storage.id
        self.current[storage.id] = result

    def _own(self, name: str, kind: TensorType, space: Space) -> Storage:
        return Storage(f"{self.graph.name}.{name}", kind, space, self.graph.name)

    def _hold(self, name: str, storage: Storage) -> None:
        self.storages[storage.id] = storage
        self.owner[name] = storage.id
        self.current[storage.id] = name

    def _touch(self, storage: str, index: int) -> None:
        first, _ = self.touched.get(storage, (index, index))
        self.touched[storage] = (first, index)


def _agree(known: dict[str, T], name: str, value: T, graph: str) -> None:
    first = known.setdefault(name, value)
    if first != value:
        raise PassError(f"%{name} is {value}, another graph has {first}", f"graph {graph}")
