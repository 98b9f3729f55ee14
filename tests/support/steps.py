"""Inputs, state and comparison for whole steps of a module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3c.ir.graph import Module
from tests.support.interp import TORCH


def new_state(module: Module, slots: int, pages: int) -> dict[int, dict[str, Tensor]]:
    """State of every layer, NaN everywhere: only what a step wrote may be read by a later one."""
    sizes = {"S": slots, "P": pages}
    graphs = {c.layer: module.graph(c.graph) for c in module.schedule if c.layer >= 0}
    return {
        layer: {
            i.value.name: torch.full(
                i.value.type.bind(sizes).sizes, torch.nan, dtype=TORCH[i.value.type.dtype.name]
            )
            for i in graph.inputs
            if i.role == "state"
        }
        for layer, graph in graphs.items()
    }


def step_inputs(
    chunks: Sequence[Tensor], context: Sequence[int], pages_each: int
) -> dict[str, Tensor]:
    """io tensors of one packed greedy step; request s has slot s + 1 and its own pages."""
    count = len(chunks)
    tokens = torch.tensor([len(c) for c in chunks], dtype=torch.int32)
    pages = 1 + torch.arange(count * pages_each, dtype=torch.int32).reshape(count, pages_each)
    zeros = torch.zeros(count)
    start = (tokens.cumsum(0) - tokens).to(torch.int32)
    return {
        "ids": torch.cat([torch.as_tensor(c) for c in chunks]).to(torch.int32),
        "seg_start": start,
        "seg_tokens": tokens,
        "slots": torch.arange(1, count + 1, dtype=torch.int32),
        "context": torch.tensor(context, dtype=torch.int32),
        "page_table": pages,
        "sample_rows": (start + tokens - 1).to(torch.int32),
        "temperature": zeros,
        "top_k": zeros.int(),
        "top_p": zeros + 1,
        "min_p": zeros,
        "seed": zeros.long(),
        "position": torch.tensor(context, dtype=torch.int32) + tokens,
    }


def error(found: Tensor, reference: Tensor) -> float:
    """Largest difference over largest magnitude; NaN anywhere gives NaN."""
    return ((found - reference).abs().max() / reference.abs().max()).item()
