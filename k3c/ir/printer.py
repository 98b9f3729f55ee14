"""Print a module as IR text: one node a line, results left, types right, attributes sorted."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from k3c.ir.graph import Attr, Call, Graph, LayerAttr, Module, Node, Shard, Weight
from k3c.ir.types import SymDim

LINE = 100  # a graph's head that is longer is broken: one parameter a line
WORD = re.compile(r"[A-Za-z_]\w*")
_RESERVED = ("true", "false", "layer")


def show(module: Module) -> str:
    """Return the text of a module; `parse(show(module))` is the module again."""
    head = ["k3ir 1", f"level {module.level}"]
    if module.mesh:
        head.append(f"mesh ({', '.join(f'{axis}={size}' for axis, size in module.mesh)})")
    head += [_dim(dim) for dim in module.dims]
    sections = ["\n".join(head), *(show_graph(graph) for graph in module.graphs)]
    if module.schedule:
        sections.append(_schedule(module.schedule))
    return "\n\n".join(sections) + "\n"


def show_graph(graph: Graph) -> str:
    """Return the text of one graph, without a final newline."""
    lines = [_head(graph)]
    lines += [f"  {_weight(weight)}" for weight in graph.weights]
    lines += [f"  {show_node(node)}" for node in graph.nodes]
    outputs = ", ".join(f"{name}=%{value.name}" for name, value in graph.outputs)
    lines.append(f"  return {outputs}".rstrip())
    return "\n".join([*lines, "}"])


def show_node(node: Node) -> str:
    """Return the line of a node; its `loc` stands at the end as a comment."""
    results = ", ".join(f"%{value.name}" for value in node.results)
    operands = ", ".join(f"%{value.name}" for value in node.operands)
    attrs = f" {show_attrs(node.attrs)}" if node.attrs else ""
    types = ", ".join(str(value.type) for value in node.results)
    loc = f"  # {node.loc}" if node.loc else ""
    return f"{results} = {node.op}({operands}){attrs} : {types}{loc}"


def show_attrs(attrs: Mapping[str, Attr]) -> str:
    """Return attributes in braces, sorted by name."""
    return "{" + ", ".join(f"{name}: {show_attr(attrs[name])}" for name in sorted(attrs)) + "}"


def show_attr(value: Attr) -> str:
    """Return one attribute value."""
    if isinstance(value, tuple):
        return f"({', '.join(show_attr(item) for item in value)})"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value if WORD.fullmatch(value) and value not in _RESERVED else json.dumps(value)
    return str(value) if isinstance(value, LayerAttr) else repr(value)


def node_line(graph: Graph, module: Module, index: int) -> int:
    """Return the 1-based line of node `index` of a graph in `show(module)`."""
    text = show(module).split("\n")
    start = next(i for i, line in enumerate(text) if line.startswith(f"graph @{graph.name}("))
    head_lines = _head(graph).count("\n") + 1
    return start + 1 + head_lines + len(graph.weights) + index


def _head(graph: Graph) -> str:
    params = [f"{i.role} %{i.value.name}: {i.value.type}" for i in graph.inputs]
    types = ", ".join(str(value.type) for _, value in graph.outputs)
    result = f" -> {types}" if types else ""
    line = f"graph @{graph.name}({', '.join(params)}){result} {{"
    if len(line) <= LINE:
        return line
    body = ",\n".join(f"  {param}" for param in params)
    return f"graph @{graph.name}(\n{body}\n){result} {{"


def _weight(weight: Weight) -> str:
    rank = len(weight.value.type.shape)
    sources = ", ".join(json.dumps(name) + _shard(shard, rank) for name, shard in weight.parts)
    return f"weight %{weight.value.name}: {weight.value.type} from {sources}"


def _shard(shard: Shard | None, rank: int) -> str:
    if shard is None:
        return ""
    words = ["-"] * rank
    words[shard.dim] = f"{shard.axis}{'@' if shard.placed else '*'}{shard.size}"
    return f" @ ({', '.join(words)})"


def _dim(dim: SymDim) -> str:
    return f"dim {dim.name} in [{dim.lo}, {'?' if dim.hi is None else dim.hi}]"


def _schedule(calls: tuple[Call, ...]) -> str:
    lines = [f"  {call.graph} {call.layer} {_call_attrs(call)}" for call in calls]
    return "\n".join(["schedule {", *lines, "}"])


def _call_attrs(call: Call) -> str:
    words = {name: str(value) for name, value in call.attrs.items()}
    words |= {name: f"{axis}*{factor}" for name, (axis, factor) in call.rank_attrs.items()}
    return "{" + ", ".join(f"{name}: {words[name]}" for name in sorted(words)) + "}"
