"""The layout family `rows`: pack and unpack are inverse, ranges start at multiples of 16."""

from __future__ import annotations

import numpy as np
import pytest

from k3c.codegen.template import pack, packed_nbytes, unpack
from k3c.codegen.templates.triton.linear_layout import parse_rows_layout, rows_layout
from k3c.errors import CodegenError
from k3c.ir.types import BF16, F32, DType, Layout, TensorType

COLUMNS = ((33, False), (20, True), (48, False))
NUMPY = {BF16: np.uint16, F32: np.float32}


def _type(dtype: DType, inner: int) -> TensorType:
    layout = rows_layout(COLUMNS)
    return TensorType(dtype, (layout.source_rows, inner), Layout(layout.name))


def _weight(type_: TensorType) -> np.ndarray:
    random = np.random.default_rng(1)
    return random.integers(1, 1 << 15, type_.sizes).astype(NUMPY[type_.dtype])


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("inner", [13, 96])
def test_unpack_undoes_pack(dtype: DType, inner: int) -> None:
    type_ = _type(dtype, inner)
    weight = _weight(type_)
    packed = pack(type_, [weight])
    assert packed.nbytes == packed_nbytes(type_)
    (again,) = unpack(type_, packed)
    assert (again == weight).all()


def test_a_range_starts_at_a_multiple_of_sixteen_rows_and_the_gap_is_zero() -> None:
    type_ = _type(BF16, 8)
    weight = _weight(type_)
    packed = pack(type_, [weight]).view(np.uint16).reshape(-1, 8)
    assert [r.start for r in rows_layout(COLUMNS).ranges] == [0, 48, 96]
    assert packed.shape[0] == 144
    assert (packed[:33] == weight[:33]).all()
    assert (packed[33:48] == 0).all()
    assert (packed[88:96] == 0).all()
    assert (packed[96:] == weight[73:]).all()


def test_a_situ_range_has_gate_and_up_rows_in_turn() -> None:
    type_ = _type(BF16, 8)
    weight = _weight(type_)
    packed = pack(type_, [weight]).view(np.uint16).reshape(-1, 8)
    assert (packed[48:88:2] == weight[33:53]).all()
    assert (packed[49:88:2] == weight[53:73]).all()


def test_the_name_says_everything() -> None:
    layout = rows_layout(COLUMNS)
    assert layout.name == "rows.33-20s-48"
    assert parse_rows_layout(layout.name) == layout


@pytest.mark.parametrize("name", ["rows.", "rows.12x", "rows.s", "panel_bf16.v8.12"])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(CodegenError, match="no layout of rows"):
        parse_rows_layout(name)


def test_a_weight_of_other_rows_is_refused() -> None:
    type_ = TensorType(BF16, (100, 8), Layout("rows.33-20s-48"))
    with pytest.raises(CodegenError, match="121"):
        packed_nbytes(type_)
