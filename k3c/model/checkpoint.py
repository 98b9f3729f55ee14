"""A checkpoint on disk: every header is checked before any weight is read, then tensors stream.

Peak memory is what the caller keeps: `load` reads one tensor, `load_experts` one matrix of one
layer's experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from k3c.errors import CheckpointError, ConfigError
from k3c.ir.types import BF16, F32, MX_BLOCK, MXFP4, U8, DType
from k3c.model.config import TextConfig
from k3c.model.json_keys import Keys, read_json
from k3c.model.mxfp4 import E8M0_NAN
from k3c.model.safetensors_file import Stored, read_header
from k3c.model.tensor_names import Expected, canonical, expected_tensors, is_skipped
from k3c.model.tensor_part import Part, read_part

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {"BF16": BF16, "F32": F32, "U8": U8}
_PAIR = ("weight_packed", "weight_scale")


class Checkpoint:
    """The text tensors of a model directory under their canonical names and shapes.

    Args:
        directory: Holds `model.safetensors.index.json` and its shards, or `model.safetensors`.
        config: The model's configuration, which fixes names and shapes.

    Raises:
        CheckpointError: A shard is missing or damaged, a tensor is missing, unknown, stored twice,
            or has a wrong shape or dtype.
    """

    def __init__(self, directory: str | Path, config: TextConfig) -> None:
        """Read and check every header."""
        self.directory = Path(directory)
        self.config = config
        self._expected = expected_tensors(config)
        found, self.skipped = _split(_stored_tensors(self.directory), config)
        _check_names(found, self._expected, self.directory)
        for name, stored in found.items():
            _check_tensor(stored, self._expected[name])
        self._stored = found

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names of all text tensors, in the order of the layers."""
        return tuple(self._expected)

    @property
    def nbytes(self) -> int:
        """Stored bytes of all text tensors."""
        return sum(stored.nbytes for stored in self._stored.values())

    def load(self, name: str, part: Part | None = None) -> Tensor:
        """Read one tensor, or a part of it.

        Args:
            name: Canonical name, without `*`.
            part: What to read of it; None: all.

        Returns:
            The tensor with its stored dtype (bf16, f32 or u8) and its canonical shape.

        Raises:
            CheckpointError: It cannot be read, or an e8m0 scale byte is 255.
        """
        shape = self._expected[name].shape
        if part is not None:
            return read_part(self._get(name), shape, part)
        tensor = _to_shape(self._get(name).read(), shape)
        if name.endswith(".weight_scale"):
            _check_scale(tensor, name, self._stored[name])
        return tensor

    def load_experts(
        self, stem: str, layer: int, part: Part | None = None
    ) -> tuple[Tensor, Tensor]:
        """Read one matrix of all experts of a layer, or a part of these matrices.

        Args:
            stem: Canonical stem with `*` for the layer and for the expert:
                `language_model.model.layers.*.block_sparse_moe.experts.*.w1`.
            layer: Layer, from 0.
            part: Some experts (dimension 0), rows (1) or columns (2); None: all.

        Returns:
            packed u8[E, N, K/2] and scale u8[E, N, K/32].

        Raises:
            CheckpointError: A tensor cannot be read, or an e8m0 scale byte is 255.
        """
        stem = stem.replace("*", str(layer), 1)
        part = part or Part(0, 0, self.config.num_experts)
        packed, scale = (
            self._stack(f"{stem}.{half}", part.divided(block if part.dim == 2 else 1))
            for half, block in zip(_PAIR, (2, MX_BLOCK), strict=True)
        )
        return packed, scale

    def dtype(self, name: str) -> DType:
        """Return the element type of a weight.

        Args:
            name: Canonical name; `*` stands for every layer that has it. An expert stem is mxfp4.

        Returns:
            The stored type; f32 where some layers store bf16 and some f32, which loses nothing.
        """
        if name.split(".")[-1] in ("w1", "w2", "w3"):
            return MXFP4
        layers = range(self.config.num_hidden_layers) if "*" in name else (0,)
        names = (name.replace("*", str(layer), 1) for layer in layers)
        found = {self._stored[n].dtype for n in names if n in self._stored}
        assert found, f"no tensor is called {name!r}"
        return _DTYPES[found.pop()] if len(found) == 1 else F32

    def stored_types(self) -> dict[str, str]:
        """Return the stored type of every tensor but the experts' halves, which have one only."""
        kinds = {n: s.dtype for n, s in self._stored.items() if not n.endswith(_PAIR)}
        return dict(sorted(kinds.items()))

    def _get(self, name: str) -> Stored:
        assert name in self._stored, f"no tensor is called {name!r}"
        return self._stored[name]

    def _stack(self, pattern: str, part: Part) -> Tensor:
        experts = range(self.config.num_experts)
        chosen = experts[part.start : part.stop] if part.dim == 0 else experts
        names = [pattern.replace("*", str(e), 1) for e in chosen]
        rows, columns = self._expected[names[0]].shape
        within = Part(max(0, part.dim - 1), part.start, part.stop) if part.dim else Part(0, 0, rows)
        shape = [rows, columns]
        shape[within.dim] = within.stop - within.start
        out = torch.empty((len(names), *shape), dtype=torch.uint8)
        for expert, name in zip(out, names, strict=True):
            expert.copy_(read_part(self._get(name), (rows, columns), within))
        if pattern.endswith(_PAIR[1]) and bool((out == E8M0_NAN).any()):
            for expert, name in zip(out, names, strict=True):
                _check_scale(expert, name, self._stored[name])
        return out


