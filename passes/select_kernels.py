"""Bind a bucket's dimensions and choose the kernel template of every node.

Before: a module at level kernel with symbolic dimensions. After: the same with integers, the head
that the bucket does not use dropped, weights in the layouts that their templates read, and a
template for every node. Runs once per bucket, after all passes on the whole module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from k3c.artifact import Bucket, Space
from k3c.errors import CodegenError, PassError
from k3c.ir.graph import Graph, Input, Module, Node, Value, Weight
from k3c.ir.ops import COLLECTIVES
from k3c.ir.refusal import Refusal
from k3c.ir.types import ROW_MAJOR, Layout, SymDim
from k3c.targets.catalogue import Catalogue, Template
from k3c.targets.target import Target

HEAD = "head"
# What a phase runs in place of the head, where the module has it.
HEADS: Mapping[str, str] = {"score": "score_head", "decode": "decode_head"}
PAGES_DIM = "P"  # a state whose first dimension is this lies in pages; any other lies in slots

NodeKey = tuple[str, str]  # graph name, name of the node's first result


@dataclass(frozen=True)
class Selected:
    """A module bound to a bucket, with a template for every node.

    Attributes:
        module: All dimensions are integers; weights carry their layout.
        bucket: What it is bound to.
        target: What the templates compile for.
        choices: The template of each node but the collectives, which the runtime does itself.
        state_spaces: The space of each state, by its name.
        refusals: Why more preferred templates did not take a node: node, template, reason.
    """

    module: Module
    bucket: Bucket
    target: Target
    choices: Mapping[NodeKey, Template]
    state_spaces: Mapping[str, Space]
    refusals: tuple[tuple[NodeKey, str, Refusal], ...]

    def template(self, graph: Graph, node: Node) -> Template:
        """Return the template that implements a node of `graph`."""
        return self.choices[node_key(graph, node)]


def node_key(graph: Graph, node: Node) -> NodeKey:
    """Return what names a node whatever its place in the graph is."""
    return graph.name, node.results[0].name


def run(module: Module, bucket: Bucket, catalogue: Catalogue, target: Target) -> Selected:
    """Bind and select.

    Args:
        module: The whole model at level kernel.
        bucket: Binds every dimension.
        catalogue: Templates in order of preference.
        target: The device.

    Raises:
        CodegenError: No template takes a node; the message has every refusal.
        PassError: Two nodes want one weight in different layouts, or the bucket leaves a dimension
            unbound.
    """
    assert module.level == "kernel", f"level {module.level}, need kernel"
    used = _drop_unused_heads(module, bucket)
    spaces = _state_spaces(used)
    bound = replace(used, dims=(), graphs=tuple(_bind(g, bucket) for g in used.graphs))
    choices: dict[NodeKey, Template] = {}
    refusals: list[tuple[NodeKey, str, Refusal]] = []
    graphs: list[Graph] = []
    for graph in bound.graphs:
        for node in _launched(graph):
            chosen, why_not = _select(graph, node, catalogue, target)
            choices[node_key(graph, node)] = chosen
            refusals += [(node_key(graph, node), name, refusal) for name, refusal in why_not]
        graphs.append(_with_layouts(graph, choices, target))
    return Selected(
        replace(bound, graphs=tuple(graphs)), bucket, target, choices, spaces, tuple(refusals)
    )


def check_agreement(selections: Sequence[Selected]) -> None:
    """Check that all buckets read the same packed weights.

    Raises:
        PassError: A weight has another layout, shape or source in two buckets.
    """
    seen: dict[tuple[str, str], tuple[Weight, str]] = {}
    for selected in selections:
        for graph in selected.module.graphs:
            for weight in graph.weights:
                first, bucket = seen.setdefault(
                    (graph.name, weight.value.name), (weight, selected.bucket.name)
                )
                if first != weight:
                    types = f"{first.value.type} in {bucket}, {weight.value.type}"
                    what = f"weight %{weight.value.name} is {types} in {selected.bucket.name}"
                    raise PassError(what, f"graph {graph.name}", "layouts must not depend on it")


def _launched(graph: Graph) -> list[Node]:
    """Return the nodes that are kernels."""
    return [node for node in graph.nodes if node.op not in COLLECTIVES]


def _drop_unused_heads(module: Module, bucket: Bucket) -> Module:
    """Keep the epilogue that the bucket's phase runs, under its own name."""
    names = {graph.name for graph in module.graphs}
    heads = {HEAD, *HEADS.values()}
    if not names & heads:
        return module
    keep = HEADS.get(bucket.phase, HEAD)
    if keep not in names and bucket.phase == "decode":
        keep = HEAD
    if keep not in names:
        raise PassError(f"no graph {keep}", f"bucket {bucket.name}", "export both heads")
    drop = heads - {keep}
    schedule = tuple(replace(c, graph=keep) if c.graph in drop else c for c in module.schedule)
    graphs = tuple(graph for graph in module.graphs if graph.name not in drop)
    return replace(module, graphs=graphs, schedule=schedule)


