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
from k3c.placement.expert_map import expert_map
from k3c.placement.placement import Placement, contiguous, slots_for
from k3c.targets.mesh import Mesh
from tests.support.interp import TORCH, Run, State, bind_dims, call_node, poison
from tests.support.steps import new_state

Operand = Tensor | tuple[Tensor, Tensor]
Source = Callable[[str, int], Operand]
Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Group:
    """The ranks of a mesh, what reads a source of a layer whole, and where experts lie."""

    mesh: Mesh
    source: Source
    placement: Placement | None = None

    def place(self, rank: int) -> Mapping[str, int]:
        """Return a rank's coordinates."""
        return self.mesh.coordinates(rank)

    def experts(self, layer: int, count: int) -> Placement:
        """Return where the experts of a layer lie: by number, if nobody said."""
        return self.placement or contiguous(count, self.mesh.ep, [layer])


@dataclass(frozen=True)
class Ranks:
    """A module and the ranks that run it."""

    module: Module
    group: Group

    @property
    def count(self) -> int:
        """Number of ranks."""
        return self.group.mesh.ranks

    def states(self, slots: int, pages: int) -> list[Mapping[int, State]]:
        """Return the fresh state of every rank."""
        return [new_state(self.module, slots, pages) for _ in range(self.count)]

    def step(
        self, inputs: Sequence[Inputs], states: Sequence[Mapping[int, State]], head: str = "head"
    ) -> list[Run]:
        """Run one step on all ranks; `states` are not changed.

        Args:
            inputs: Of each data-parallel rank, with as many rows.
            states: Of each rank.
            head: Which head to run.
        """
        runs = [Run({}, {}, {}) for _ in range(self.count)]
        own = [inputs[self.group.place(rank)["dp"]] for rank in range(self.count)]
        rows = next(t.shape[0] for n, t in own[0].items() if n in ("ids", "targets"))
        roles = {i.value.name: i.role for g in self.module.graphs for i in g.inputs}
        for call in self.module.schedule:
            graph = self.module.graph(head if call.graph == "head" else call.graph)
            envs = [self._env(graph, run, rows) for run in runs]
            for env, state, mine in zip(envs, states, own, strict=True):
                env |= {k: v for k, v in mine.items() if k not in env} | state.get(call.layer, {})
            run_graph(graph, call, envs, self.group)
            for run, env in zip(runs, envs, strict=True):
                for name, value in graph.outputs:
                    role = roles.get(name, "io")
                    if role == "state":
                        run.state.setdefault(call.layer, {})[name] = env[value.name]
                    else:
                        (run.carry if role == "carry" else run.outputs)[name] = env[value.name]
        return runs

    def _env(self, graph: Graph, run: Run, rows: int) -> dict[str, Any]:
        for item in graph.inputs:
            if item.role == "carry" and item.value.name not in run.carry:
                run.carry[item.value.name] = poison(item.value.type.bind({"T": rows}))
        return dict(run.carry)


def run_graph(graph: Graph, call: Call, envs: list[dict[str, Any]], group: Group) -> None:
    """Run the nodes of one call; each rank's env has its inputs, and gets all values."""
    for rank, env in enumerate(envs):
        for weight in graph.weights:
            env[weight.value.name] = rank_weight(group, weight, call.layer, rank)
    dims: dict[str, int] = {}
    for item in graph.inputs:
        for env in envs:
            bind_dims(item.value.type, env[item.value.name], dims, item.value.name)
    for node in graph.nodes:
        operands = [[env[v.name] for v in node.operands] for env in envs]
        results = _collective(node, operands, group) or [
            call_node(node, mine, call.at(group.place(rank))) for rank, mine in enumerate(operands)
        ]
        for env, mine in zip(envs, results, strict=True):
            for value, tensor in zip(node.results, mine, strict=True):
                bind_dims(value.type, tensor, dims, f"{graph.name}: {node.op} {value.name}")
                env[value.name] = tensor
        if node.op == "map_experts":
            _poison_unread(graph, node, envs)


