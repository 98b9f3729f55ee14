"""Layout family `rows`: weights of `linear` as the GPU kernels read them, row by row.

`rows.1024-512s-6` says: three column ranges of the product, the second of SiTU. A weight stays
row-major [N, K] in its stored dtype; each range starts at a multiple of 16 rows, the gap is zero.
A SiTU range of width I holds gate and up rows in turn (g0, u0, g1, u1, ...), so that both halves of
an output stand in one tile, side by side.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from k3c.codegen.template import Array, LayoutFamily, padded, register_layout
from k3c.errors import CodegenError
from k3c.ir.types import TensorType

# Rows of the smallest tile of a matrix product: a tile of 16 rows lies in one range.
ROW_MULTIPLE = 16
_NAME = re.compile(r"rows\.(\d+s?(?:-\d+s?)*)")
_STORED = {"bf16": np.uint16, "f32": np.float32}


@dataclass(frozen=True)
class RowRange:
    """Columns of one result: `width` outputs, whose packed rows start at `start`."""

    width: int
    situ: bool
    start: int

    @property
    def rows(self) -> int:
        """Weight rows that it consumes, without padding."""
        return self.width * (2 if self.situ else 1)


@dataclass(frozen=True)
class RowsLayout:
    """A layout of the family, as its name says it."""

    ranges: tuple[RowRange, ...]

    @property
    def name(self) -> str:
        """The layout's name."""
        return "rows." + "-".join(f"{r.width}{'s' if r.situ else ''}" for r in self.ranges)

    @property
    def source_rows(self) -> int:
        """Rows of the weight."""
        return sum(r.rows for r in self.ranges)

    @cached_property
    def packed_rows(self) -> int:
        """Rows with padding."""
        last = self.ranges[-1]
        return last.start + padded(last.rows, ROW_MULTIPLE)

    def places(self) -> Array:
        """Return i64[source_rows]: the packed row of each row of the weight."""
        return np.concatenate([_places(r) for r in self.ranges])


def rows_layout(columns: Sequence[tuple[int, bool]]) -> RowsLayout:
    """Return the layout of column ranges given as (width, is SiTU)."""
    ranges: list[RowRange] = []
    start = 0
    for width, situ in columns:
        ranges.append(RowRange(width, situ, start))
        start += padded(ranges[-1].rows, ROW_MULTIPLE)
    return RowsLayout(tuple(ranges))


def parse_rows_layout(name: str) -> RowsLayout:
    """Return the layout called `name`.

    Raises:
        CodegenError: It is not the name of a layout of this family.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise CodegenError(f"{name!r} is no layout of rows", "", "e.g. rows.1024-512s")
    return rows_layout([(int(w.rstrip("s")), w.endswith("s")) for w in match[1].split("-")])


def _places(r: RowRange) -> Array:
    if not r.situ:
        return r.start + np.arange(r.width)
    outputs = np.arange(r.width)
    return r.start + np.concatenate([2 * outputs, 2 * outputs + 1])


def _checked(type_: TensorType) -> tuple[RowsLayout, int]:
    layout = parse_rows_layout(type_.layout.name)
    rows, inner = type_.sizes
    if rows != layout.source_rows or type_.dtype.name not in _STORED:
        raise CodegenError(f"{type_}: the layout is for bf16 or f32 [{layout.source_rows}, K]")
    return layout, inner


def _pack(type_: TensorType, arrays: Sequence[Array]) -> Array:
    layout, inner = _checked(type_)
    packed = np.zeros((layout.packed_rows, inner), _STORED[type_.dtype.name])
    packed[layout.places()] = np.asarray(arrays[0]).reshape(layout.source_rows, inner)
    return packed.reshape(-1).view(np.uint8)


def _unpack(type_: TensorType, data: Array) -> tuple[Array, ...]:
    layout, inner = _checked(type_)
    packed = data.view(_STORED[type_.dtype.name]).reshape(layout.packed_rows, inner)
    return (packed[layout.places()],)


def _nbytes(type_: TensorType) -> int:
    layout, inner = _checked(type_)
    return layout.packed_rows * inner * int(type_.dtype.bits) // 8


register_layout(LayoutFamily("rows", _pack, _unpack, _nbytes))
