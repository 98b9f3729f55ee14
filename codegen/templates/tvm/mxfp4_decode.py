"""MXFP4 in registers: e2m1 codes to f32 by a permute of a table, e8m0 scales by a shift."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from k3c.codegen.templates.tvm.mxfp4_layout import CODES_PER_WORD
from k3c.codegen.templates.tvm.vector import bits, typed

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODE_BITS = 4
_SIGN = 0x80000000
_EXPONENT_SHIFT = 23
_SMALLEST = 0x00400000  # 2^-127, which e8m0 writes as 0, is half of the smallest normal number
_NAN_CODE, _NAN = 255, 0x7FC00000


def magnitude_table(lanes: int) -> Any:
    """Return what `decode_code` permutes: 8 magnitudes, or with 16 lanes also their negatives."""
    values = list(_MAGNITUDES)
    if lanes == 2 * len(values):
        values += [-m for m in values]
    scalars = [tirx.const(v, "float32") for v in values]
    return T.bind(tirx.Shuffle(scalars, [tirx.const(i, "int32") for i in range(lanes)]))


def decode_code(table: Any, word: Any, index: int, lanes: int) -> Any:
    """Return code `index` of each lane's word as f32 lanes.

    AVX2's permute reads three bits of the index, AVX-512's four, so neither needs a mask; with
    three, the sign has to be moved from the code's top bit.
    """
    low = word if index == 0 else word >> bits(_CODE_BITS * index, lanes)
    selector = T.reinterpret(typed("int32", lanes), low)
    if lanes > len(_MAGNITUDES):
        return T.bind(_permute("llvm.x86.avx512.permvar.sf.512", table, selector, lanes))
    size = _permute("llvm.x86.avx2.permps", table, selector, lanes)
    last = CODES_PER_WORD - 1
    high = word if index == last else word << bits(_CODE_BITS * (last - index), lanes)
    signed = T.reinterpret(typed("uint32", lanes), size) ^ (high & bits(_SIGN, lanes))
    return T.bind(T.reinterpret(typed("float32", lanes), signed))


def decode_scale(codes: Any, lanes: int) -> Any:
    """Return e8m0 scales u8 lanes as f32 lanes: 2^(code - 127), 255 is NaN."""
    code = T.bind(T.Cast(typed("uint32", lanes), codes))
    power = code << bits(_EXPONENT_SHIFT, lanes)
    power = T.Select(code == bits(0, lanes), bits(_SMALLEST, lanes), power)
    power = T.Select(code == bits(_NAN_CODE, lanes), bits(_NAN, lanes), power)
    return T.bind(T.reinterpret(typed("float32", lanes), power))


def _permute(name: str, table: Any, selector: Any, lanes: int) -> Any:
    return T.call_llvm_pure_intrin(typed("float32", lanes), name, table, selector)
