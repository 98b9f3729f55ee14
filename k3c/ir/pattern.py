"""Patterns written as IR text, and the search for them in a graph.

A pattern is a list of nodes without types and attributes:

    %p = residual_join(%prefix, %delta)
    %m = attn_res(%p, %bank, %res_norm, %res_proj)
    %y = rms_norm(%m, %norm)

The last node is the root: the search starts there and follows operands up; a node that is not
above the root is then looked for among the readers of what is bound. Operands of commutative ops
match in both orders; `%y... =` stands for one or more results, the first being %y. Attributes, and
optional operands that the pattern leaves out, are no part of the search: a rule meets them as a
refusal with a reason, not as a silent miss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from k3c.ir.edit import Index
from k3c.ir.graph import Attr, Node, Value, Weight
from k3c.ir.ops import OPS
from k3c.ir.parser import Parser
from k3c.ir.scanner import Scanner


@dataclass(frozen=True)
class PatternNode:
    """One line of a pattern, names only; `open_results` allows more results than named."""

    op: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    open_results: bool = False


@dataclass(frozen=True)
class Pattern:
    """Pattern nodes; the last is the root."""

    nodes: tuple[PatternNode, ...]

    @property
    def root(self) -> PatternNode:
        """The node that the search starts at."""
        return self.nodes[-1]

    def maker(self, name: str) -> int | None:
        """Return the index of the node that makes `name`; None for a free value."""
        found = [i for i, node in enumerate(self.nodes) if name in node.results]
        return found[0] if found else None


@dataclass(frozen=True)
class Match:
    """A place where a pattern fits: pattern node -> position, pattern value -> value."""

    pattern: Pattern
    index: Index
    nodes: Mapping[int, int]
    values: Mapping[str, Value]

    def __getitem__(self, name: str) -> Value:
        """Return the value that stands for `name` in the pattern."""
        return self.values[name]

    def __contains__(self, name: str) -> bool:
        """Whether the pattern has a value of this name."""
        return name in self.values

    def node(self, result: str) -> Node:
        """Return the node that makes the pattern value `result`."""
        maker = self.pattern.maker(result)
        assert maker is not None, f"no node of the pattern makes %{result}"
        return self.index.graph.nodes[self.nodes[maker]]

    def attr(self, result: str, name: str) -> Attr:
        """Return an attribute of the node that makes `result`."""
        return self.node(result).attrs[name]

    def weight(self, name: str) -> Weight | None:
        """Return the weight that stands for `name`; None where it is another value."""
        return self.index.weights.get(self[name].name)

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of the matched nodes, ascending."""
        return tuple(sorted(self.nodes.values()))


def parse_pattern(text: str) -> Pattern:
    """Parse a pattern.

    Raises:
        ParseError: As for IR text.
    """
    scan = Scanner(text, "pattern")
    parser = Parser(scan)
    nodes: list[PatternNode] = []
    while not scan.done():
        names = parser.value_names("=")
        results = tuple(name.rstrip(".") for name in names)
        op = parser.op_name()
        assert op in OPS, f"pattern op {op} is unknown"
        operands = tuple(parser.value_names(")"))
        nodes.append(PatternNode(op, operands, results, names[-1].endswith("...")))
    assert nodes, "a pattern needs a node"
    return Pattern(tuple(nodes))


def find(pattern: Pattern, index: Index, root: int) -> Match | None:
    """Return the first match whose root is the node at position `root`, or None."""
    start = _State({}, {})
    for state in _node(pattern, len(pattern.nodes) - 1, index, root, start):
        for full in _rest(pattern, index, state):
            return Match(pattern, index, full.nodes, full.values)
    return None


@dataclass(frozen=True)
class _State:
    """What is bound so far: pattern node -> position, pattern value -> value."""

    nodes: Mapping[int, int]
    values: Mapping[str, Value]

    def bind(self, name: str, value: Value) -> _State | None:
        known = self.values.get(name, value)
        return _State(self.nodes, {**self.values, name: value}) if known == value else None

    def take(self, which: int, position: int) -> _State:
        return _State({**self.nodes, which: position}, self.values)


def _node(
    pattern: Pattern, which: int, index: Index, position: int, state: _State
) -> Iterator[_State]:
    """Yield the ways in which pattern node `which` fits the node at `position`."""
    want, node = pattern.nodes[which], index.graph.nodes[position]
    if which in state.nodes or position in state.nodes.values():
        if state.nodes.get(which) == position:
            yield state
        return
    if node.op != want.op or len(node.results) < len(want.results):
        return
    if len(node.results) > len(want.results) and not want.open_results:
        return
    if len(want.operands) > len(node.operands):
        return
    taken: _State | None = state.take(which, position)
    for name, value in zip(want.results, node.results, strict=False):
        taken = taken.bind(name, value) if taken else None
    if taken is None:
        return
    for values in _orders(node):
        yield from _operands(pattern, list(zip(want.operands, values, strict=False)), index, taken)


def _operands(
    pattern: Pattern, pairs: Sequence[tuple[str, Value]], index: Index, state: _State
) -> Iterator[_State]:
    """Yield the ways in which operand names fit values, left to right."""
    if not pairs:
        yield state
        return
    name, value = pairs[0]
    bound = state.bind(name, value)
    if bound is None:
        return
    maker = pattern.maker(name)
    if maker is None:
        yield from _operands(pattern, pairs[1:], index, bound)
        return
    position = index.maker.get(value.name)
    if position is None:
        return
    for inner in _node(pattern, maker, index, position, bound):
        if inner.values[name] == value:
            yield from _operands(pattern, pairs[1:], index, inner)


def _rest(pattern: Pattern, index: Index, state: _State) -> Iterator[_State]:
    """Yield the ways in which the pattern nodes not above the root fit readers of bound values."""
    missing = [i for i in range(len(pattern.nodes)) if i not in state.nodes]
    if not missing:
        yield state
        return
    want = pattern.nodes[missing[0]]
    bound = [state.values[name] for name in want.operands if name in state.values]
    readers = sorted({p for value in bound for p in index.read_by(value)})
    for position in readers:
        for inner in _node(pattern, missing[0], index, position, state):
            yield from _rest(pattern, index, inner)


def _orders(node: Node) -> Iterator[tuple[Value, ...]]:
    yield node.operands
    if OPS[node.op].commutative and node.operands[0] != node.operands[1]:
        first, second, *others = node.operands
        yield (second, first, *others)
