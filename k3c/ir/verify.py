"""Check a module against every rule of the IR. Runs after the export and after each pass.

An error shows the node's line with a caret under the guilty value, and names the line's number in
the module's text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from k3c.errors import VerifyError
from k3c.ir.graph import Attr, Graph, LayerAttr, Module, Node, Shard, Value
from k3c.ir.ops import OPS, rank_multiple
from k3c.ir.printer import node_line, show_node
from k3c.ir.scanner import snippet
from k3c.ir.types import ROW_MAJOR, Dim, SymDim, TensorType


@dataclass(frozen=True)
class _Finding:
    """What is wrong with a node, the value it is about and what to do."""

    what: str
    value: str
    hint: str


def verify(module: Module) -> None:
    """Check a module.

    Raises:
        VerifyError: The first rule that it breaks.
    """
    _verify_names(module)
    _verify_dims(module)
    _verify_mesh(module)
    for graph in module.graphs:
        _verify_heads(graph)
        _verify_weights(module, graph)
        _verify_nodes(graph, module)
        _verify_outputs(graph)
    _verify_carries(module)
    _verify_schedule(module)


def layer_attrs(graph: Graph) -> tuple[str, ...]:
    """Return the names of the layer attributes that a graph's nodes use, sorted."""
    values = [value for node in graph.nodes for value in node.attrs.values()]
    return tuple(sorted({value.name for value in values if isinstance(value, LayerAttr)}))


def _verify_names(module: Module) -> None:
    names = [graph.name for graph in module.graphs]
    for name in names:
        if names.count(name) > 1:
            raise VerifyError(f"graph {name} is defined twice", f"graph @{name}", "rename one")


def _verify_dims(module: Module) -> None:
    known = {dim.name: dim for dim in module.dims}
    for dim in module.dims:
        if dim.hi is None:
            hint = f"give it a largest value: dim {dim.name} in [{dim.lo}, 64]"
            raise VerifyError(f"dimension {dim.name} is unbounded", f"dim {dim.name}", hint)
        if not 0 <= dim.lo <= dim.hi:
            what = f"dimension {dim.name} has the empty range [{dim.lo}, {dim.hi}]"
            raise VerifyError(what, f"dim {dim.name}", "write the smaller number first")
    for graph in module.graphs:
        for value in _values(graph):
            for dim in value.type.shape:
                if isinstance(dim, SymDim) and known.get(dim.name) != replace(dim, times=1):
                    what = f"dimension {dim.name} of %{value.name} is not the module's"
                    raise VerifyError(what, f"graph @{graph.name}", "add it to the module's dims")


def _verify_mesh(module: Module) -> None:
    sizes = dict(module.mesh)
    for graph in module.graphs:
        for value in _values(graph):
            problem = _sharding_problem(value.type, sizes)
            if problem:
                where = f"graph @{graph.name}, %{value.name}"
                raise VerifyError(problem, where, "shard over an axis of the mesh, or not at all")


def _sharding_problem(kind: TensorType, sizes: dict[str, int]) -> str | None:
    if kind.sharding is None:
        return None
    if len(kind.sharding.axes) != len(kind.shape):
        return f"{len(kind.sharding.axes)} mesh axes for {len(kind.shape)} dimensions"
    for axis, dim in zip(kind.sharding.axes, kind.shape, strict=True):
        if axis is not None and axis not in sizes:
            return f"mesh axis {axis} is unknown; the mesh has {', '.join(sizes) or 'none'}"
        if axis is not None and isinstance(dim, int) and dim % sizes[axis]:
            return f"dimension {dim} does not divide by mesh axis {axis}={sizes[axis]}"
    return None


def _verify_heads(graph: Graph) -> None:
    """Check inputs and weights: names, positive sizes, and layouts on weights only."""
    seen: set[str] = set()
    weights = {weight.value.name for weight in graph.weights}
    for value in _parameters(graph):
        where = f"graph @{graph.name}, %{value.name}"
        if value.name in seen:
            raise VerifyError(f"%{value.name} is defined twice", where, "rename one")
        seen.add(value.name)
        if any(not _positive(dim) for dim in value.type.shape):
            raise VerifyError(f"{value.type} has an empty dimension", where, "sizes start at 1")
        if value.type.layout != ROW_MAJOR and value.name not in weights:
            what = f"an input has layout {value.type.layout}"
            raise VerifyError(what, where, "only weights have layouts")


