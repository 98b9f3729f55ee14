"""Layout family `mla_rows`: one half of kv_b, row by row.

kv_b is [n * (dn + dv), r]: per head dn key rows, then dv value rows. `mla_rows.q.6-128-128` holds
the key rows [n, dn, r], `mla_rows.v.6-128-128` the value rows [n, dv, r], in the stored dtype.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from k3c.codegen.template import Array, LayoutFamily, register_layout
from k3c.errors import CodegenError
from k3c.ir.types import TensorType

_NAME = re.compile(r"mla_rows\.([qv])\.(\d+)-(\d+)-(\d+)")
_STORED = {"bf16": np.uint16, "f32": np.float32}


@dataclass(frozen=True)
class HalfLayout:
    """A layout, as its name says it.

    Attributes:
        half: "q" for the key rows, "v" for the value rows.
        heads: n.
        nope: dn, key rows of a head.
        value: dv, value rows of a head.
    """

    half: str
    heads: int
    nope: int
    value: int

    @property
    def name(self) -> str:
        """The layout's name."""
        return f"mla_rows.{self.half}.{self.heads}-{self.nope}-{self.value}"

    @property
    def head_rows(self) -> int:
        """Rows of a head that the layout holds."""
        return self.nope if self.half == "q" else self.value

    @property
    def place(self) -> slice:
        """Where these rows stand among the rows of a head in kv_b."""
        return slice(0, self.nope) if self.half == "q" else slice(self.nope, None)


def parse_half_layout(name: str) -> HalfLayout:
    """Return the layout called `name`.

    Raises:
        CodegenError: It is not the name of a layout of this family.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise CodegenError(f"{name!r} is no layout of half of kv_b", "", "e.g. mla_rows.q.6-64-64")
    return HalfLayout(match[1], *(int(match[i]) for i in range(2, 5)))


def _checked(type_: TensorType) -> tuple[HalfLayout, int]:
    layout = parse_half_layout(type_.layout.name)
    rows, latent = type_.sizes
    expected = layout.heads * (layout.nope + layout.value)
    if rows != expected or type_.dtype.name not in _STORED:
        raise CodegenError(f"{type_}: the layout is for bf16 or f32 [{expected}, r]")
    return layout, latent


def _pack(type_: TensorType, arrays: Sequence[Array]) -> Array:
    layout, latent = _checked(type_)
    per_head = np.asarray(arrays[0]).reshape(layout.heads, -1, latent)
    return np.ascontiguousarray(per_head[:, layout.place]).reshape(-1).view(np.uint8)


def _unpack(type_: TensorType, data: Array) -> tuple[Array, ...]:
    """Return kv_b; the half that the layout does not hold is zero."""
    layout, latent = _checked(type_)
    stored = data.view(_STORED[type_.dtype.name])
    weight = np.zeros((layout.heads, layout.nope + layout.value, latent), stored.dtype)
    weight[:, layout.place] = stored.reshape(layout.heads, layout.head_rows, latent)
    return (weight.reshape(-1, latent),)


def _nbytes(type_: TensorType) -> int:
    layout, latent = _checked(type_)
    return layout.heads * layout.head_rows * latent * int(type_.dtype.bits) // 8


register_layout(LayoutFamily("mla_rows", _pack, _unpack, _nbytes))
