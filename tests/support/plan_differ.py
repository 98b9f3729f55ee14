"""Runs a plan on a GPU launch by launch and compares every node with its reference op.

The reference gets what the device had before the node, so the first wrong node is the one named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3c.artifact import Command, LayerCall, Plan
from k3c.codegen.template import unpack
from k3c.ir.graph import Module, Node
from k3c.ir.ops import OPS
from k3c.ir.text import parse
from k3c.ir.types import TensorType
from k3c.kernels import catalogue_of
from k3c.passes.build_plan import label_of
from k3c.passes.select_kernels import run as select_kernels
from k3c.runtime.driver.gpu_steps import CommandStep
from k3c.runtime.loader import Loaded
from k3c.targets.target import load_target
from tests.support.interp import call_node
from tests.support.nodes import TORCH


@dataclass(frozen=True)
class Finding:
    """How far one result of one node is from its reference: max|diff| / max|ref|."""

    where: str
    error: float


def last_module(directory: Path) -> Module:
    """Return the IR after the last pass, from an artifact."""
    return parse(sorted((directory / "ir").glob("*.k3"))[-1].read_text())


def diff_plan(loaded: Loaded, bucket: str, fill: Callable[[Any], None]) -> list[Finding]:
    """Run one step of a bucket and compare every node.

    Args:
        loaded: The artifact.
        bucket: The bucket.
        fill: Fills the inputs.
    """
    driver: Any = getattr(loaded.close, "__self__", None)
    plan = loaded.buckets[bucket].plan
    target = load_target(loaded.manifest.target.name)
    module = last_module(loaded.directory)
    selected = select_kernels(module, plan.bucket, catalogue_of(target), target)
    executor = driver.bind(plan, loaded.memory)
    fill(executor.inputs)
    for block in executor._in.ranges:
        driver.api.call("copy_in", block.device, block.host, block.nbytes, driver.gpu.stream)
    bound = iter(driver.commands(plan, loaded.memory))
    findings: list[Finding] = []
    for call in plan.calls:
        graph = selected.module.graph(call.graph)
        nodes = {label_of(node): node for node in graph.nodes}
        access = _Access(loaded, plan, call)
        for label, group in groupby(plan.commands[call.graph], lambda c: c.label):
            commands = list(group)
            launches = [next(bound) for _ in commands]
            step = CommandStep(driver.api, launches, driver.functions, driver.gpu.stream)
            errors = _diff_node(nodes[label], commands[0], step, access)
            where = f"{call.graph} layer {call.layer}: {label}"
            findings += [Finding(f"{where} result {i}", e) for i, e in enumerate(errors)]
    return findings


def _diff_node(node: Node, command: Command, step: CommandStep, access: _Access) -> list[float]:
    """Run a node's launches and return the error of each of its results."""
    names = [arg.buffer for arg in command.args if arg.buffer]
    before = [access.read(n, v.type) for n, v in zip(names, node.operands, strict=False)]
    step.run()
    places = zip(_results(node, names), node.results, strict=True)
    after = [access.read(name, result.type) for name, result in places]
    want = call_node(node, before, access.call.attrs)
    return [_error(a, b) for a, b in zip(after, want, strict=True)]


def _results(node: Node, names: list[str]) -> list[str]:
    shared, cursor, found = OPS[node.op].in_place, len(node.operands), []
    for i in range(len(node.results)):
        if i in shared:
            found.append(names[shared[i]])
        else:
            found.append(names[cursor])
            cursor += 1
    return found


@dataclass(frozen=True)
class _Access:
    loaded: Loaded
    plan: Plan
    call: LayerCall

    def read(self, name: str, kind: TensorType) -> Any:
        buffer = next(b for b in self.plan.buffers if b.id == name)
        base = self.call.bases.get(buffer.space, 0) if buffer.per_layer else 0
        memory = self.loaded.memory[buffer.space]
        data = np.frombuffer(memory.read(base + buffer.offset, buffer.nbytes), np.uint8)
        if buffer.space != "weights":
            return _tensor(data[: kind.nbytes], kind)
        arrays = unpack(kind, data)
        if len(arrays) == 2:
            return tuple(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays)
        return _tensor(
            np.ascontiguousarray(arrays[0]).reshape(-1).view(np.uint8)[: kind.nbytes], kind
        )


def _tensor(data: np.ndarray[Any, Any], kind: TensorType) -> Tensor:
    return torch.from_numpy(data.copy()).view(TORCH[kind.dtype.name]).view(kind.sizes)


def _error(got: Tensor, want: Tensor) -> float:
    if not got.dtype.is_floating_point:
        return float((got != want).sum())
    a, b = got.double(), want.double()
    known = torch.isfinite(b)  # a reference leaves NaN where nothing is written
    if not bool(known.any()):
        return 0.0
    scale = float(b[known].abs().max()) or 1.0
    worst = (a[known] - b[known]).abs().nan_to_num(float("inf")).max()
    return float(worst) / scale
