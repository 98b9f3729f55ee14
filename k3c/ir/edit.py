"""Editing graphs: who makes and reads a value, stable ordering, dead code, duplicates.

A `Graph` is immutable; every function returns a new one. All are deterministic: order follows the
order of the nodes, never that of a hash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from k3c.ir.graph import Attr, Graph, LayerAttr, Node, Value
from k3c.ir.ops import OPS


class Index:
    """Makers and readers of a graph's values. Nodes are named by their position."""

    def __init__(self, graph: Graph) -> None:
        """Walk the graph once."""
        self.graph = graph
        self.maker: dict[str, int] = {}
        self.readers: dict[str, list[int]] = {}
        for position, node in enumerate(graph.nodes):
            for value in node.operands:
                readers = self.readers.setdefault(value.name, [])
                if position not in readers:
                    readers.append(position)
            for value in node.results:
                self.maker[value.name] = position
        self.weights = {weight.value.name: weight for weight in graph.weights}
        self.returned = {value.name for _, value in graph.outputs}
        self._names = {i.value.name for i in graph.inputs} | set(self.weights) | set(self.maker)

    def node_of(self, value: Value, op: str | None = None) -> Node | None:
        """Return the node that makes a value, if there is one and it is an `op`."""
        position = self.maker.get(value.name)
        node = None if position is None else self.graph.nodes[position]
        return node if node and op in (None, node.op) else None

    def read_by(self, value: Value) -> list[int]:
        """Return the positions of the nodes that read a value."""
        return self.readers.get(value.name, [])

    def only_reader(self, value: Value) -> bool:
        """Whether one node reads the value and the graph does not return it."""
        return len(self.read_by(value)) == 1 and value.name not in self.returned

    def fresh(self, name: str) -> str:
        """Return `name`, or the first of `name_1`, `name_2`, ... that the graph does not use."""
        unique, count = name, 0
        while unique in self._names:
            count += 1
            unique = f"{name}_{count}"
        self._names.add(unique)
        return unique


def substitute(node: Node, values: Mapping[str, Value]) -> Node:
    """Return a node whose operands are replaced by name."""
    return replace(node, operands=tuple(values.get(v.name, v) for v in node.operands))


def substitute_outputs(graph: Graph, values: Mapping[str, Value]) -> Graph:
    """Return a graph whose returned values are replaced by name."""
    outputs = tuple((name, values.get(v.name, v)) for name, v in graph.outputs)
    return replace(graph, outputs=outputs)


def bind_node(node: Node, dims: Mapping[str, int]) -> Node:
    """Return a node whose operands and results have the symbolic dimensions replaced."""
    operands = tuple(Value(v.name, v.type.bind(dims)) for v in node.operands)
    results = tuple(Value(v.name, v.type.bind(dims)) for v in node.results)
    return replace(node, operands=operands, results=results)


def count_ops(graphs: Sequence[Graph], ops: Sequence[str]) -> int:
    """Return how many nodes of the given ops the graphs hold."""
    return sum(node.op in ops for graph in graphs for node in graph.nodes)


def ordered(nodes: Sequence[Node]) -> tuple[Node, ...] | str:
    """Order nodes so that values are made before they are read, and read before overwritten.

    Nodes keep their places where that is possible.

    Returns:
        The nodes, or the name of a value on a cycle.
    """
    waits = _waits(nodes)
    done: set[int] = set()
    order: list[int] = []
    while len(order) < len(nodes):
        ready = [i for i in range(len(nodes)) if i not in done and waits[i] <= done]
        if not ready:
            stuck = next(i for i in range(len(nodes)) if i not in done)
            return nodes[stuck].results[0].name
        order.append(ready[0])
        done.add(ready[0])
    return tuple(nodes[i] for i in order)


def _waits(nodes: Sequence[Node]) -> list[set[int]]:
    """Return for each node the nodes that must come before it."""
    maker = {value.name: i for i, node in enumerate(nodes) for value in node.results}
    waits = [{maker[v.name] for v in node.operands if v.name in maker} for node in nodes]
    for i, node in enumerate(nodes):
        for operand in OPS[node.op].in_place.values():
            name = node.operands[operand].name
            waits[i] |= {
                j for j, other in enumerate(nodes)
                if j != i and any(v.name == name for v in other.operands)
            }  # fmt: skip
    return waits


def drop_dead(graph: Graph) -> Graph:
    """Return the graph without nodes and weights that no output needs; inputs stay."""
    live = {value.name for _, value in graph.outputs}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if any(value.name in live for value in node.results):
            kept.append(node)
            live |= {value.name for value in node.operands}
    weights = tuple(w for w in graph.weights if w.value.name in live)
    return replace(graph, nodes=tuple(reversed(kept)), weights=weights)


def merge_duplicates(graph: Graph) -> Graph:
    """Return the graph with equal nodes made one; nodes that overwrite an operand stay."""
    seen: dict[object, Node] = {}
    values: dict[str, Value] = {}
    kept: list[Node] = []
    for original in graph.nodes:
        node = substitute(original, values)
        known = seen.setdefault(_key(node), node)
        if known is node or OPS[node.op].in_place:
            kept.append(node)
            continue
        pairs = zip(node.results, known.results, strict=True)
        values |= {mine.name: theirs for mine, theirs in pairs}
    return substitute_outputs(replace(graph, nodes=tuple(kept)), values)


def _key(node: Node) -> object:
    # The kind is part of the key: 1, 1.0 and True are equal in Python and not in the IR.
    attrs = tuple((name, _typed(node.attrs[name])) for name in sorted(node.attrs))
    types = tuple(value.type for value in node.results)
    return node.op, tuple(v.name for v in node.operands), attrs, types


def _typed(value: Attr) -> tuple[str, str]:
    kind = "layer" if isinstance(value, LayerAttr) else type(value).__name__
    return kind, str(value)
