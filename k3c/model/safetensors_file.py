"""One safetensors file: its header checked against its size, its tensors read one at a time.

Nothing is memory-mapped: with every shard mapped until the end of a load, a checkpoint larger than
the host's memory exhausts it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3c.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "U8": 1, "I8": 1, "BOOL": 1}
_SIZES |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4}
_SIZES |= {"I64": 8, "U64": 8}
TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}


@dataclass(frozen=True)
class Stored:
    """A tensor as a shard stores it; `offset` is in bytes from the start of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def read_into(self, out: Tensor) -> None:
        """Fill `out`, contiguous u8[nbytes], with the stored bytes.

        Raises:
            CheckpointError: The file cannot be read or has become shorter.
        """
        assert out.nbytes == self.nbytes, f"{self.name}: buffer {out.nbytes} B, need {self.nbytes}"
        self.read_range(out, 0)

    def read_range(self, out: Tensor, start: int) -> None:
        """Fill `out`, contiguous u8, with the stored bytes from byte `start` on.

        Raises:
            CheckpointError: As for `read_into`.
        """
        self.read_rows(out.view(1, -1), start, 0)

    def read_rows(self, out: Tensor, start: int, stride: int) -> None:
        """Fill row i of `out`, contiguous u8[rows, n], from byte start + i * stride on.

        Raises:
            CheckpointError: As for `read_into`.
        """
        rows, width = out.shape
        last = start + (rows - 1) * stride + width
        assert last <= self.nbytes, f"{self.name}: bytes up to {last} of {self.nbytes}"
        if not out.nbytes:
            return
        done = 0
        try:
            with self.file.open("rb", buffering=0) as file:
                for i, row in enumerate(out.numpy()):
                    done += self._read_at(file, row.data, start + i * stride)
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", str(self.file)) from None
        if done != out.nbytes:
            what = f"{self.name}: {done} of {out.nbytes} bytes could be read"
            raise CheckpointError(what, str(self.file), "the shard changed; download it again")

    def _read_at(self, file: FileIO, view: memoryview, start: int) -> int:
        file.seek(self.offset + start)
        done = 0
        # One call reads at most 2 GiB on Linux.
        while done < len(view) and (count := file.readinto(view[done:])):
            done += count
        return done

    def read(self) -> Tensor:
        """Return the tensor with its stored dtype and shape."""
        raw = torch.empty(self.nbytes, dtype=torch.uint8)
        self.read_into(raw)
        return raw.view(TORCH_DTYPES[self.dtype]).reshape(self.shape)


def read_header(file: Path) -> dict[str, Stored]:
    """Read the header of a safetensors file and check it against the file's size.

    Args:
        file: The shard.

    Returns:
        Its tensors by name.

    Raises:
        CheckpointError: The shard is missing, truncated, too long, or its header is malformed.
    """
    try:
        with file.open("rb") as handle:
            size = handle.seek(0, 2)
            handle.seek(0)
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"holds {size} bytes, its header alone needs {8 + length}",
                    str(file),
                    "the shard is truncated or no safetensors file; download it again",
                )
            header = _parse(handle.read(length), file)
    except FileNotFoundError:
        hint = "download every file that the index names"
        raise CheckpointError("missing shard", str(file), hint) from None
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", str(file)) from None
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _stored(name, entry, file, start) for name, entry in header.items()}
    _check_extent(tensors, file, start, size)
    return tensors


def _parse(raw: bytes, file: Path) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"header is not JSON: {error}", str(file)) from None
    if not isinstance(header, dict):
        raise CheckpointError(f"header is a {type(header).__name__}, expected an object", str(file))
    return header


def _stored(name: str, entry: Any, file: Path, start: int) -> Stored:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        well_formed = isinstance(dtype, str) and all(
            type(i) is int and i >= 0 for i in (*shape, begin, end)
        )
    except (KeyError, TypeError, ValueError):
        well_formed = False
        dtype, shape, begin, end = "", (), 0, 0
    if not well_formed:
        raise CheckpointError(f"{name}: malformed header entry {entry!r:.80}", str(file))
    if dtype not in _SIZES:
        raise CheckpointError(f"{name}: unknown dtype {dtype!r:.40}", str(file))
    need = math.prod(shape) * _SIZES[dtype]
    if end - begin != need:
        what = f"{name}: header gives {end - begin} bytes, {dtype} {list(shape)} needs {need}"
        raise CheckpointError(what, str(file))
    return Stored(name, file, dtype, shape, start + begin, need)


def _check_extent(tensors: dict[str, Stored], file: Path, start: int, size: int) -> None:
    position = start
    for stored in sorted(tensors.values(), key=lambda s: (s.offset, s.nbytes)):
        if stored.offset != position:
            what = f"{stored.name}: data start at byte {stored.offset}, expected {position}"
            raise CheckpointError(what, str(file))
        position += stored.nbytes
    if position != size:
        hint = "the shard is truncated; download it again" if size < position else ""
        raise CheckpointError(
            f"holds {size} bytes, its header describes {position}", str(file), hint
        )
