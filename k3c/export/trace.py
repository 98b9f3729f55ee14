"""What torch.export recorded about where a node came from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import fx

# Frames of torch, of the op wrappers and of one-op modules say nothing about the model.
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
_HIDDEN = ("site-packages", "/k3c/export/", "/k3c/model/layers.py")
_ROOT = Path(__file__).resolve().parents[2]


def arguments(node: fx.Node) -> list[Any]:
    """Return the positional arguments of a node."""
    return list(node.args)


def guards(program: torch.export.ExportedProgram) -> list[Any]:
    """Return the relations between sizes that tracing assumed, as sympy expressions."""
    for node in program.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            return [guard.expr for guard in mode.shape_env.guards]
    return []


def module_path(node: fx.Node) -> str:
    """Return the path of the module that called the op, such as `self_attn.q_proj`; or ""."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()]
    return paths[-1] if paths else ""


def source_line(node: fx.Node) -> str:
    """Return `file:line` of the innermost `forward`, relative to the repository; or ""."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for file, line in reversed(frames):
        if any(part in file for part in _HIDDEN):
            continue
        path = Path(file).resolve()
        known = path.is_relative_to(_ROOT)
        return f"{path.relative_to(_ROOT).as_posix() if known else path.name}:{line}"
    return ""


def weight_name(fqn: str) -> str:
    """Return the IR name of a parameter: `self_attn.q_proj.weight` becomes `w_q_proj`."""
    name = re.sub(r"\.(weight|weight_packed)$", "", fqn)
    name = re.sub(r"^(self_attn|block_sparse_moe)\.", "", name)
    return "w_" + re.sub(r"\W", "_", name)


def value_name(node: fx.Node, op: str) -> str:
    """Return the stem of a result's name: a projection's module name, else the op."""
    leaf = module_path(node).rpartition(".")[2]
    return leaf.removesuffix("_proj") if op == "linear" and leaf.isidentifier() else op
