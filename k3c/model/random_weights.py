"""Write checkpoints with random weights that keep every feature of the model active.

For benchmarks and tests of configurations whose real weights are not at hand. The scales are those
of the test checkpoints: decays spread over their whole range, routing not degenerate, residual
blocks of comparable size.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from k3c.model.checkpoint import INDEX
from k3c.model.config import TextConfig, load_config
from k3c.model.mxfp4 import quantize
from k3c.model.tensor_names import Expected, expected_tensors

SHARD_BYTES = 1_000_000_000
# Gain of a linear's weights over 1/sqrt(fan_in), by the end of its name; others have gain 1.
_GAINS = {
    "self_attn.o_proj.weight": 0.7,
    "routed_expert_up_proj.weight": 0.4,
    "f_b_proj.weight": 1.5,
    "self_attn.b_proj.weight": 1.5,
    "lm_head.weight": 2.0,
}
_F32 = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
_CONV_MEAN = (0.0, 0.0, 0.2, 0.6)
_TORCH = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}


@dataclass(frozen=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _TORCH[self.dtype].itemsize


def write_random_model(directory: str | Path, config_file: str | Path, seed: int) -> None:
    """Write a whole model directory: a copy of `config_file` and random weights.

    Args:
        directory: Where to write; made if it does not exist.
        config_file: A config.json.
        seed: Seed of the weights.
    """
    config = load_config(config_file)
    Path(directory).mkdir(parents=True, exist_ok=True)
    shutil.copyfile(config_file, Path(directory) / "config.json")
    write_random_checkpoint(directory, config, seed)


def write_random_checkpoint(directory: str | Path, config: TextConfig, seed: int) -> None:
    """Write the index and the shards, of at most 1 GB each, one tensor at a time.

    Args:
        directory: An existing directory.
        config: Fixes names and shapes.
        seed: Seed of the weights; one seed gives one checkpoint.
    """
    entries = [_entry(name, expected) for name, expected in expected_tensors(config).items()]
    shards = _shards(entries)
    values = _values(entries, torch.Generator().manual_seed(seed))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= {entry.name: file for entry in shard}
        _write_shard(Path(directory) / file, shard, values)
    index = {"metadata": {}, "weight_map": weight_map}
    (Path(directory) / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _entry(name: str, expected: Expected) -> _Entry:
    dtype = "U8" if expected.is_bytes else "F32" if name.endswith(_F32) else "BF16"
    # A_log is stored padded, as in the released checkpoint.
    stored = expected.stored[-1] if name.endswith("A_log") else expected.stored[0]
    return _Entry(name, dtype, stored if len(stored) < 4 else expected.shape)


def _shards(entries: list[_Entry]) -> list[list[_Entry]]:
    shards: list[list[_Entry]] = [[]]
    size = 0
    for entry in entries:
        if size + entry.nbytes > SHARD_BYTES and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _write_shard(path: Path, shard: list[_Entry], values: Iterator[Tensor]) -> None:
    header: dict[str, object] = {}
    offset = 0
    for entry in shard:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for entry in shard:
            tensor = next(values)
            assert tensor.nbytes == entry.nbytes, entry.name
            file.write(tensor.contiguous().view(torch.uint8).numpy().data)


def _values(entries: list[_Entry], generator: torch.Generator) -> Iterator[Tensor]:
    scale = torch.empty(0, dtype=torch.uint8)
    for entry in entries:
        if entry.name.endswith("weight_packed"):
            rows, half = entry.shape
            packed, scale = quantize(
                torch.randn((rows, 2 * half), generator=generator) / math.sqrt(2 * half)
            )
            yield packed
        elif entry.name.endswith("weight_scale"):
            # Its weight_packed stands right before it.
            yield scale
        else:
            yield _draw(entry, generator).to(_TORCH[entry.dtype])


def _draw(entry: _Entry, generator: torch.Generator) -> Tensor:
    name, normal = entry.name, torch.randn(entry.shape, generator=generator)
    if name.endswith("A_log"):
        return torch.empty(entry.shape).uniform_(0.5, 4.0, generator=generator).log()
    if name.endswith("dt_bias"):
        return 2.5 * normal - 3.0
    if name.endswith("conv1d.weight"):
        return 0.4 * normal + torch.tensor(_CONV_MEAN)
    if name.endswith(("embed_tokens.weight", "e_score_correction_bias")):
        return normal
    if "norm" in name.rsplit(".layers.", 1)[-1]:
        return 1.0 + 0.25 * normal
    gain = next((g for end, g in _GAINS.items() if name.endswith(end)), 1.0)
    return normal * (gain / math.sqrt(entry.shape[-1]))
