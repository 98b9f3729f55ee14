"""Layout family `mxfp4_gpu`: packing is exact both ways, and words decode as the kernels do it."""

import numpy as np
import pytest

from k3c.codegen.template import pack, packed_nbytes, unpack
from k3c.codegen.templates.triton import mxfp4_gpu_decode as bits
from k3c.codegen.templates.triton.mxfp4_gpu_layout import (
    CODE_BYTES,
    Mxfp4GpuLayout,
    parse_mxfp4_gpu_layout,
)
from k3c.errors import CodegenError
from k3c.ir.types import DTYPES, Layout, TensorType

RNG = np.random.default_rng(0)
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def type_of(experts: int, rows: int, inner: int, layout: str) -> TensorType:
    return TensorType(DTYPES["mxfp4"], (experts, rows, inner), Layout(layout))


@pytest.mark.parametrize(
    ("rows", "inner", "layout"),
    [
        (40, 96, "mxfp4_gpu.16x128.40"),
        (40, 128, "mxfp4_gpu.16x128.20s"),
        (1408, 32, "mxfp4_gpu.16x128.704s"),
        (96, 704, "mxfp4_gpu.16x128.96"),
    ],
)
def test_packing_gives_back_what_was_packed(rows: int, inner: int, layout: str) -> None:
    codes = RNG.integers(0, 256, (3, rows, inner // 2), dtype=np.uint8)
    scales = RNG.integers(0, 256, (3, rows, inner // 32), dtype=np.uint8)
    type_ = type_of(3, rows, inner, layout)
    data = pack(type_, [codes, scales])
    assert data.nbytes == packed_nbytes(type_)
    again = unpack(type_, data)
    assert (again[0] == codes).all()
    assert (again[1] == scales).all()


def test_without_padding_a_weight_takes_four_and_a_quarter_bits() -> None:
    type_ = type_of(56, 6144, 3584, "mxfp4_gpu.16x128.3072s")
    assert packed_nbytes(type_) == type_.nbytes


def test_rows_and_columns_that_fill_a_tile_are_zero() -> None:
    layout = "mxfp4_gpu.16x128.20s"
    full = np.full((1, 40, 48), 0xFF, np.uint8), np.full((1, 40, 3), 0xFF, np.uint8)
    data = pack(type_of(1, 40, 96, layout), full)
    # 20 outputs take three tiles of eight; 96 columns one of 128.
    codes, scales = data[: 3 * CODE_BYTES], data[3 * CODE_BYTES :]
    assert int(np.unpackbits(codes).sum()) == 40 * 96 * 4
    assert int((scales == 0xFF).sum()) == 40 * 3
    assert int((scales == 0).sum()) == 3 * 16 * 4 - 40 * 3


def test_a_situ_tile_holds_eight_gate_rows_then_their_up_rows() -> None:
    order = Mxfp4GpuLayout(20, situ=True).row_order()
    assert order[0].tolist() == [*range(8), *range(20, 28)]
    assert order[2].tolist() == [16, 17, 18, 19, -1, -1, -1, -1, 36, 37, 38, 39, -1, -1, -1, -1]


def test_a_lane_holds_what_it_feeds_to_a_matrix_unit() -> None:
    # One row of codes that tell their column's low four bits; the others are zero.
    codes = np.zeros((1, 16, 64), np.uint8)
    columns = np.arange(128)
    codes[0, 3] = (columns[0::2] & 15) | ((columns[1::2] & 15) << 4)
    type_ = type_of(1, 16, 128, "mxfp4_gpu.16x128.16")
    data = pack(type_, [codes, np.zeros((1, 16, 4), np.uint8)])
    words = data[:CODE_BYTES].view(np.uint32).reshape(16, 4, 4)
    for lane in range(4):
        for first in (0, 2):
            pairs = _decode(int(words[3, lane, first]), int(words[3, lane, first + 1]))
            for i, (low, high) in enumerate(pairs):
                word, j, h = first + i // 4, i % 4 // 2, i % 2
                column = 32 * word + 16 * j + 8 * h + 2 * lane
                assert (low, high) == (column & 15, (column + 1) & 15)


def test_masked_bits_are_the_value_times_2_to_the_minus_126() -> None:
    for code in range(16):
        half = (code >> 3) << 15 | (code & 7) << 6
        value = np.array([half << 16], np.uint32).view(np.float32)[0]
        sign = -1.0 if code & 8 else 1.0
        assert float(value) == sign * MAGNITUDES[code & 7] * 2.0**-126


@pytest.mark.parametrize(
    ("rows", "layout", "message"),
    [
        (64, "mxfp4_gpu.16x128.64s", "the layout is for mxfp4[E, 128, 32n]"),
        (64, "mxfp4_gpu.16x64.64", "is no mxfp4_gpu layout"),
        (64, "mxfp4_gpu.64", "is no mxfp4_gpu layout"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(rows: int, layout: str, message: str) -> None:
    with pytest.raises(CodegenError) as raised:
        packed_nbytes(type_of(2, rows, 96, layout))
    assert message in str(raised.value)


def test_a_name_says_everything() -> None:
    for layout in (Mxfp4GpuLayout(3072, situ=True), Mxfp4GpuLayout(3584, situ=False)):
        assert parse_mxfp4_gpu_layout(layout.name) == layout


def _decode(first: int, second: int) -> list[tuple[int, int]]:
    """Return the codes of two words by pair, written here once more from the kernel's constants."""

    def rotate(word: int, count: int) -> int:
        return (word << count | word >> (32 - count)) & 0xFFFFFFFF

    chosen, rest = bits.LEFT_OVER.value, bits.LEFT_OVER_REST.value
    left = first & chosen | rotate(second, bits.LEFT_OVER_ROTATION.value) & rest
    found = []
    for word, last in zip((first, second), bits.LAST_ROTATIONS.value, strict=True):
        turned = [rotate(word, r) for r in bits.ROTATIONS.value] + [rotate(left, last)]
        for masked in (t & bits.MASK.value for t in turned):
            halves = (masked & 0xFFFF, masked >> 16)
            low, high = (h >> 15 << 3 | h >> 6 & 7 for h in halves)
            found.append((low, high))
    return found
