"""Run a sharded module on several ranks in lockstep: collectives see the values of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3c.ir.graph import Call, Graph, Module, Node, Shard, Weight
from k3c.ir.types import MXFP4
from k3c.model.checkpoint import Checkpoint
from tests.support.interp import TORCH, Run, State, bind_dims, call_node, poison
from tests.support.steps import new_state

Operand = Tensor | tuple[Tensor, Tensor]
Source = Callable[[str, int], Operand]


@dataclass(frozen=True)
class Ranks:
    """A module, what reads a source of a layer whole, and the number of ranks."""

    module: Module
    source: Source
    count: int

    def states(self, slots: int, pages: int) -> list[Mapping[int, State]]:
        """Return the fresh state of every rank."""
        return [new_state(self.module, slots, pages) for _ in range(self.count)]

    def step(
        self,
        inputs: Mapping[str, Tensor],
        states: Sequence[Mapping[int, State]],
        head: str = "head",
    ) -> list[Run]:
        """Run one step on all ranks; `states` are not changed."""
        runs = [Run({}, {}, {}) for _ in range(self.count)]
        rows = next(t.shape[0] for n, t in inputs.items() if n in ("ids", "targets"))
        roles = {i.value.name: i.role for g in self.module.graphs for i in g.inputs}
        for call in self.module.schedule:
            graph = self.module.graph(head if call.graph == "head" else call.graph)
            envs = [self._env(graph, call, run, rows) for run in runs]
            for env, state in zip(envs, states, strict=True):
                env |= {k: v for k, v in inputs.items() if k not in env} | state.get(call.layer, {})
            run_graph(graph, call, envs, self.source)
            for run, env in zip(runs, envs, strict=True):
                for name, value in graph.outputs:
                    role = roles.get(name, "io")
                    if role == "state":
                        run.state.setdefault(call.layer, {})[name] = env[value.name]
                    else:
                        (run.carry if role == "carry" else run.outputs)[name] = env[value.name]
        return runs

    def _env(self, graph: Graph, call: Call, run: Run, rows: int) -> dict[str, Any]:
        for item in graph.inputs:
            if item.role == "carry" and item.value.name not in run.carry:
                run.carry[item.value.name] = poison(item.value.type.bind({"T": rows}))
        return dict(run.carry)


def run_graph(graph: Graph, call: Call, envs: list[dict[str, Any]], source: Source) -> None:
    """Run the nodes of one call; each rank's env has its inputs, and gets all values."""
    for rank, env in enumerate(envs):
        for weight in graph.weights:
            env[weight.value.name] = rank_weight(source, weight, call.layer, rank)
    dims: dict[str, int] = {}
    for item in graph.inputs:
        for env in envs:
            bind_dims(item.value.type, env[item.value.name], dims, item.value.name)
    for node in graph.nodes:
        operands = [[env[v.name] for v in node.operands] for env in envs]
        results = _collective(node, operands) or [
            call_node(node, mine, call.at(rank)) for rank, mine in enumerate(operands)
        ]
        for env, mine in zip(envs, results, strict=True):
            for value, tensor in zip(node.results, mine, strict=True):
                bind_dims(value.type, tensor, dims, f"{graph.name}: {node.op} {value.name}")
                env[value.name] = tensor


def _collective(node: Node, operands: list[list[Any]]) -> list[tuple[Tensor, ...]] | None:
    """Return the results of every rank; None where the node is no collective."""
    if node.op == "all_reduce":
        columns = zip(*operands, strict=True)
        sums = [torch.stack(c).to(torch.float64).sum(0).to(c[0].dtype) for c in columns]
        return [tuple(s.clone() for s in sums) for _ in operands]
    if node.op == "all_gather":
        whole = torch.stack([mine[0] for mine in operands])
        return [(whole.clone(),) for _ in operands]
    return None


def from_checkpoint(checkpoint: Checkpoint) -> Source:
    """Return what reads a checkpoint's tensors whole."""

    def read(source: str, layer: int) -> Operand:
        if source.count("*") == 2:
            return checkpoint.load_experts(source, layer)
        return checkpoint.load(source.replace("*", str(layer), 1))

    return read


def rank_weight(source: Source, weight: Weight, layer: int, rank: int) -> Operand:
    """Return what a rank holds of a weight: whole tensors, cut."""
    wholes = [(source(name, layer), shard) for name, shard in weight.parts]
    if weight.value.type.dtype == MXFP4:
        halves = [
            torch.cat([cut(whole[i], shard, rank, block) for whole, shard in wholes], dim=1)
            for i, block in enumerate((2, 32))
        ]
        return halves[0], halves[1]
    parts = [cut(whole, shard, rank) for whole, shard in wholes if isinstance(whole, Tensor)]
    return torch.cat(parts).to(TORCH[weight.value.type.dtype.name])


def cut(whole: Tensor, shard: Shard | None, rank: int, block: int = 1) -> Tensor:
    """Return a rank's part; the last dimension stores `block` elements in one; the rest is zero."""
    if shard is None:
        return whole
    size = shard.size // block if shard.dim == whole.dim() - 1 else shard.size
    have = whole.narrow(shard.dim, *_inside(whole.shape[shard.dim], rank * size, size))
    missing = list(whole.shape)
    missing[shard.dim] = size - have.shape[shard.dim]
    return torch.cat([have, have.new_zeros(missing)], dim=shard.dim)


def _inside(length: int, start: int, size: int) -> tuple[int, int]:
    start = min(start, length)
    return start, min(size, length - start)
