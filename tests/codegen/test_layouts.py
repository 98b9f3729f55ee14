"""Weight layouts: packing is exact both ways, names say everything, padding is zero."""

import numpy as np
import pytest

from k3c.codegen.template import pack, packed_nbytes, unpack
from k3c.errors import CodegenError
from k3c.ir.types import DTYPES, Layout, TensorType

RNG = np.random.default_rng(0)


def packed_type(dtype: str, shape: tuple[int, ...], layout: str) -> TensorType:
    return TensorType(DTYPES[dtype], shape, Layout(layout))


@pytest.mark.parametrize(
    ("rows", "layout"),
    [
        (64, "panel_bf16.v8.64"),
        (100, "panel_bf16.v8.100"),
        (121, "panel_bf16.v8.48-20s-33"),
        (121, "panel_bf16.v16.48-20s-33"),
        (10, "panel_bf16.v16.5s"),
    ],
)
@pytest.mark.parametrize("inner", [13, 96])
def test_bf16_panels_give_back_what_was_packed(rows: int, layout: str, inner: int) -> None:
    weight = RNG.integers(0, 2**16, (rows, inner), dtype=np.uint16)
    type_ = packed_type("bf16", (rows, inner), layout)
    data = pack(type_, [weight])
    assert data.nbytes == packed_nbytes(type_)
    assert (unpack(type_, data)[0] == weight).all()


def test_f32_panels_give_back_what_was_packed() -> None:
    weight = RNG.standard_normal((121, 96)).astype(np.float32)
    type_ = packed_type("f32", (121, 96), "panel_f32.v8.48-20s-33")
    data = pack(type_, [weight])
    assert data.nbytes == packed_nbytes(type_)
    assert (unpack(type_, data)[0] == weight).all()


def test_a_panel_word_holds_column_j_low_and_column_j_plus_lanes_high() -> None:
    weight = np.arange(16 * 3, dtype=np.uint16).reshape(16, 3)
    words = pack(packed_type("bf16", (16, 3), "panel_bf16.v8.16"), [weight]).view(np.uint32)
    assert (words.reshape(3, 8) == weight[:8].T + (weight[8:].T.astype(np.uint32) << 16)).all()


def test_a_situ_panel_pairs_gate_and_up_of_the_same_output() -> None:
    weight = np.arange(16, dtype=np.uint16).reshape(16, 1)
    words = pack(packed_type("bf16", (16, 1), "panel_bf16.v8.8s"), [weight]).view(np.uint32)
    assert (words & 0xFFFF).tolist() == list(range(8))
    assert (words >> 16).tolist() == list(range(8, 16))


@pytest.mark.parametrize(
    "layout", ["mxfp4_panel.v8.40", "mxfp4_panel.v8.20s", "mxfp4_panel.v16.40"]
)
def test_mxfp4_panels_give_back_what_was_packed(layout: str) -> None:
    codes = RNG.integers(0, 256, (3, 40, 48), dtype=np.uint8)
    scales = RNG.integers(0, 256, (3, 40, 3), dtype=np.uint8)
    type_ = packed_type("mxfp4", (3, 40, 96), layout)
    data = pack(type_, [codes, scales])
    assert data.nbytes == packed_nbytes(type_)
    again = unpack(type_, data)
    assert (again[0] == codes).all()
    assert (again[1] == scales).all()


def test_mxfp4_without_padding_takes_four_and_a_quarter_bits_a_weight() -> None:
    type_ = packed_type("mxfp4", (5, 64, 96), "mxfp4_panel.v8.64")
    assert packed_nbytes(type_) == type_.nbytes == 5 * 64 * 96 * 17 // 32


def test_padding_columns_are_zero() -> None:
    type_ = packed_type("bf16", (20, 4), "panel_bf16.v8.20")
    data = pack(type_, [np.full((20, 4), 0xFFFF, np.uint16)]).view(np.uint16)
    assert (data == 0).sum() == (32 - 20) * 4


def test_row_major_weights_keep_their_bytes() -> None:
    weight = RNG.standard_normal((7, 5)).astype(np.float32)
    type_ = packed_type("f32", (7, 5), "row_major")
    assert pack(type_, [weight]).tobytes() == weight.tobytes()


@pytest.mark.parametrize(
    ("dtype", "shape", "layout", "message"),
    [
        ("bf16", (64, 8), "panel_bf16.v8.63", "the layout is for bf16[63, K]"),
        ("f32", (64, 8), "panel_bf16.v8.64", "the layout is for bf16[64, K]"),
        ("bf16", (64, 8), "panel_bf16.v7.64", "is no panel layout"),
        ("mxfp4", (2, 64, 96), "mxfp4_panel.v8.64s", "the layout is for mxfp4[E, 128, 32n]"),
        ("mxfp4", (2, 64, 96), "mxfp4_panel.v9.64", "is no MXFP4 layout"),
        ("bf16", (64, 8), "tiles.64", "unknown layout family 'tiles'"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(
    dtype: str, shape: tuple[int, ...], layout: str, message: str
) -> None:
    with pytest.raises(CodegenError) as raised:
        packed_nbytes(packed_type(dtype, shape, layout))
    assert message in str(raised.value)
