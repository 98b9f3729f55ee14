"""A checkpoint small enough to rewrite in every test, and ways to damage it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3c.model.config import TextConfig, load_config
from k3c.model.random_weights import write_random_model

DATA = Path(__file__).parents[1] / "data"
SHARD = "model-00001-of-00001.safetensors"


def toy_config_json() -> dict[str, Any]:
    """The tiny configuration with 3 layers, 2 experts and a small vocabulary; width 64."""
    data = json.loads((DATA / "k3-tiny/config.json").read_text())
    text = data["text_config"]
    text |= {"num_hidden_layers": 3, "vocab_size": 64, "hidden_size": 64, "num_experts": 2}
    text |= {"num_experts_per_token": 2, "moe_intermediate_size": 96, "eos_token_id": 3}
    text |= {"routed_expert_hidden_size": 64, "intermediate_size": 32}
    text["linear_attn_config"] |= {"kda_layers": [1, 2], "full_attn_layers": [3], "head_dim": 8}
    return data


def four_heads_config_json() -> dict[str, Any]:
    """The toy with 4 heads, 8 experts, and a vocabulary that 4 ranks do not divide."""
    data = toy_config_json()
    text = data["text_config"]
    text |= {"num_experts": 8, "num_experts_per_token": 3, "vocab_size": 66, "bos_token_id": 1}
    text |= {"moe_intermediate_size": 128, "routed_expert_hidden_size": 128}
    text["linear_attn_config"]["num_heads"] = 4
    return data


def write_toy(directory: Path, seed: int = 0) -> TextConfig:
    """Write the toy model: one shard with an index."""
    directory.mkdir(exist_ok=True)
    source = directory / "config.source.json"
    source.write_text(json.dumps(toy_config_json()))
    write_random_model(directory, source, seed)
    source.unlink()
    return load_config(directory)


def edit_tensors(directory: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    """Rewrite the toy's shard and index with changed tensors."""
    tensors = load_file(directory / SHARD)
    edit(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, directory / SHARD)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, SHARD)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    """Return an edit of one tensor."""

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = change(tensors[name])

    return edit


def renamed(change: Callable[[str], str]) -> Callable[[dict[str, Tensor]], None]:
    """Return an edit of every name."""

    def edit(tensors: dict[str, Tensor]) -> None:
        items = [(change(name), tensor.clone()) for name, tensor in tensors.items()]
        tensors.clear()
        tensors.update(items)

    return edit


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one dtype, shape and bytes."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
