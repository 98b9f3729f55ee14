"""Random tensors for inputs and weights: one checkpoint tensor has one value everywhere."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from k3c.ir.graph import Graph, Module
from k3c.ir.types import MXFP4, TensorType
from k3c.ir.verify import layer_attrs
from k3c.passes.sharding_experts import MAP_SOURCE
from tests.support.interp import TORCH, Operand, Weights

# Two segments: three new tokens, then one that continues two cached ones; row 4 is padding.
DIMS = {"T": 5, "B": 2, "S": 4, "P": 5, "M": 2}
_RANK_0 = {"tp": 0, "dp": 0, "ep": 0}
_FIXED = {
    "seg_start": torch.tensor([0, 3], dtype=torch.int32),
    "seg_tokens": torch.tensor([3, 1], dtype=torch.int32),
    "slots": torch.tensor([1, 3], dtype=torch.int32),
    "context": torch.tensor([0, 2], dtype=torch.int32),
    "page_table": torch.tensor([[1, 2], [4, 3]], dtype=torch.int32),
    "top_k": torch.tensor([0, 3], dtype=torch.int32),
    "sample_rows": torch.tensor([2, 3], dtype=torch.int32),
}


def inputs_of(graph: Graph) -> dict[str, Tensor]:
    """Return a tensor for every input of a graph, by name."""
    return {
        i.value.name: _FIXED[i.value.name]
        if i.value.name in _FIXED
        else tensor(i.value.type.bind(DIMS), i.value.name)
        for i in graph.inputs
    }


def sources_of(graph: Graph) -> dict[str, Operand]:
    """Return a random checkpoint of one layer: a tensor for each source that is a whole weight."""
    return {
        w.sources[0]: _map(w.value.type)
        if w.sources[0] == MAP_SOURCE
        else tensor(w.value.type, w.sources[0])
        for w in graph.weights
        if len(w.sources) == 1
    }


def weights_from(sources: Mapping[str, Operand], graph: Graph) -> Weights:
    """Return a graph's weights, each the rows of its sources one after the other."""
    return {w.value.name: _concat([sources[s] for s in w.sources]) for w in graph.weights}


def layer_attrs_of(module: Module, graph: Graph) -> Mapping[str, int]:
    """Return the last call's layer attributes at rank 0; 1 for each without a schedule."""
    calls = [call.at(_RANK_0) for call in module.schedule if call.graph == graph.name]
    return calls[-1] if calls else dict.fromkeys(layer_attrs(graph), 1)


def tensor(kind: TensorType, name: str) -> Operand:
    """Return a tensor of a bound type; the name is the seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    shape = kind.sizes
    if kind.dtype == MXFP4:
        *lead, columns = shape
        packed = torch.randint(0, 256, (*lead, columns // 2), generator=generator)
        scale = torch.randint(120, 128, (*lead, columns // 32), generator=generator)
        return packed.to(torch.uint8), scale.to(torch.uint8)
    dtype = TORCH[kind.dtype.name]
    if not dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    # Quarters: sums of their products are exact in float32, so that a GEMM gives the same bits
    # whatever width and order torch computes it in.
    return (4 * torch.randn(shape, generator=generator)).round().div(4).to(dtype)


def _map(kind: TensorType) -> Tensor:
    """Return a map of experts: the first third has its first replica here, others none."""
    experts, width = kind.sizes
    table = torch.full((experts, width), -1, dtype=torch.int32)
    number = torch.arange(experts, dtype=torch.int32)
    table[:, 0] = 1 + number % (width - 1)
    table[:, 1] = torch.where(number < max(experts // 3, 1), number, -1)
    return table


def _concat(parts: list[Operand]) -> Operand:
    if isinstance(parts[0], Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    pairs = [part for part in parts if not isinstance(part, Tensor)]
    packed, scale = (torch.cat(halves, dim=1) for halves in zip(*pairs, strict=True))
    return packed, scale
