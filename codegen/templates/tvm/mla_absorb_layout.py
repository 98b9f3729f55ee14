"""Layout families `mla_absorb_q` and `mla_absorb_v`: the two halves of kv_b, as panels a head.

kv_b is [n * (dn + dv), r]: per head dn key rows, then dv value rows. `mla_absorb_q` holds the key
rows, as a matrix [dn, r] a head; `mla_absorb_v` the value rows, as [r, dv]. The first dimension is
the one summed over. A panel is all of it for two vectors of columns: in bf16 u32[K, lanes], the
first vector in the low bits; in f32 f32[K, 2, lanes]. Missing columns are zero.
`mla_absorb_q.bf16.v8.96-128-128` says: 8 lanes, 96 heads, 128 key rows and 128 value rows a head.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from k3c.codegen.template import Array, LayoutFamily, padded, register_layout
from k3c.errors import CodegenError
from k3c.ir.types import TensorType

_NAME = re.compile(r"mla_absorb_([qv])\.(bf16|f32)\.v(8|16)\.(\d+)-(\d+)-(\d+)")
_STORED = {"bf16": np.dtype(np.uint16), "f32": np.dtype(np.float32)}
HALVES = 2


@dataclass(frozen=True)
class AbsorbLayout:
    """A layout, as its name says it.

    Attributes:
        half: "q" for the key rows, "v" for the value rows.
        dtype: "bf16" or "f32".
        lanes: f32 elements of a vector.
        heads: n.
        nope: dn, key rows of a head.
        value: dv, value rows of a head.
    """

    half: str
    dtype: str
    lanes: int
    heads: int
    nope: int
    value: int

    @property
    def name(self) -> str:
        """The layout's name."""
        sizes = f"{self.heads}-{self.nope}-{self.value}"
        return f"mla_absorb_{self.half}.{self.dtype}.v{self.lanes}.{sizes}"

    def inner(self, latent: int) -> int:
        """Return K, the length of the sums."""
        return self.nope if self.half == "q" else latent

    def columns(self, latent: int) -> int:
        """Return the columns of a head, without padding."""
        return latent if self.half == "q" else self.value

    def panels(self, latent: int) -> int:
        """Return the panels of a head."""
        return padded(self.columns(latent), HALVES * self.lanes) // (HALVES * self.lanes)

    def nbytes(self, latent: int) -> int:
        """Return the bytes of a packed weight, padding included."""
        words = self.heads * self.panels(latent) * self.inner(latent) * HALVES * self.lanes
        return words * _STORED[self.dtype].itemsize

    @property
    def rows(self) -> slice:
        """The rows of a head that are packed."""
        return slice(0, self.nope) if self.half == "q" else slice(self.nope, None)


def parse_absorb_layout(name: str) -> AbsorbLayout:
    """Return the layout called `name`.

    Raises:
        CodegenError: It is not the name of such a layout.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        hint = "e.g. mla_absorb_q.bf16.v8.96-128-128"
        raise CodegenError(f"{name!r} is no layout of an absorbed kv_b", "", hint)
    lanes, heads, nope, value = (int(match[i]) for i in range(3, 7))
    return AbsorbLayout(match[1], match[2], lanes, heads, nope, value)


def _checked(type_: TensorType) -> tuple[AbsorbLayout, int]:
    layout = parse_absorb_layout(type_.layout.name)
    rows, latent = type_.sizes
    expected = layout.heads * (layout.nope + layout.value)
    if (rows, type_.dtype.name) != (expected, layout.dtype):
        raise CodegenError(f"{type_}: the layout is for {layout.dtype}[{expected}, r]")
    return layout, latent


def _pack(type_: TensorType, arrays: Sequence[Array]) -> Array:
    layout, latent = _checked(type_)
    n, inner = layout.lanes, layout.inner(latent)
    per_head = np.asarray(arrays[0]).reshape(layout.heads, -1, latent)[:, layout.rows]
    matrix = per_head if layout.half == "q" else per_head.transpose(0, 2, 1)
    missing = layout.panels(latent) * HALVES * n - layout.columns(latent)
    full = np.pad(matrix, ((0, 0), (0, 0), (0, missing)))
    panels = full.reshape(layout.heads, inner, -1, HALVES, n).transpose(0, 2, 1, 3, 4)
    if layout.dtype == "bf16":
        panels = panels.swapaxes(-1, -2)
    return np.ascontiguousarray(panels).reshape(-1).view(np.uint8)


def _unpack(type_: TensorType, data: Array) -> tuple[Array, ...]:
    """Return kv_b; the half that the layout does not hold is zero."""
    layout, latent = _checked(type_)
    n, inner, panels = layout.lanes, layout.inner(latent), layout.panels(latent)
    bf16 = layout.dtype == "bf16"
    shape = (layout.heads, panels, inner, *((n, HALVES) if bf16 else (HALVES, n)))
    stored = data.view(_STORED[layout.dtype]).reshape(shape)
    halves = stored.swapaxes(-1, -2) if bf16 else stored
    full = halves.transpose(0, 2, 1, 3, 4).reshape(layout.heads, inner, -1)
    matrix = full[:, :, : layout.columns(latent)]
    weight = np.zeros((layout.heads, layout.nope + layout.value, latent), stored.dtype)
    weight[:, layout.rows] = matrix if layout.half == "q" else matrix.transpose(0, 2, 1)
    return (weight.reshape(-1, latent),)


def _nbytes(type_: TensorType) -> int:
    layout, latent = _checked(type_)
    return layout.nbytes(latent)


for _half in ("q", "v"):
    register_layout(LayoutFamily(f"mla_absorb_{_half}", _pack, _unpack, _nbytes))