def _verify_weights(module: Module, graph: Graph) -> None:
    """Check what weights are made of: names, and the parts that a rank reads."""
    axes = dict(module.mesh)
    for weight in graph.weights:
        where = f"graph @{graph.name}, %{weight.value.name}"
        if not weight.sources:
            raise VerifyError("a weight without sources", where, "name its checkpoint tensors")
        if weight.shards and len(weight.shards) != len(weight.sources):
            what = f"{len(weight.shards)} shards for {len(weight.sources)} sources"
            raise VerifyError(what, where, "give one for each source")
        for source, shard in weight.parts:
            problem = _shard_problem(shard, weight.value.type, axes) if shard else None
            if problem:
                raise VerifyError(problem, f"{where} from {source}", "shard over the mesh")


def _shard_problem(shard: Shard, kind: TensorType, axes: dict[str, int]) -> str | None:
    if shard.axis not in axes:
        return f"mesh axis {shard.axis} is unknown; the mesh has {', '.join(axes) or 'none'}"
    if not 0 <= shard.dim < len(kind.shape):
        return f"dimension {shard.dim} of {kind} is sharded"
    most = kind.sizes[shard.dim]
    rows = shard.dim == max(0, len(kind.shape) - 2)  # what several sources share
    if not 1 <= shard.size <= most or not (rows or shard.size == most):
        return f"a part of {shard.size} in dimension {shard.dim} of {kind}"
    return None


def _verify_nodes(graph: Graph, module: Module) -> None:
    defined = {value.name: value for value in _parameters(graph)}
    overwritten: dict[str, str] = {}
    for index, node in enumerate(graph.nodes):
        finding = (
            _undefined(node, defined)
            or _wrong_op(node, module)
            or _overwritten(node, overwritten)
            or _redefined(node, defined)
        )
        if finding:
            raise _error(finding, graph, module, index)
        defined |= {value.name: value for value in node.results}
        for result, operand in OPS[node.op].in_place.items():
            overwritten[node.operands[operand].name] = node.results[result].name
    for name, value in graph.outputs:
        where = f"graph @{graph.name}, return {name}=%{value.name}"
        if defined.get(value.name) != value:
            raise VerifyError(f"%{value.name} is not defined", where, "return a defined value")
        if value.name in overwritten:
            hint = f"return %{overwritten[value.name]}"
            raise VerifyError(f"%{value.name} is overwritten", where, hint)


def _undefined(node: Node, defined: dict[str, Value]) -> _Finding | None:
    for value in node.operands:
        if value.name not in defined:
            hint = "define values above their first use"
            return _Finding(f"%{value.name} is not defined", value.name, hint)
        if defined[value.name] != value:
            what = f"%{value.name} is {defined[value.name].type} above and {value.type} here"
            return _Finding(what, value.name, "a value keeps its type")
    return None


def _redefined(node: Node, defined: dict[str, Value]) -> _Finding | None:
    names = [value.name for value in node.results]
    for value in node.results:
        if value.name in defined or names.count(value.name) > 1:
            return _Finding(f"%{value.name} is defined twice", value.name, "rename one")
        if value.type.layout != ROW_MAJOR:
            what = f"%{value.name} has layout {value.type.layout}"
            return _Finding(what, value.name, "only weights have layouts")
    return None


def _wrong_op(node: Node, module: Module) -> _Finding | None:
    spec = OPS.get(node.op)
    if spec is None:
        return _Finding(f"op {node.op} is unknown", node.op, f"known ops: {', '.join(OPS)}")
    if module.level == "kernel" and spec.level == "model":
        hint = "a fusion should have replaced it: see the refusals of the passes"
        return _Finding(f"op {node.op} is not a kernel-level op", node.op, hint)
    for name, attr in node.attrs.items():
        if not _finite(attr):
            return _Finding(f"attribute {name} is not finite", node.op, "write none for no limit")
    problem = spec.check(node)
    if problem is None:
        return _wrong_axis(node, dict(module.mesh)) if "axis" in node.attrs else None
    value = node.op if problem.operand is None else node.operands[problem.operand].name
    return _Finding(f"{node.op}: {problem.what}", value, "see k3c/ir/ops.py for the op's signature")


def _wrong_axis(node: Node, axes: dict[str, int]) -> _Finding | None:
    """Check a collective against the mesh."""
    axis = str(node.attrs["axis"])
    if axis not in axes:
        known = ", ".join(axes) or "none"
        return _Finding(f"mesh axis {axis} is unknown", node.op, f"axes of the mesh: {known}")
    if node.op in ("dispatch_tokens", "combine_tokens"):
        few, many = node.operands[0].type.shape[0], node.results[0].type.shape[0]
        few, many = (few, many) if node.op == "dispatch_tokens" else (many, few)
        if rank_multiple(few, many) != axes[axis]:
            what = f"{many} rows are not those of {axes[axis]} ranks with {few}"
            return _Finding(what, node.results[0].name, f"{axis}={axes[axis]} ranks exchange rows")
    if node.op == "all_gather" and node.results[0].type.shape[0] != axes[axis]:
        what = f"{node.results[0].type} gathers {axes[axis]} ranks"
        return _Finding(what, node.results[0].name, "its first dimension counts the ranks")
    return None


