"""Layout family `mxfp4_gpu`: MXFP4 expert matrices in the order in which tensor cores take them.

`mxfp4_gpu.16x128.3072s` says: tiles of 16 rows by 128 columns, 3072 outputs, "s": eight gate rows,
then the eight up rows of the same outputs in every tile (SiTU). Tiles go by expert, rows, columns.
A tile of codes is u32[2, 8, 4, 4]: half of the rows, row, lane, word. Word w of lane q holds the
eight codes of columns 32w + 16j + 8h + 2q + e, which is what that lane feeds to a matrix unit.
Their bits are shuffled between words 0 and 1, and 2 and 3, as `mxfp4_gpu_decode` wants them.
Behind all codes stand the scales, u32[2, 8] a tile, bytes of a word in the order of `SCALE_BYTES`.

Padding: the rows that fill the last tile, and the columns that fill the last 128, have code 0 and
scale 0. No kernel lets them reach a result.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from k3c.codegen.template import Array, LayoutFamily, padded, register_layout
from k3c.codegen.templates.triton import mxfp4_gpu_decode as bits
from k3c.errors import CodegenError
from k3c.ir.types import MX_BLOCK, TensorType

FAMILY = "mxfp4_gpu"
TILE_ROWS, CHUNK = 16, 128
HALVES, HALF_ROWS, LANES, WORDS = 2, 8, 4, 4
CODE_BYTES = TILE_ROWS * CHUNK // 2
SCALE_TILE_BYTES = TILE_ROWS * WORDS
_NAME = re.compile(rf"{FAMILY}\.{TILE_ROWS}x{CHUNK}\.(\d+)(s?)")


@dataclass(frozen=True)
class Mxfp4GpuLayout:
    """A layout of the family, as its name says it: outputs, and whether they are SiTU pairs."""

    width: int
    situ: bool

    @property
    def name(self) -> str:
        """The layout's name."""
        return f"{FAMILY}.{TILE_ROWS}x{CHUNK}.{self.width}{'s' if self.situ else ''}"

    @property
    def source_rows(self) -> int:
        """Rows of one expert's matrix."""
        return self.width * (2 if self.situ else 1)

    @property
    def tiles(self) -> int:
        """Tiles of rows of one expert."""
        return padded(self.source_rows, TILE_ROWS) // TILE_ROWS

    def row_order(self) -> Array:
        """Return i64[tiles, 16], the matrix row at each place; -1 is padding."""
        place = np.arange(self.tiles * TILE_ROWS).reshape(self.tiles, HALVES, HALF_ROWS)
        if self.situ:
            output = np.arange(self.tiles * HALF_ROWS).reshape(self.tiles, 1, HALF_ROWS)
            place = output + np.arange(HALVES)[:, None] * self.width
            place = np.where(output < self.width, place, -1)
        rows = place.reshape(self.tiles, TILE_ROWS)
        return np.where(rows < self.source_rows, rows, -1)

    def tile_count(self, experts: int, inner: int) -> int:
        """Tiles of all experts."""
        return experts * self.tiles * (padded(inner, CHUNK) // CHUNK)

    def nbytes(self, experts: int, inner: int) -> int:
        """Bytes of codes and scales."""
        return self.tile_count(experts, inner) * (CODE_BYTES + SCALE_TILE_BYTES)


def parse_mxfp4_gpu_layout(name: str) -> Mxfp4GpuLayout:
    """Return the layout called `name`.

    Raises:
        CodegenError: It is not the name of a layout of the family.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        example = Mxfp4GpuLayout(3072, True).name
        raise CodegenError(f"{name!r} is no {FAMILY} layout", "", f"e.g. {example}")
    return Mxfp4GpuLayout(int(match[1]), match[2] == "s")


def _decoded_bits(words: tuple[int, int]) -> list[int]:
    """Return the masked words of two codes, of the first word and then of the second."""

    def rotated(word: int, count: int) -> int:
        return (word << count | word >> (32 - count)) & 0xFFFFFFFF

    first, second = words
    turned = rotated(second, bits.LEFT_OVER_ROTATION.value)
    chosen = bits.LEFT_OVER.value
    left = first & chosen | turned & ~chosen
    return [
        pair & bits.MASK.value
        for word, last in zip(words, bits.LAST_ROTATIONS.value, strict=True)
        for pair in (*(rotated(word, r) for r in bits.ROTATIONS.value), rotated(left, last))
    ]


def _bit_places() -> Array:
    """Return i64[8, 2, 4]: where in two words bit b of code e of pair p stands.

    Pair 4v + 2j + h: column 32v + 16j + 8h + 2q + e. Bits are counted from the first word's lowest.
    """
    places = np.full((8, 2, 4), -1, np.int64)
    for place in range(64):
        word = 1 << place
        for pair, found in enumerate(_decoded_bits((word & 0xFFFFFFFF, word >> 32))):
            if found:
                half, bit = divmod(found.bit_length() - 1, 16)
                places[pair, half, 3 if bit == 15 else bit - 6] = place
    assert sorted(places.flatten()) == list(range(64)), "a bit of a code has no place of its own"
    return places


_PLACES = _bit_places().reshape(8, 8)
# By pair and byte of two codes: what it adds to the two words.
_TABLE = sum(
    ((np.arange(256, dtype=np.uint64) >> np.uint64(b)) & np.uint64(1))[None]
    << _PLACES[:, b, None].astype(np.uint64)
    for b in range(8)
)


def _pack_codes(codes: Array) -> Array:
    """Return u32[..., 4 lanes, 4 words] of codes u8[..., 64], two of a row's 128 to a byte."""
    split = codes.reshape(-1, 2, 8, LANES)
    words = np.zeros(split.shape[0] * LANES * 2, np.uint64)
    for pair in range(8):
        words |= _TABLE[pair].take(split[:, :, pair].swapaxes(1, 2).ravel())
    return words.view(np.uint32).reshape(*codes.shape[:-1], LANES, WORDS)


def _unpack_codes(words: Array) -> Array:
    """Return what `_pack_codes` was given."""
    both = np.ascontiguousarray(words).view(np.uint64)
    split = np.zeros((*words.shape[:-2], 2, 8, LANES), np.uint8)
    for pair in range(8):
        for bit in range(8):
            found = (both >> np.uint64(_PLACES[pair, bit])) & np.uint64(1)
            split[..., pair, :] |= (found << np.uint64(bit)).astype(np.uint8).swapaxes(-1, -2)
    return split.reshape(*words.shape[:-2], CHUNK // 2)


def _checked(type_: TensorType) -> tuple[Mxfp4GpuLayout, int, int]:
    layout = parse_mxfp4_gpu_layout(type_.layout.name)
    experts, rows, inner = type_.sizes
    if (rows, type_.dtype.name, inner % MX_BLOCK) != (layout.source_rows, "mxfp4", 0):
        raise CodegenError(f"{type_}: the layout is for mxfp4[E, {layout.source_rows}, 32n]")
    return layout, experts, inner


def _views(layout: Mxfp4GpuLayout, experts: int, inner: int, data: Array) -> tuple[Array, Array]:
    """Return codes u32[E, tiles, chunks, 16, 4, 4] and scales u8[E, tiles, chunks, 16, 4]."""
    lead = (experts, layout.tiles, padded(inner, CHUNK) // CHUNK, TILE_ROWS)
    split = layout.tile_count(experts, inner) * CODE_BYTES
    return data[:split].view(np.uint32).reshape(*lead, LANES, WORDS), data[split:].reshape(*lead, 4)


def _pack(type_: TensorType, arrays: Sequence[Array]) -> Array:
    layout, experts, inner = _checked(type_)
    chunks, rows = padded(inner, CHUNK) // CHUNK, layout.source_rows
    packed = np.asarray(arrays[0]).reshape(experts, rows, inner // 2)
    scales = np.asarray(arrays[1]).reshape(experts, rows, inner // MX_BLOCK)
    data = np.zeros(layout.nbytes(experts, inner), np.uint8)
    code_view, scale_view = _views(layout, experts, inner, data)
    order = layout.row_order()
    # One expert at a time: a whole layer's experts gathered at once would need its bytes again.
    for expert in range(experts):
        codes = np.zeros((*order.shape, chunks * CHUNK // 2), np.uint8)
        codes[order >= 0, : inner // 2] = packed[expert][order[order >= 0]]
        codes = codes.reshape(*order.shape, chunks, CHUNK // 2).swapaxes(1, 2)
        code_view[expert] = _pack_codes(codes)
        factors = np.zeros((*order.shape, chunks * WORDS), np.uint8)
        factors[order >= 0, : inner // MX_BLOCK] = scales[expert][order[order >= 0]]
        factors = factors.reshape(*order.shape, chunks, WORDS).swapaxes(1, 2)
        scale_view[expert] = factors[..., bits.SCALE_BYTES.value]
    return data


def _unpack(type_: TensorType, data: Array) -> tuple[Array, ...]:
    layout, experts, inner = _checked(type_)
    code_view, scale_view = _views(layout, experts, inner, data)
    order = layout.row_order()
    rows = layout.source_rows
    packed = np.empty((experts, rows, inner // 2), np.uint8)
    scales = np.empty((experts, rows, inner // MX_BLOCK), np.uint8)
    for expert in range(experts):
        codes = _unpack_codes(code_view[expert]).swapaxes(1, 2).reshape(*order.shape, -1)
        packed[expert][order[order >= 0]] = codes[order >= 0, : inner // 2]
        factors = scale_view[expert][..., bits.SCALE_BYTES.value]
        factors = factors.swapaxes(1, 2).reshape(*order.shape, -1)
        scales[expert][order[order >= 0]] = factors[order >= 0, : inner // MX_BLOCK]
    return packed, scales


def _nbytes(type_: TensorType) -> int:
    layout, experts, inner = _checked(type_)
    return layout.nbytes(experts, inner)


register_layout(LayoutFamily(FAMILY, _pack, _unpack, _nbytes))
