"""Read a part of a stored tensor: what one rank of a mesh needs, without the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from k3c.model.safetensors_file import TORCH_DTYPES, Stored

# A row's part shorter than this lies on a disk page with its neighbours': the whole is read.
_SHORT_BYTES = 1024


@dataclass(frozen=True)
class Part:
    """Indices start .. stop - 1 of dimension `dim`; those past the tensor's end are zero."""

    dim: int
    start: int
    stop: int

    def divided(self, factor: int) -> Part:
        """Return the part of a dimension that stores `factor` elements in one."""
        assert self.start % factor == self.stop % factor == 0, f"{self} does not divide by {factor}"
        return Part(self.dim, self.start // factor, self.stop // factor)


def read_part(stored: Stored, shape: tuple[int, ...], part: Part) -> Tensor:
    """Read a part of a tensor.

    Args:
        stored: Where it lies; row-major, at least as many elements as `shape` has.
        shape: Its canonical shape; elements past it are padding.
        part: Dimension 0, or 1 of a matrix.

    Returns:
        The part with the stored dtype, zero where the tensor has no such index.

    Raises:
        CheckpointError: The file cannot be read.
    """
    length = shape[part.dim]
    start, stop = min(part.start, length), min(part.stop, length)
    inside = Part(part.dim, start, stop)
    found = _rows(stored, shape, inside) if part.dim == 0 else _columns(stored, shape, inside)
    missing = (part.stop - part.start) - (stop - start)
    if not missing:
        return found
    padding = found.new_zeros((*found.shape[: part.dim], missing, *found.shape[part.dim + 1 :]))
    return torch.cat([found, padding], dim=part.dim)


def _rows(stored: Stored, shape: tuple[int, ...], part: Part) -> Tensor:
    dtype = TORCH_DTYPES[stored.dtype]
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    raw = torch.empty((part.stop - part.start) * row_bytes, dtype=torch.uint8)
    stored.read_range(raw, part.start * row_bytes)
    return raw.view(dtype).reshape(part.stop - part.start, *shape[1:])


def _columns(stored: Stored, shape: tuple[int, ...], part: Part) -> Tensor:
    assert part.dim == 1 == len(shape) - 1, f"{part} of {shape}: need rows or columns"
    dtype, width = TORCH_DTYPES[stored.dtype], part.stop - part.start
    if width * dtype.itemsize < _SHORT_BYTES:
        whole = _rows(stored, shape, Part(0, 0, shape[0]))
        return whole[:, part.start : part.stop].contiguous()
    raw = torch.empty((shape[0], width * dtype.itemsize), dtype=torch.uint8)
    row_bytes, first = shape[1] * dtype.itemsize, part.start * dtype.itemsize
    stored.read_rows(raw, first, row_bytes)
    return raw.view(dtype)