def _overwritten(node: Node, overwritten: dict[str, str]) -> _Finding | None:
    for value in node.operands:
        if value.name in overwritten:
            hint = f"read %{overwritten[value.name]}, or move this node above"
            return _Finding(f"%{value.name} was overwritten in place", value.name, hint)
    places = [node.operands[i].name for i in OPS[node.op].in_place.values()]
    for index, value in enumerate(node.operands):
        elsewhere = index not in OPS[node.op].in_place.values() and value.name in places
        if elsewhere or places.count(value.name) > 1:
            what = f"%{value.name} is overwritten by the node that also reads it elsewhere"
            return _Finding(what, value.name, "pass another value")
    return None


def _verify_outputs(graph: Graph) -> None:
    """Check names and types: a carry or state that comes back keeps its type; states do."""
    inputs = {i.value.name: i for i in graph.inputs}
    names = [name for name, _ in graph.outputs]
    for name, value in graph.outputs:
        where = f"graph @{graph.name}, return {name}=%{value.name}"
        if names.count(name) > 1:
            raise VerifyError(f"{name} is returned twice", where, "return it once")
        known = inputs.get(name)
        if known and known.role != "io" and known.value.type != value.type:
            what = f"{known.role} {name} goes in as {known.value.type} and out as {value.type}"
            raise VerifyError(what, where, "a carry or state keeps its type from layer to layer")
    for name, known in inputs.items():
        if known.role == "state" and name not in names:
            where = f"graph @{graph.name}"
            raise VerifyError(f"state {name} is not returned", where, f"return {name}=...")


def _verify_carries(module: Module) -> None:
    """Check that a carry has one type in every graph that takes or gives it."""
    inputs = [(g, i) for g in module.graphs for i in g.inputs if i.role == "carry"]
    types = {i.value.name: (i.value.type, g.name) for g, i in reversed(inputs)}
    uses = [(g.name, i.value.name, i.value.type) for g, i in inputs]
    uses += [(g.name, name, v.type) for g in module.graphs for name, v in g.outputs]
    for graph, name, found in uses:
        wanted, first = types.get(name, (found, graph))
        if found != wanted:
            what = f"carry {name} is {found} here and {wanted} in graph @{first}"
            raise VerifyError(what, f"graph @{graph}", "a carry has one type in all graphs")


def _verify_schedule(module: Module) -> None:
    graphs = {graph.name: graph for graph in module.graphs}
    for position, call in enumerate(module.schedule):
        where = f"schedule entry {position}: {call.graph} {call.layer}"
        if call.graph not in graphs:
            known = ", ".join(graphs)
            raise VerifyError(f"graph {call.graph} is unknown", where, f"known graphs: {known}")
        for name in layer_attrs(graphs[call.graph]):
            if name not in call.attrs and name not in call.rank_attrs:
                what = f"layer attribute {name} of graph {call.graph} is missing"
                raise VerifyError(what, where, f"write {{{name}: ...}} behind the call")

        for name, (axis, _) in call.rank_attrs.items():
            if axis not in dict(module.mesh) or name in call.attrs:
                what = f"layer attribute {name} is {axis}*..., which the mesh does not define"
                raise VerifyError(what, where, "use an axis of the mesh, once")


def _error(finding: _Finding, graph: Graph, module: Module, index: int) -> VerifyError:
    line = show_node(graph.nodes[index])
    word = finding.value if f"%{finding.value}" not in line else f"%{finding.value}"
    column = _column(line, word)
    where = f"graph @{graph.name}, line {node_line(graph, module, index)}"
    return VerifyError(finding.what, where, finding.hint + snippet(line, column, len(word)))


def _column(line: str, word: str) -> int:
    """Return the column of a whole word, behind the equals sign if it stands there too."""
    start = line.find("=")
    for begin in (start, 0):
        at = line.find(word, begin)
        while at >= 0 and line[at + len(word) : at + len(word) + 1].isalnum():
            at = line.find(word, at + 1)
        if at >= 0:
            return at
    return 0


def _finite(value: Attr) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _positive(dim: Dim) -> bool:
    return (dim.times if isinstance(dim, SymDim) else dim) >= 1


def _parameters(graph: Graph) -> Iterator[Value]:
    yield from (i.value for i in graph.inputs)
    yield from (w.value for w in graph.weights)


def _values(graph: Graph) -> Iterator[Value]:
    yield from _parameters(graph)
    for node in graph.nodes:
        yield from node.results
