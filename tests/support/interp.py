"""Run IR of any level with the reference ops: the meaning that a pass must not change.

Every result is checked against the type that the IR gives it, and memory that the IR leaves
uninitialised (the first prefix, the bank) starts as NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3c.export.ops import REFERENCE
from k3c.ir.graph import Graph, LayerAttr, Module, Node
from k3c.ir.types import MXFP4, DType, SymDim, TensorType
from k3c.model.checkpoint import Checkpoint

TORCH = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
}
# A weight: a tensor, or packed codes and scales of an mxfp4 one.
Operand = Tensor | tuple[Tensor, Tensor]
Weights = Mapping[str, Operand]
State = dict[str, Tensor]


@dataclass
class Run:
    """What a module run made: io outputs by name, the new state of each layer, the last carries."""

    outputs: dict[str, Tensor]
    state: dict[int, State]
    carry: dict[str, Tensor]


def interpret_graph(
    graph: Graph,
    inputs: Mapping[str, Tensor],
    weights: Weights,
    attrs: Mapping[str, int] | None = None,
) -> dict[str, Tensor]:
    """Run one graph and return its outputs by name.

    `inputs` may hold more than the graph takes; `weights` is by the IR value's name; `attrs` are
    the layer attributes of the call.
    """
    dims: dict[str, int] = {}
    env: dict[str, Any] = dict(weights)
    for item in graph.inputs:
        tensor = inputs[item.value.name]
        bind_dims(item.value.type, tensor, dims, f"{graph.name}: input {item.value.name}")
        env[item.value.name] = tensor
    for node in graph.nodes:
        results = call_node(node, [env[o.name] for o in node.operands], attrs or {})
        assert len(results) == len(node.results), f"{graph.name}: {node.op}: {len(results)} results"
        for value, tensor in zip(node.results, results, strict=True):
            bind_dims(value.type, tensor, dims, f"{graph.name}: {node.op} -> {value.name}")
            env[value.name] = tensor
    return {name: env[value.name] for name, value in graph.outputs}


def interpret(
    module: Module,
    inputs: Mapping[str, Tensor],
    state: Mapping[int, State],
    weights: Callable[[Graph, int], Weights],
    *,
    head: str = "head",
) -> Run:
    """Run the whole schedule.

    Args:
        module: Any level.
        inputs: io tensors by name.
        state: State tensors of each layer by input name; not changed.
        weights: Weights of a graph for a layer index.
        head: Graph that stands in for `head`: "head", or "score_head" with `targets` in inputs.
    """
    run = Run({}, {}, {})
    rows = next(t.shape[0] for n, t in inputs.items() if n in ("ids", "targets"))
    for call in module.schedule:
        graph = module.graph(head if call.graph == "head" else call.graph)
        for item in graph.inputs:
            if item.role == "carry" and item.value.name not in run.carry:
                run.carry[item.value.name] = poison(item.value.type.bind({"T": rows}))
        env = {**inputs, **run.carry, **state.get(call.layer, {})}
        results = interpret_graph(graph, env, weights(graph, call.layer), call.attrs)
        # A name that is no input of this graph is a carry for the next one, or an io output.
        roles = {i.value.name: i.role for g in module.graphs for i in g.inputs}
        for name, tensor in results.items():
            role = roles.get(name, "io")
            if role == "state":
                run.state.setdefault(call.layer, {})[name] = tensor
            else:
                (run.carry if role == "carry" else run.outputs)[name] = tensor
    return run


def checkpoint_weights(checkpoint: Checkpoint) -> Callable[[Graph, int], Weights]:
    """Return a `weights` function that reads a checkpoint and keeps what it has read."""
    cache: dict[tuple[str, int], Weights] = {}

    def weights(graph: Graph, layer: int) -> Weights:
        key = (repr(graph.weights), layer)
        if key not in cache:
            cache[key] = {
                w.value.name: _load(checkpoint, w.sources, w.value.type.dtype, layer)
                for w in graph.weights
            }
        return cache[key]

    return weights


def poison(kind: TensorType) -> Tensor:
    """Return memory that nobody has written: NaN, or a huge index."""
    dtype = TORCH[kind.dtype.name]
    return torch.full(kind.sizes, torch.nan if dtype.is_floating_point else 2**30, dtype=dtype)


def _load(checkpoint: Checkpoint, sources: tuple[str, ...], dtype: DType, layer: int) -> Operand:
    if dtype == MXFP4:
        pairs = [checkpoint.load_experts(source, layer) for source in sources]
        packed, scale = (torch.cat(parts, dim=1) for parts in zip(*pairs, strict=True))
        return packed, scale
    names = [source.replace("*", str(layer), 1) for source in sources]
    return torch.cat([checkpoint.load(name) for name in names]).to(TORCH[dtype.name])


def call_node(node: Node, operands: list[Any], layer: Mapping[str, int]) -> tuple[Tensor, ...]:
    """Run one node; `layer` are the layer attributes of the call."""
    if node.op == "add":
        return (operands[0] + operands[1],)
    if node.op == "cast":
        return (operands[0].to(TORCH[node.results[0].type.dtype.name]),)
    attrs: dict[str, Any] = {
        name: layer[value.name] if isinstance(value, LayerAttr) else value
        for name, value in node.attrs.items()
    }
    # What the IR says with result types, a plain function must be told.
    products = ("linear", "norm_linear")
    plain_v = node.op == "mla_absorb_v" and len(operands) == 2
    if node.op in (*products, "embed") or plain_v:
        attrs["result_dtypes"] = [r.type.dtype.name for r in node.results]
    if node.op in products:
        attrs["widths"] = [r.type.shape[-1] for r in node.results]
    if node.op == "join_columns":
        attrs["columns"] = node.results[0].type.shape[-1]
    if node.op == "mla_attend":
        attrs.setdefault("latent_dim", node.results[0].type.shape[-1])
    results = REFERENCE[node.op](*operands, **attrs)
    if len(results) == 1 < len(node.results):
        # The transient form of a grouped product: its results are column ranges.
        return results[0].split([int(str(r.type.shape[-1])) for r in node.results], -1)
    return results


def bind_dims(kind: TensorType, tensor: Tensor, dims: dict[str, int], where: str) -> None:
    """Check a tensor against its type; a symbolic dimension takes its first size."""
    assert tensor.dtype == TORCH[kind.dtype.name], f"{where}: {tensor.dtype}, type {kind}"
    assert tensor.dim() == len(kind.shape), f"{where}: {list(tensor.shape)}, type {kind}"
    for dim, size in zip(kind.shape, tensor.shape, strict=True):
        if isinstance(dim, SymDim):
            dims.setdefault(dim.name, size // dim.times)
        want = dim.bind(dims) if isinstance(dim, SymDim) else dim
        assert size == want, f"{where}: {list(tensor.shape)}, type {kind}, {dims}"