def _stored_tensors(directory: Path) -> Iterable[Stored]:
    index, single = directory / INDEX, directory / SINGLE
    if index.is_file():
        return _indexed_tensors(index)
    if single.is_file():
        return read_header(single).values()
    hint = "download the weights, or export from config.json alone"
    raise CheckpointError(f"found neither {INDEX} nor {SINGLE}", str(directory), hint)


def _indexed_tensors(index: Path) -> list[Stored]:
    try:
        weight_map = Keys(Keys(read_json(index), str(index)).get("weight_map"), str(index)).data
    except ConfigError as error:
        raise CheckpointError(error.what, error.where, "download the index again") from None
    files = set(weight_map.values())
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"shard name {file!r:.80} is not a plain file name", str(index))
    headers = {file: read_header(index.parent / file) for file in sorted(files)}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise CheckpointError(f"{name} is not in the shard that the index names", file)
    return [stored for header in headers.values() for stored in header.values()]


def _split(
    tensors: Iterable[Stored], config: TextConfig
) -> tuple[dict[str, Stored], tuple[str, ...]]:
    """Return text tensors by canonical name, and the names left out on purpose."""
    found: dict[str, Stored] = {}
    skipped: list[str] = []
    for stored in tensors:
        name = canonical(stored.name)
        if is_skipped(name, config):
            skipped.append(stored.name)
            continue
        if name in found:
            first = found[name]
            where = f"{first.file.name}, {stored.file.name}"
            raise CheckpointError(f"{name} is stored twice, as {first.name} too", where)
        found[name] = stored
    return found, tuple(sorted(skipped))


def _check_names(found: dict[str, Stored], expected: dict[str, Expected], directory: Path) -> None:
    missing = [name for name in expected if name not in found]
    unknown = sorted(name for name in found if name not in expected)
    if missing:
        near = f"; unknown tensor there: {found[unknown[0]].name}" if unknown else ""
        raise CheckpointError(
            f"missing {_listing(missing)} of {len(expected)} tensors{near}",
            str(directory),
            "config.json and the shards must belong to the same model",
        )
    if unknown:
        stored = found[unknown[0]]
        hint = "k3c would ignore it and compute something else; remove it if it has no effect"
        raise CheckpointError(f"unknown tensor {_listing(unknown)}", stored.file.name, hint)


def _listing(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _check_tensor(stored: Stored, expected: Expected) -> None:
    if not expected.accepts(stored.shape):
        raise CheckpointError(
            f"{stored.name} has shape {list(stored.shape)}, expected {list(expected.stored[0])}",
            stored.file.name,
            "config.json and the shards must belong to the same model",
        )
    if stored.dtype not in expected.dtypes:
        raise CheckpointError(
            f"{stored.name} has dtype {stored.dtype}, expected {' or '.join(expected.dtypes)}",
            stored.file.name,
        )


def _to_shape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tensor.dim() == len(shape) == 1:
        # A_log: the entries past the heads are padding.
        return tensor[: shape[0]].clone() if tensor.shape[0] > shape[0] else tensor
    return tensor.reshape(shape)


def _check_scale(scale: Tensor, name: str, stored: Stored) -> None:
    bad = (scale == E8M0_NAN).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise CheckpointError(
            f"{name}: scale byte {E8M0_NAN} (NaN) at row {row}, column {column}, expected 0..254",
            stored.file.name,
            "the exporter of this checkpoint wrote a broken block; quantize it again",
        )