def _poison_unread(graph: Graph, node: Node, envs: list[dict[str, Any]]) -> None:
    """Spoil the rows that `dispatch_tokens` need not bring: all their experts lie elsewhere."""
    sent = [n for n in graph.nodes if n.op == "dispatch_tokens" and node.operands[1] in n.results]
    for env in envs if sent else ():
        rows = env[sent[0].results[0].name].clone()
        rows[(env[node.results[1].name] < 0).all(1)] = torch.nan
        env[sent[0].results[0].name] = rows


def _collective(
    node: Node, operands: list[list[Any]], group: Group
) -> list[tuple[Tensor, ...]] | None:
    """Return the results of every rank; None where the node is no collective."""
    ways = {
        "all_reduce": _all_reduce,
        "all_gather": _all_gather,
        "dispatch_tokens": _dispatch_tokens,
        "combine_tokens": _combine_tokens,
    }
    if node.op not in ways:
        return None
    results: list[tuple[Tensor, ...]] = []
    for rank in range(len(operands)):
        ranks = group.mesh.group(rank, str(node.attrs["axis"]))
        columns = list(zip(*(operands[other] for other in ranks), strict=True))
        results.append(tuple(ways[node.op](list(column), ranks.index(rank)) for column in columns))
    return results


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).to(torch.float64).sum(0).to(parts[0].dtype)


def _all_reduce(parts: list[Tensor], place: int) -> Tensor:
    return _sum(parts)


def _all_gather(parts: list[Tensor], place: int) -> Tensor:
    return torch.stack(parts)


def _dispatch_tokens(parts: list[Tensor], place: int) -> Tensor:
    return torch.cat(parts)


def _combine_tokens(parts: list[Tensor], place: int) -> Tensor:
    return _sum(parts).chunk(len(parts))[place].clone()


def from_checkpoint(checkpoint: Checkpoint) -> Source:
    """Return what reads a checkpoint's tensors whole."""

    def read(source: str, layer: int) -> Operand:
        if source.count("*") == 2:
            return checkpoint.load_experts(source, layer)
        return checkpoint.load(source.replace("*", str(layer), 1))

    return read


def rank_weight(group: Group, weight: Weight, layer: int, rank: int) -> Operand:
    """Return what a rank holds of a weight: whole tensors, cut."""
    place = group.place(rank)
    if weight.sources == ("placement.*.expert_map",):
        experts = weight.value.type.sizes[0]
        table = torch.from_numpy(expert_map(group.experts(layer, experts), layer).copy())
        return cut(table, weight.shards[0], place).to(torch.int32)
    wholes = [(group.source(name, layer), shard) for name, shard in weight.parts]
    if weight.value.type.dtype == MXFP4:
        if weight.shards and weight.shards[0] and weight.shards[0].placed:
            return _placed_experts(group, wholes, layer, place["ep"])
        halves = [
            torch.cat([cut(whole[i], shard, place, block) for whole, shard in wholes], dim=1)
            for i, block in enumerate((2, 32))
        ]
        return halves[0], halves[1]
    parts = [cut(whole, shard, place) for whole, shard in wholes if isinstance(whole, Tensor)]
    return torch.cat(parts).to(TORCH[weight.value.type.dtype.name])


def _placed_experts(group: Group, wholes: list[Any], layer: int, rank: int) -> Operand:
    count = wholes[0][0][0].shape[0]
    experts = list(group.experts(layer, count).layers[layer][rank])
    assert len(experts) == wholes[0][1].size
    assert slots_for(count, group.mesh.ep, 0) <= len(experts)
    halves = [torch.cat([whole[i][experts] for whole, _ in wholes], dim=1) for i in range(2)]
    return halves[0], halves[1]


def cut(whole: Tensor, shard: Shard | None, place: Mapping[str, int], block: int = 1) -> Tensor:
    """Return a rank's part; the last dimension stores `block` elements in one; the rest is zero."""
    if shard is None:
        return whole
    size = shard.size // block if shard.dim == whole.dim() - 1 else shard.size
    start = place[shard.axis] * size
    have = whole.narrow(shard.dim, *_inside(whole.shape[shard.dim], start, size))
    missing = list(whole.shape)
    missing[shard.dim] = size - have.shape[shard.dim]
    return torch.cat([have, have.new_zeros(missing)], dim=shard.dim)


def _inside(length: int, start: int, size: int) -> tuple[int, int]:
    start = min(start, length)
    return start, min(size, length - start)
