"""Layout family `mxfp4_panel`: stacked MXFP4 expert matrices as `grouped_gemm` streams them.

`mxfp4_panel.v8.704s` says: 8 lanes, 704 outputs, "s": gate and up rows side by side (SiTU). Panels
are those of `linear`: low and high half of two vectors of columns. Per expert and panel the
mx_blocks follow one another as u32[4, 2, lanes]: word w of a lane holds the e2m1 codes of
k = 8w .. 8w+7, first code in the low bits. Behind all words stand the scales,
u8[experts, panels, mx_blocks, 2, lanes]. The columns that fill the last panel have code 0 and
scale 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from k3c.codegen.template import Array, LayoutFamily, register_layout
from k3c.codegen.templates.tvm.panel_layout import HALVES, PanelLayout, panel_layout
from k3c.errors import CodegenError
from k3c.ir.types import MX_BLOCK, TensorType

FAMILY = "mxfp4_panel"
CODES_PER_WORD = 8
WORDS_PER_BLOCK = MX_BLOCK // CODES_PER_WORD
_NAME = re.compile(rf"{FAMILY}\.v(8|16)\.(\d+)(s?)")


@dataclass(frozen=True)
class Mxfp4Layout:
    """An MXFP4 layout, as its name says it."""

    lanes: int
    width: int
    situ: bool

    @property
    def name(self) -> str:
        """The layout's name."""
        return f"{FAMILY}.v{self.lanes}.{self.width}{'s' if self.situ else ''}"

    @property
    def columns(self) -> PanelLayout:
        """How rows of one expert's matrix go to panels."""
        return panel_layout("bf16", self.lanes, [(self.width, self.situ)])

    @property
    def source_rows(self) -> int:
        """Rows of one expert's matrix."""
        return self.width * (HALVES if self.situ else 1)

    def scale_count(self, experts: int, inner: int) -> int:
        """Scales of all experts: one a column, padding included, and mx_block."""
        return experts * self.columns.panels * (inner // MX_BLOCK) * HALVES * self.lanes

    def words_nbytes(self, experts: int, inner: int) -> int:
        """Bytes of all codes: where the scales start."""
        return self.scale_count(experts, inner) * WORDS_PER_BLOCK * 4

    def nbytes(self, experts: int, inner: int) -> int:
        """Bytes of codes and scales."""
        return self.words_nbytes(experts, inner) + self.scale_count(experts, inner)


def parse_mxfp4_layout(name: str) -> Mxfp4Layout:
    """Return the layout called `name`.

    Raises:
        CodegenError: It is not the name of an MXFP4 layout.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise CodegenError(f"{name!r} is no MXFP4 layout", "", f"e.g. {FAMILY}.v8.704s")
    return Mxfp4Layout(int(match[1]), int(match[2]), match[3] == "s")


def _checked(type_: TensorType) -> tuple[Mxfp4Layout, int, int]:
    layout = parse_mxfp4_layout(type_.layout.name)
    experts, rows, inner = type_.sizes
    if (rows, type_.dtype.name, inner % MX_BLOCK) != (layout.source_rows, "mxfp4", 0):
        raise CodegenError(f"{type_}: the layout is for mxfp4[E, {layout.source_rows}, 32n]")
    return layout, experts, inner


def _pack(type_: TensorType, arrays: Sequence[Array]) -> Array:
    layout, experts, inner = _checked(type_)
    blocks, rows = inner // MX_BLOCK, layout.source_rows
    packed = np.ascontiguousarray(arrays[0]).reshape(experts, rows, inner // 2)
    words = packed.view(np.uint32).reshape(experts, rows, blocks, WORDS_PER_BLOCK)
    scales = np.asarray(arrays[1]).reshape(experts, rows, blocks)
    data = np.empty(layout.nbytes(experts, inner), np.uint8)
    code_view, scale_view = _views(layout, experts, inner, data)
    source = layout.columns.source_rows()
    padding = source < 0
    # One expert at a time: a whole layer's experts gathered at once would need its bytes again.
    for expert in range(experts):
        codes = np.where(padding[..., None, None], np.uint32(0), words[expert][source])
        code_view[expert] = codes.transpose(0, 3, 4, 1, 2)
        factors = np.where(padding[..., None], np.uint8(0), scales[expert][source])
        scale_view[expert] = factors.transpose(0, 3, 1, 2)
    return data


def _unpack(type_: TensorType, data: Array) -> tuple[Array, ...]:
    layout, experts, inner = _checked(type_)
    blocks, rows = inner // MX_BLOCK, layout.source_rows
    code_view, scale_view = _views(layout, experts, inner, data)
    source = layout.columns.source_rows()
    real = source >= 0
    words = np.empty((experts, rows, blocks, WORDS_PER_BLOCK), np.uint32)
    scales = np.empty((experts, rows, blocks), np.uint8)
    for expert in range(experts):
        words[expert][source[real]] = code_view[expert].transpose(0, 3, 4, 1, 2)[real]
        scales[expert][source[real]] = scale_view[expert].transpose(0, 2, 3, 1)[real]
    return words.view(np.uint8).reshape(experts, rows, inner // 2), scales


def _views(layout: Mxfp4Layout, experts: int, inner: int, data: Array) -> tuple[Array, Array]:
    """Return the codes u32[E, panels, blocks, 4, 2, lanes] and the scales behind them."""
    split = layout.words_nbytes(experts, inner)
    lead = (experts, layout.columns.panels, inner // MX_BLOCK)
    codes = data[:split].view(np.uint32).reshape(*lead, WORDS_PER_BLOCK, HALVES, layout.lanes)
    return codes, data[split:].reshape(*lead, HALVES, layout.lanes)


def _nbytes(type_: TensorType) -> int:
    layout, experts, inner = _checked(type_)
    return layout.nbytes(experts, inner)


register_layout(LayoutFamily(FAMILY, _pack, _unpack, _nbytes))
