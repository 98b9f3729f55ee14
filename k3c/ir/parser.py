"""Parse IR text.

The grammar, with `#` comments and white space anywhere between words:

module   = "k3ir 1" "level" word ["mesh" "(" axis "=" size, ... ")"] dim* graph* [schedule]
dim      = "dim" name "in" "[" lo "," (hi | "?") "]"
graph    = "graph" "@"name "(" param, ... ")" ["->" type, ...] "{" weight* node* return "}"
param    = ("carry" | "state" | "io") value ":" type
weight   = "weight" value ":" type "from" (string ["@" "(" part | "-", ... ")"]), ...
part     = axis ("*" | "@") size
node     = value, ... "=" op "(" value, ... ")" [attrs] ":" type, ... ["#" loc]
return   = "return" [name "=" value, ...]
type     = dtype "[" size, ... "]" ["as" layout] ["@" "(" axis | "-", ... ")"]
size     = integer | [integer "*"] name
attrs    = "{" name ":" attr, ... "}"
attr     = number | word | "true" | "false" | string | "layer."name | "(" attr, ... ")"
schedule = "schedule" "{" (name layer "{" name ":" (integer | axis "*" integer), ... "}")* "}"
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeVar, cast

from k3c.ir.graph import (
    Attr,
    Call,
    Graph,
    Input,
    LayerAttr,
    Module,
    Node,
    Role,
    Shard,
    Value,
    Weight,
    weight_of,
)
from k3c.ir.scanner import Scanner
from k3c.ir.types import DTYPES, ROW_MAJOR, Dim, Layout, Sharding, SymDim, TensorType

T = TypeVar("T")

NAME = re.compile(r"[A-Za-z_]\w*")
_VALUE = re.compile(r"%[\w.]+")
_GRAPH = re.compile(r"@[\w.]+")
_INT = re.compile(r"-?\d+")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_LAYOUT = re.compile(r"[A-Za-z_][\w.\-]*")
_LAYER = re.compile(r"layer\.[A-Za-z_]\w*")
_TIMES = re.compile(r"[A-Za-z_]\w*\s*\*")
_LEVELS = ("model", "mesh", "kernel")
_ROLES = ("carry", "state", "io")


def parse(text: str, where: str = "") -> Module:
    """Parse the text of a module.

    Args:
        text: IR text; `show` prints it again unchanged if it was printed by `show`.
        where: File name for messages.

    Raises:
        ParseError: With the line, a caret, what was expected and what to do.
    """
    return Parser(Scanner(text, where)).module()


class Parser:
    """Recursive descent, one method a rule of the grammar."""

    def __init__(self, scanner: Scanner) -> None:
        """Read from `scanner`."""
        self.scan = scanner
        self.dims: dict[str, SymDim] = {}
        self.axes: dict[str, int] = {}
        self.values: dict[str, Value] = {}

    def module(self) -> Module:
        """Parse everything."""
        self.scan.expect("k3ir", "IR text starts with `k3ir 1`")
        self.scan.expect("1", "this version of k3c reads format 1 only")
        self.scan.expect("level", "write `level model` after the first line")
        level = cast('Literal["model", "mesh", "kernel"]', self._one_of(_LEVELS))
        self._mesh()
        while self.scan.accept("dim "):
            self._dim_line()
        graphs: list[Graph] = []
        while self.scan.accept("graph"):
            graphs.append(self._graph())
        schedule = self._schedule()
        if not self.scan.done():
            raise self.scan.error("`dim`, `graph`, `schedule` or the end of the text")
        mesh = tuple(self.axes.items())
        return Module(level, tuple(self.dims.values()), tuple(graphs), schedule, mesh)

    def type(self) -> TensorType:
        """Parse a type and check shape, layout and sharding against each other."""
        start = self.scan.at
        dtype = DTYPES[self._one_of(tuple(DTYPES))]
        self.scan.expect("[", "a type is written bf16[T, 64]")
        shape = tuple(self._list(self._dim, "]"))
        layout = ROW_MAJOR
        if self.scan.accept("as "):
            layout = Layout(self.scan.take(_LAYOUT, "a layout name"))
        sharding = Sharding(tuple(self._axes())) if self.scan.accept("@ (") else None
        if sharding and len(sharding.axes) != len(shape):
            what = f"{len(sharding.axes)} axes for {len(shape)} dimensions"
            raise self.scan.complaint(what, "write one mesh axis or - for each dimension", start)
        for dim, axis in zip(shape, sharding.axes if sharding else (), strict=False):
            size = self.axes[axis] if axis else 1
            if isinstance(dim, int) and dim % size:
                what = f"dimension {dim} does not divide by mesh axis {axis}={size}"
                raise self.scan.complaint(what, "shard another dimension", start)
        return TensorType(dtype, shape, layout, sharding)

    def attrs(self) -> dict[str, Attr]:
        """Parse attributes in braces, if there are any."""
        found: dict[str, Attr] = {}
        if not self.scan.accept("{"):
            return found
        while not self.scan.accept("}"):
            if found:
                self.scan.expect(",", "attributes are separated by commas")
            start = self.scan.at
            name = self.scan.take(NAME, "an attribute name")
            if name in found:
                raise self.scan.complaint(f"attribute {name} twice", "remove one", start)
            self.scan.expect(":", "an attribute is written name: value")
            found[name] = self._attr()
        return found

    def value_names(self, stop: str) -> list[str]:
        """Parse value names up to the word `stop`, without their percent signs."""
        return [name[1:] for name in self._list(lambda: self.scan.take(_VALUE, "a %value"), stop)]

    def op_name(self) -> str:
        """Parse the name of an op and its opening parenthesis."""
        name = self.scan.take(NAME, "an op name")
        self.scan.expect("(", "operands stand in parentheses")
        return name

    def _list(self, item: Callable[[], T], stop: str) -> list[T]:
        items: list[T] = []
        while not self.scan.accept(stop):
            if items:
                self.scan.expect(",", f"separate by commas, close with {stop!r}")
            items.append(item())
        return items

    def _one_of(self, words: tuple[str, ...]) -> str:
        start = self.scan.at
        word = self.scan.take(NAME, " or ".join(words))
        if word not in words:
            raise self.scan.error(" or ".join(words), at=start)
        return word

    def _integer(self) -> int:
        return int(self.scan.take(_INT, "an integer"))

    def _mesh(self) -> None:
        if not self.scan.accept("mesh"):
            return
        self.scan.expect("(")
        for axis, size in self._list(self._axis_size, ")"):
            self.axes[axis] = size

    def _axis_size(self) -> tuple[str, int]:
        axis = self.scan.take(NAME, "a mesh axis")
        self.scan.expect("=")
        return axis, self._integer()

    def _axes(self) -> list[str | None]:
        return self._list(self._axis, ")")

    def _axis(self) -> str | None:
        if self.scan.accept("-"):
            return None
        start = self.scan.at
        axis = self.scan.take(NAME, "a mesh axis or -")
        if axis not in self.axes:
            known = ", ".join(self.axes) or "none"
            raise self.scan.complaint(f"mesh axis {axis} is unknown", f"known: {known}", start)
        return axis

    def _dim_line(self) -> None:
        start = self.scan.at
        name = self.scan.take(NAME, "a dimension name")
        if name in self.dims:
            raise self.scan.complaint(f"dimension {name} twice", "remove one line", start)
        self.scan.expect("in")
        self.scan.expect("[", "a range is written [1, 64]")
        low = self._integer()
        self.scan.expect(",", "a range is written [1, 64]")
        high = None if self.scan.accept("?") else self._integer()
        self.scan.expect("]", "a range is written [1, 64]")
        self.dims[name] = SymDim(name, low, high)

    def _dim(self) -> Dim:
        start, times = self.scan.at, 1
        if self.scan.text[start : start + 1].isdigit():
            times = self._integer()
            if not self.scan.accept("*"):
                return times
        name = self.scan.take(NAME, "a dimension: a number or a name")
        if name not in self.dims:
            hint = f"add a line `dim {name} in [1, 64]` above the graphs"
            raise self.scan.complaint(f"dimension {name} is unknown", hint, start)
        return replace(self.dims[name], times=times)

    def _graph(self) -> Graph:
        self.values = {}
        name = self.scan.take(_GRAPH, "a graph name such as @head")[1:]
        self.scan.expect("(")
        inputs = tuple(self._list(self._input, ")"))
        at = self.scan.at
        types: list[TensorType] = []
        if self.scan.accept("->"):
            types = self._list(self.type, "{")
        else:
            self.scan.expect("{")
        weights: list[Weight] = []
        while self.scan.accept("weight"):
            weights.append(self._weight())
        nodes: list[Node] = []
        while self.scan.peek("%"):
            nodes.append(self._node())
        self.scan.expect("return", "a graph ends with `return name=%value, ...`")
        outputs = tuple(self._list(self._output, "}"))
        found = [value.type for _, value in outputs]
        if found != types:
            what = f"the head gives {_types(types)}, the return line {_types(found)}"
            raise self.scan.complaint(what, "repeat the types of the returned values", at)
        return Graph(name, inputs, tuple(weights), tuple(nodes), outputs)

    def _input(self) -> Input:
        role = cast("Role", self._one_of(_ROLES))
        return Input(self._typed_value(), role)

    def _typed_value(self) -> Value:
        start = self.scan.at
        name = self.scan.take(_VALUE, "a %value")[1:]
        self.scan.expect(":", "write the type after a colon")
        return self._define(name, self.type(), start)

    def _weight(self) -> Weight:
        value = self._typed_value()
        self.scan.expect("from", "a weight names its checkpoint tensors")
        rank = len(value.type.shape)
        parts = [(self._string(), self._shard(rank))]
        while self.scan.accept(","):
            parts.append((self._string(), self._shard(rank)))
        return weight_of(value, parts)

    def _shard(self, rank: int) -> Shard | None:
        start = self.scan.at
        if not self.scan.accept("@ ("):
            return None
        words = self._list(self._part, ")")
        shards = [replace(part, dim=dim) for dim, part in enumerate(words) if part]
        if len(words) != rank or len(shards) != 1:
            hint = "write axis*size for one dimension and - for each other one"
            raise self.scan.complaint(f"{len(shards)} of {rank} dimensions sharded", hint, start)
        return shards[0]

    def _part(self) -> Shard | None:
        """Parse what a rank has of a dimension, which the caller knows."""
        axis = self._axis()
        if axis is None:
            return None
        placed = self.scan.accept("@")
        if not placed:
            self.scan.expect("*", "a part is written tp*768: coordinate times size")
        return Shard(axis, 0, self._integer(), placed)

    def _axis_times(self) -> tuple[str, int] | None:
        axis = self._axis()
        if axis is None:
            return None
        self.scan.expect("*", "a part is written tp*768: coordinate times size")
        return axis, self._integer()

    def _string(self) -> str:
        return str(json.loads(self.scan.take(_STRING, "a string in double quotes")))

    def _node(self) -> Node:
        start = self.scan.at
        names = self.value_names("=")
        op = self.op_name()
        operands = tuple(self._list(self._operand, ")"))
        attrs = self.attrs()
        self.scan.expect(":", "write the result types after a colon")
        types = [self.type()]
        while self.scan.accept(","):
            types.append(self.type())
        loc = self.scan.comment()
        if len(types) != len(names):
            what = f"{len(types)} types for {len(names)} results"
            raise self.scan.complaint(what, "write one type for each result", start)
        pairs = zip(names, types, strict=True)
        results = tuple(self._define(name, kind, start) for name, kind in pairs)
        return Node(op, operands, results, attrs, loc)

    def _define(self, name: str, kind: TensorType, at: int) -> Value:
        if name in self.values:
            raise self.scan.complaint(f"%{name} is defined twice", "rename one", at)
        self.values[name] = Value(name, kind)
        return self.values[name]

    def _operand(self) -> Value:
        start = self.scan.at
        name = self.scan.take(_VALUE, "a %value")[1:]
        if name not in self.values:
            hint = "values are defined above their first use"
            raise self.scan.complaint(f"%{name} is not defined", hint, start)
        return self.values[name]

    def _output(self) -> tuple[str, Value]:
        name = self.scan.take(NAME, "a name of a carry, state or io value, or }")
        self.scan.expect("=", "write return name=%value")
        return name, self._operand()

    def _attr(self) -> Attr:
        if self.scan.accept("("):
            return cast("Attr", tuple(self._list(self._attr, ")")))
        if self.scan.peek('"'):
            return self._string()
        if self.scan.peek("layer."):
            return LayerAttr(self.scan.take(_LAYER, "layer.name").removeprefix("layer."))
        if NAME.match(self.scan.text, self.scan.at):
            word = self.scan.take(NAME, "a word")
            return {"true": True, "false": False}.get(word, word)
        number = self.scan.take(_NUMBER, "a number, word, string, layer.name or (...)")
        return float(number) if set(number) & set(".eE") else int(number)

    def _schedule(self) -> tuple[Call, ...]:
        calls: list[Call] = []
        if self.scan.accept("schedule"):
            self.scan.expect("{")
            while not self.scan.accept("}"):
                calls.append(self._call())
        return tuple(calls)

    def _call(self) -> Call:
        graph, layer = self.scan.take(NAME, "a graph name or }"), self._integer()
        attrs: dict[str, int] = {}
        rank_attrs: dict[str, tuple[str, int]] = {}
        for name, value in self._call_attrs():
            if name in attrs or name in rank_attrs:
                raise self.scan.complaint(f"attribute {name} twice", "remove one", self.scan.at)
            if isinstance(value, int):
                attrs[name] = value
            else:
                rank_attrs[name] = value
        return Call(graph, layer, attrs, rank_attrs)

    def _call_attrs(self) -> list[tuple[str, int | tuple[str, int]]]:
        return self._list(self._call_attr, "}") if self.scan.accept("{") else []

    def _call_attr(self) -> tuple[str, int | tuple[str, int]]:
        name = self.scan.take(NAME, "an attribute name")
        self.scan.expect(":", "an attribute is written name: value")
        start = self.scan.at
        word = self._axis_times() if _TIMES.match(self.scan.text, start) else None
        if word is not None:
            return name, word
        if not _INT.match(self.scan.text, start):
            raise self.scan.complaint("a layer attribute is an integer", "write one", start)
        return name, self._integer()


def _types(types: list[TensorType]) -> str:
    return ", ".join(map(str, types)) or "none"