def _state_spaces(module: Module) -> dict[str, Space]:
    spaces: dict[str, Space] = {}
    for graph in module.graphs:
        for item in graph.inputs:
            if item.role == "state":
                first = item.value.type.shape[0]
                paged = isinstance(first, SymDim) and first.name == PAGES_DIM
                spaces[item.value.name] = "kv_pages" if paged else "state_slots"
    return spaces


def _bind(graph: Graph, bucket: Bucket) -> Graph:
    """Return the graph with integers for dimensions."""

    def bound(value: Value) -> Value:
        kind = value.type.bind(bucket.dims)
        for dim in kind.shape:
            if isinstance(dim, SymDim):
                where = f"%{value.name} in graph {graph.name}, bucket {bucket.name}"
                raise PassError(f"dimension {dim} is not bound", where, "bind it in the bucket")
        return replace(value, type=kind)

    return _map_values(graph, bound)


def _select(
    graph: Graph, node: Node, catalogue: Catalogue, target: Target
) -> tuple[Template, list[tuple[str, Refusal]]]:
    refused: list[tuple[str, Refusal]] = []
    for template in catalogue.for_op(node.op):
        refusal = template.accepts(node, target)
        if refusal is None:
            return template, refused
        refused.append((template.name, refusal))
    reasons = "; ".join(f"{name}: {refusal}" for name, refusal in refused)
    what = f"no kernel for {_signature(node)}: {reasons or 'no template implements this op'}"
    loc = f", {node.loc}" if node.loc else ""
    raise CodegenError(what, f"layer kind {graph.name}, target {target.name}{loc}")


def _signature(node: Node) -> str:
    operands = ", ".join(str(v.type) for v in node.operands)
    return f"{node.op}({operands}) -> {', '.join(str(v.type) for v in node.results)}"


def _with_layouts(graph: Graph, choices: Mapping[NodeKey, Template], target: Target) -> Graph:
    """Give each weight the layout that the nodes reading it want."""
    weights = {weight.value.name: weight.value.type.layout for weight in graph.weights}
    # A layout that an earlier pass gave is a reader like any other.
    wanted = {n: (kept, "layout_mxfp4") for n, kept in weights.items() if kept != ROW_MAJOR}
    for node in _launched(graph):
        template = choices[node_key(graph, node)]
        layouts = template.layouts(node, target)
        for index, operand in enumerate(node.operands):
            if operand.name not in weights:
                assert index not in layouts, f"{template.name}: %{operand.name} is not a weight"
                continue
            layout = Layout(layouts[index]) if index in layouts else ROW_MAJOR
            first, reader = wanted.setdefault(operand.name, (layout, template.name))
            if first != layout:
                what = f"%{operand.name}: {reader} wants {first}, {template.name} wants {layout}"
                raise PassError(what, f"graph {graph.name}", "make two weights of it")
    return _map_values(graph, lambda v: _as_layout(v, wanted))


def _as_layout(value: Value, wanted: Mapping[str, tuple[Layout, str]]) -> Value:
    if value.name not in wanted:
        return value
    return replace(value, type=replace(value.type, layout=wanted[value.name][0]))


def _map_values(graph: Graph, change: Callable[[Value], Value]) -> Graph:
    """Return the graph with every value, wherever it is named, replaced by `change` of it."""
    done: dict[str, Value] = {}

    def new(value: Value) -> Value:
        if value.name not in done:
            done[value.name] = change(value)
        return done[value.name]

    return Graph(
        graph.name,
        tuple(Input(new(item.value), item.role) for item in graph.inputs),
        tuple(replace(weight, value=new(weight.value)) for weight in graph.weights),
        tuple(
            replace(
                node,
                operands=tuple(map(new, node.operands)),
                results=tuple(map(new, node.results)),
            )
            for node in graph.nodes
        ),
        tuple((name, new(value)) for name, value in graph.outputs),
    )
