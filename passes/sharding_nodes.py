"""What the shard pass does to one node, and to reductions that may go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from k3c.errors import PassError
from k3c.ir.graph import Graph, Module, Node, Value
from k3c.ir.ops import OPS
from k3c.ir.types import Dim, SymDim, TensorType

ROWS_DIM = "T"
# Rows of all data-parallel ranks in one step: times 16 choices and the 384 tiles of 16 rows of an
# expert's gate and up they are counted in 32 bits.
MOST_ROWS = 1 << 18


def on_local_operands(node: Node, operands: tuple[Value, ...], ranks: int) -> Node:
    """Return a node that reads the parts of one rank; its results are still whole.

    Heads are divided by the number of ranks where the first operand holds a part of them.
    """
    heads = node.attrs.get("heads")
    if not isinstance(heads, int) or operands[0].type == node.operands[0].type:
        return replace(node, operands=operands)
    if heads % ranks:
        what = f"{heads} heads of {node.op} do not divide by tp={ranks}"
        raise PassError(what, f"%{node.results[0].name}", "take another mesh")
    return replace(node, operands=operands, attrs={**node.attrs, "heads": heads // ranks})


def local_types(node: Node, local: Node) -> tuple[TensorType, ...]:
    """Return the result types of `local`: `node` on the operands of one rank.

    Raises:
        PassError: The op cannot work on parts of this shape.
    """
    whole = tuple(value.type for value in node.results)
    operands = tuple(value.type for value in local.operands)
    if operands == tuple(v.type for v in node.operands) and "columns" not in local.attrs:
        return whole
    if local.op in ("linear", "grouped_linear"):
        rows = operands[2].shape if local.op == "grouped_linear" else operands[0].shape[:-1]
        shape = (*rows, operands[1].shape[-2])
        return tuple(replace(kind, shape=shape) for kind in whole)
    if local.op == "cast":
        return (replace(whole[0], shape=operands[0].shape),)
    types = whole if local.op == "embed" else OPS[local.op].infer(operands, local.attrs)
    if types is None:
        what = f"{local.op} cannot work on {', '.join(map(str, operands))}"
        raise PassError(what, f"%{node.results[0].name}", "take another mesh")
    return types


def resized(kind: TensorType, dim: int, size: Dim) -> TensorType:
    """Return a type with one dimension replaced."""
    shape = (*kind.shape[:dim], size, *kind.shape[dim + 1 :])
    return replace(kind, shape=shape)


def most_tokens(dp: int) -> int:
    """Return the rows of a step that each of `dp` ranks may have when experts see all of them."""
    return MOST_ROWS // dp


def with_fewer_rows(module: Module, most: int) -> Module:
    """Return a module whose steps have at most so many rows."""
    changed = {d: replace(d, hi=most) for d in module.dims if d.name == ROWS_DIM}
    changed = {old: new for old, new in changed.items() if old.hi is None or old.hi > most}
    if not changed:
        return module
    dims = tuple(changed.get(dim, dim) for dim in module.dims)
    return replace(module, dims=dims, graphs=tuple(_graph(g, changed) for g in module.graphs))


def _graph(graph: Graph, dims: Mapping[SymDim, SymDim]) -> Graph:
    def value(old: Value) -> Value:
        shape = tuple(dims.get(d, d) if isinstance(d, SymDim) else d for d in old.type.shape)
        return replace(old, type=replace(old.type, shape=shape))

    nodes = tuple(
        replace(n, operands=tuple(map(value, n.operands)), results=tuple(map(value, n.results)))
        for n in graph.nodes
    )
    inputs = tuple(replace(item, value=value(item.value)) for item in graph.inputs)
    outputs = tuple((name, value(old)) for name, old in graph.outputs)
    return replace(graph, inputs=inputs, nodes=nodes, outputs=outputs)


def one_message(nodes: list[Node]) -> list[Node]:
    """Join the first two reductions that do not wait for each other, and the next two, ..."""
    for second, node in enumerate(nodes):
        for first, other in enumerate(nodes[:second]):
            single = all(n.op == "all_reduce" and len(n.operands) == 1 for n in (node, other))
            if single and node.attrs == other.attrs and not _waits(nodes, second, first):
                both = replace(
                    other,
                    operands=other.operands + node.operands,
                    results=other.results + node.results,
                )
                rest = [*nodes[:first], both, *nodes[first + 1 : second], *nodes[second + 1 :]]
                return one_message(rest)
    return nodes


def _waits(nodes: list[Node], node: int, earlier: int) -> bool:
    """Whether a node reads, directly or not, what an earlier one makes."""
    made = {value.name for value in nodes[earlier].results}
    for between in nodes[earlier + 1 : node + 1]:
        if any(value.name in made for value in between.operands):
            made |= {value.name for value in between.results}
    return any(value.name in made for value in nodes[node].operands)
