"""Layout families `panel_bf16` and `panel_f32`: weights of `linear` as it streams them.

`panel_bf16.v8.1024-512s` says: 8 lanes; two column ranges, 1024 plain columns and 512 columns of
SiTU. A panel holds two vectors of columns for all of K: the low and the high half. In a plain range
they are consecutive columns; in a SiTU range low holds gate rows and high the up rows of the same
outputs. A bf16 panel is u32[K, lanes], low half in the low bits, so that widening is one shift and
one mask; an f32 panel is f32[K, 2, lanes]. Each range starts a panel; missing columns are zero.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from k3c.codegen.template import Array, LayoutFamily, register_layout
from k3c.errors import CodegenError
from k3c.ir.types import TensorType

_NAME = re.compile(r"panel_(bf16|f32)\.v(8|16)\.(\d+s?(?:-\d+s?)*)")
_BYTES = {"bf16": 2, "f32": 4}
HALVES = 2


@dataclass(frozen=True)
class ColumnRange:
    """Outputs of one result: `width` columns, from panel `first_panel` on."""

    width: int
    situ: bool
    first_panel: int
    panels: int

    @property
    def source_rows(self) -> int:
        """Weight rows that it consumes."""
        return self.width * (HALVES if self.situ else 1)


@dataclass(frozen=True)
class PanelLayout:
    """A panel layout, as its name says it."""

    dtype: str
    lanes: int
    ranges: tuple[ColumnRange, ...]

    @property
    def panels(self) -> int:
        """Panels of all ranges."""
        return sum(r.panels for r in self.ranges)

    @property
    def name(self) -> str:
        """The layout's name."""
        widths = "-".join(f"{r.width}{'s' if r.situ else ''}" for r in self.ranges)
        return f"panel_{self.dtype}.v{self.lanes}.{widths}"

    def nbytes(self, inner: int) -> int:
        """Bytes of a packed weight [N, inner]."""
        return self.panels * HALVES * self.lanes * inner * _BYTES[self.dtype]

    def source_rows(self) -> Array:
        """Return i64[panels, 2, lanes]: the weight row of each column, -1 where it is padding."""
        parts, first = [], 0
        for r in self.ranges:
            parts.append(_range_rows(r, first, self.lanes))
            first += r.source_rows
        return np.concatenate(parts)


def panel_layout(dtype: str, lanes: int, columns: Sequence[tuple[int, bool]]) -> PanelLayout:
    """Return the layout of column ranges given as (width, is SiTU)."""
    ranges: list[ColumnRange] = []
    first = 0
    for width, situ in columns:
        per_panel = lanes if situ else HALVES * lanes
        ranges.append(ColumnRange(width, situ, first, -(-width // per_panel)))
        first += ranges[-1].panels
    return PanelLayout(dtype, lanes, tuple(ranges))


def parse_panel_layout(name: str) -> PanelLayout:
    """Return the layout called `name`.

    Raises:
        CodegenError: It is not the name of a panel layout.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise CodegenError(f"{name!r} is no panel layout", "", "e.g. panel_bf16.v8.1024-512s")
    columns = [(int(w.rstrip("s")), w.endswith("s")) for w in match[3].split("-")]
    return panel_layout(match[1], int(match[2]), columns)


def _range_rows(r: ColumnRange, first: int, lanes: int) -> Array:
    if r.situ:
        outputs = _padded_range(r.width, r.panels * lanes).reshape(r.panels, lanes)
        up = np.where(outputs < 0, -1, outputs + r.width)
        rows = np.stack([outputs, up], axis=1)
    else:
        rows = _padded_range(r.width, r.panels * HALVES * lanes).reshape(r.panels, HALVES, lanes)
    return np.where(rows < 0, -1, rows + first)


def _padded_range(count: int, total: int) -> Array:
    index = np.arange(total)
    return np.where(index < count, index, -1)


def _checked(type_: TensorType) -> tuple[PanelLayout, int, int]:
    layout = parse_panel_layout(type_.layout.name)
    rows, inner = type_.sizes
    expected = sum(r.source_rows for r in layout.ranges)
    if (rows, type_.dtype.name) != (expected, layout.dtype):
        raise CodegenError(f"{type_}: the layout is for {layout.dtype}[{expected}, K]")
    return layout, rows, inner


def _pack(type_: TensorType, arrays: Sequence[Array]) -> Array:
    layout, rows, inner = _checked(type_)
    weight = np.asarray(arrays[0]).reshape(rows, inner)
    source = layout.source_rows()
    panels = np.where((source < 0)[..., None], weight.dtype.type(0), weight[source])
    # [panels, half, lane, K] -> a bf16 word holds both halves, an f32 row holds them in turn.
    order = (0, 3, 2, 1) if layout.dtype == "bf16" else (0, 3, 1, 2)
    return np.ascontiguousarray(panels.transpose(order)).reshape(-1).view(np.uint8)


def _unpack(type_: TensorType, data: Array) -> tuple[Array, ...]:
    layout, rows, inner = _checked(type_)
    bf16 = layout.dtype == "bf16"
    shape = (layout.lanes, HALVES) if bf16 else (HALVES, layout.lanes)
    stored = data.view(np.uint16 if bf16 else np.float32).reshape(layout.panels, inner, *shape)
    panels = stored.transpose((0, 3, 2, 1) if bf16 else (0, 2, 3, 1))
    source = layout.source_rows()
    weight = np.empty((rows, inner), stored.dtype)
    weight[source[source >= 0]] = panels[source >= 0]
    return (weight,)


def _nbytes(type_: TensorType) -> int:
    layout, _, inner = _checked(type_)
    return layout.nbytes(inner)


for _dtype in _BYTES:
    register_layout(LayoutFamily(f"panel_{_dtype}", _pack, _unpack, _nbytes))
