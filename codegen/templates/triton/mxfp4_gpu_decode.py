"""MXFP4 in registers on a GPU: words of the layout `mxfp4_gpu` to bf16, scales applied.

A code is s e e m. With s in bit 15 and e e m in bits 8 to 6, the rest zero, a 16-bit word is the
bf16 number value * 2^-126, zero and one half included: two codes of a u32 need one mask. Words come
in pairs. Of each word, three rotations hold two codes each where the mask wants them; what is left
of both words fits into one more word, which holds the last two codes of either.

A block's factor is 2^(scale - 1) then. bf16 holds it for scales up to 128 ("fast"). Any scale is
exact in two steps: times 2^126, then times 2^(scale - 127), of which byte 0 is the subnormal 2^-127
and byte 255 NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter knows no assembly.
ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)
# Bits of s and e e m of two codes.
MASK = tl.constexpr(0x81C081C0)
# Left rotations that bring codes 0 and 1, 2 and 3, 4 and 5 of a word under the mask.
ROTATIONS = tl.constexpr((0, 4, 10))
# Which bits of the left-over word are of the first word; the second is rotated before.
LEFT_OVER = tl.constexpr(0x06030603)
LEFT_OVER_REST = tl.constexpr(0xF9FCF9FC)
LEFT_OVER_ROTATION = tl.constexpr(30)
# Left rotations that bring codes 6 and 7 of the first and of the second word under the mask.
LAST_ROTATIONS = tl.constexpr((14, 8))
# Bytes 0 and 2 of a word of scales belong to words 0 and 1, bytes 1 and 3 to words 2 and 3.
SCALE_BYTES = tl.constexpr((0, 2, 1, 3))
# Set in a word of scales with one that is too large for the fast way.
TOO_LARGE = tl.constexpr(0x80808080)

_UNPACK = """
shf.l.wrap.b32 t, $9, $9, 30;
lop3.b32 left, $8, t, 0x06030603, 0xe4;
and.b32 $0, $8, 0x81C081C0;
shl.b32 t, $8, 4;
and.b32 $1, t, 0x81C081C0;
shf.l.wrap.b32 t, $8, $8, 10;
and.b32 $2, t, 0x81C081C0;
shf.l.wrap.b32 t, left, left, 14;
and.b32 $3, t, 0x81C081C0;
and.b32 $4, $9, 0x81C081C0;
shl.b32 t, $9, 4;
and.b32 $5, t, 0x81C081C0;
shf.l.wrap.b32 t, $9, $9, 10;
and.b32 $6, t, 0x81C081C0;
shf.l.wrap.b32 t, left, left, 8;
and.b32 $7, t, 0x81C081C0;
"""
_NORMALISE = "".join(f"mul.rn.bf16x2 ${i}, ${i}, one;\n" for i in range(8))
_SCALE = "".join(f"mul.rn.bf16x2 ${i}, ${i}, s{i // 4};\n" for i in range(8))
_BEGIN = """{
.reg .b32 left, t, one, s0, s1;
.reg .b16 low, high;
mov.b32 {low, high}, $10;
mov.b32 s0, {low, low};
mov.b32 s1, {high, high};
mov.b32 one, 0x7E807E80;
"""
_FAST = tl.constexpr(_BEGIN + _UNPACK + _SCALE + "}")
_EXACT = tl.constexpr(_BEGIN + _UNPACK + _NORMALISE + _SCALE + "}")
_FAST_FACTORS = tl.constexpr("""{
.reg .b32 t;
and.b32 t, $2, 0x00FF00FF;
mad.lo.u32 $0, t, 128, 0x3F003F00;
prmt.b32 t, $2, 0, 0x4341;
mad.lo.u32 $1, t, 128, 0x3F003F00;
}""")


@triton.jit
def decode_words(words, scales, dtype: tl.constexpr, FAST: tl.constexpr, NVIDIA: tl.constexpr):
    """Return the weights dtype[C, R, 4, u, e, h, j, v] of words u32[C, R, 4, 4].

    Code (j, h, e) of word 2u + v of lane q stands for k = 32 (2u + v) + 16 j + 8 h + 2 q + e of
    the 128 that the lanes of a row hold together.

    Args:
        words: u32[C, R, 4, 4]: chunks of 128 k, rows, lanes, words.
        scales: u32[C, R]: the scales of the four words.
        dtype: bf16 or f32; both hold every weight.
        FAST: Whether no scale is above 128; on NVIDIA only.
        NVIDIA: Whether to decode with NVIDIA's instructions.
    """
    C: tl.constexpr = words.shape[0]
    R: tl.constexpr = words.shape[1]
    first, second = tl.split(tl.reshape(words, (C, R, 4, 2, 2)))
    factors = _factors(scales, FAST and ASSEMBLY)[:, :, None, :]
    if NVIDIA and ASSEMBLY:
        a0, a1, a2, a3, b0, b1, b2, b3 = tl.inline_asm_elementwise(
            _FAST if FAST else _EXACT,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
            [first, second, factors],
            dtype=(tl.uint32,) * 8,
            is_pure=True,
            pack=1,
        )
        a = tl.join(tl.join(_halves(a0), _halves(a1)), tl.join(_halves(a2), _halves(a3)))
        b = tl.join(tl.join(_halves(b0), _halves(b1)), tl.join(_halves(b2), _halves(b3)))
    else:
        left = (first & LEFT_OVER) | (_rotate(second, LEFT_OVER_ROTATION) & LEFT_OVER_REST)
        a = _decode_word(first, _rotate(left, LAST_ROTATIONS[0]), factors << 16, dtype)
        b = _decode_word(second, _rotate(left, LAST_ROTATIONS[1]), factors & 0xFFFF0000, dtype)
    return tl.join(a, b).to(dtype)


@triton.jit
def _factors(scales, FAST: tl.constexpr):
    """Return u32[..., 2], bf16 factors: of words 0 (low half) and 1, of words 2 and 3."""
    if FAST:
        low, high = tl.inline_asm_elementwise(
            _FAST_FACTORS, "=&r,=r,r", [scales], dtype=(tl.uint32,) * 2, is_pure=True, pack=1
        )
    else:
        special = _zero_or_nan(scales) >> 1
        low = ((scales & 0x00FF00FF) << 7) | (special & 0x00400040)
        high = ((scales >> 1) & 0x7F807F80) | ((special >> 8) & 0x00400040)
    return tl.join(low, high)


@triton.jit
def _zero_or_nan(scales):
    """Return u32 with the top bit set in every byte that is 0 or 255 in `scales`."""
    nonzero = ((scales & 0x7F7F7F7F) + 0x7F7F7F7F) | scales
    others = ~scales
    finite = ((others & 0x7F7F7F7F) + 0x7F7F7F7F) | others
    return ~(nonzero & finite) & 0x80808080


@triton.jit
def _halves(pair):
    """Return bf16[..., 2]: the low and the high half of u32."""
    low = (pair & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (pair >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _rotate(word, COUNT: tl.constexpr):
    """Return u32 rotated left."""
    return word if COUNT == 0 else (word << COUNT) | (word >> (32 - COUNT))


@triton.jit
def _decode_word(word, last, factor, dtype: tl.constexpr):
    """Return dtype[..., e, h, j] of the codes of a word; `factor` are the bits of an f32."""
    factor = factor.to(tl.float32, bitcast=True)
    c0 = _two_codes(_rotate(word, ROTATIONS[0]), factor, dtype)
    c1 = _two_codes(_rotate(word, ROTATIONS[1]), factor, dtype)
    c2 = _two_codes(_rotate(word, ROTATIONS[2]), factor, dtype)
    return tl.join(tl.join(c0, c1), tl.join(c2, _two_codes(last, factor, dtype)))


@triton.jit
def _two_codes(word, factor, dtype: tl.constexpr):
    """Return dtype[..., 2] of the codes under the mask, low half first."""
    return tl.join(_value(word, factor, dtype), _value(word >> 16, factor, dtype))


@triton.jit
def _value(half, factor, dtype: tl.constexpr):
    """Return the code in the low half of a word times an f32.

    A magnitude of at least one has exponent and mantissa in place once the bias is added. The
    product is exact in bf16, so its upper half is the bf16.
    """
    code = (half >> 6) & 7
    size = tl.where(code < 2, code * (126 << 23), (code << 22) + (126 << 23))
    bits = size | ((half & 0x8000) << 16)
    value = bits.to(tl.float32, bitcast=True) * factor
    if dtype == tl.float32:
        return value
    else:
        high = value.to(tl.uint32, bitcast=True) >> 16
        return high.to(tl.uint16).to(tl.bfloat16, bitcast=True)
