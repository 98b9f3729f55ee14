"""Vector arithmetic that kernels share: bf16 as bits, exp, tanh, sigmoid, SiTU.

Plain Python functions that return TIR expressions; they may be called from TVMScript and from
builder code. A bf16 value is kept as its bits, in uint16 buffers. The functions of the target's
math library are not used: TVM calls them lane by lane. Errors below are relative, against float64.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder

# TVM annotates indices and extents as expressions, and takes integers all the same.
B: Any = builder

_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # their sum is ln 2 beyond float32
_LOG2_E = 1.4426950408889634
_EXP_LOW, _EXP_HIGH = -87.0, 88.0  # outside, 2^k is not a normal float32
_EXPONENT_BITS, _EXPONENT_BIAS = 23, 127
_HALF_BELOW = 0x7FFF  # one less than half a unit in bf16's last place
_QUIET_NAN = 0x7FC0
# How far ahead kernels that stream weights fetch. Of 0.5, 1 and 2 KiB, on a Xeon with DDR5, 2 KiB
# gave most: up to 1.9 times the speed without. The hardware's own prefetcher stops at a page, and
# the arithmetic of several rows leaves few loads in flight.
PREFETCH_BYTES = 2048
_FOR_READING, _KEEP_IN_ALL_LEVELS, _DATA = 0, 3, 1  # arguments of LLVM's prefetch
_SIGN, _MAGNITUDE, _INFINITY = 0x80000000, 0x7FFFFFFF, 0x7F800000


def storage(act: str) -> str:
    """Return the buffer dtype of IR dtype `act`: bf16 is kept as its bits."""
    return "uint16" if act == "bf16" else "float32"


def splat(value: Any, lanes: int) -> Any:
    """Return a scalar in every lane; a Python number becomes f32."""
    scalar = T.float32(value) if isinstance(value, int | float) else value
    return scalar if lanes == 1 else T.broadcast(scalar, lanes)


def bits(value: int, lanes: int) -> Any:
    """Return a uint32 in every lane."""
    return T.uint32(value) if lanes == 1 else T.broadcast(T.uint32(value), lanes)


def span(start: Any, lanes: int) -> Any:
    """Return the index of `lanes` consecutive elements from `start`."""
    return start if lanes == 1 else T.ramp(start, 1, lanes)


def typed(dtype: str, lanes: int) -> str:
    """Return the TIR name of a vector type."""
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def put(buffer: Any, value: Any, *index: Any) -> None:
    """Store into a buffer, in builder code."""
    B.buffer_store(buffer, value, list(index))


def hold(value: Any) -> Any:
    """Evaluate a value once and return it as a load from a small buffer (LLVM: a register).

    Not `T.bind`: TVM's simplifier expands every use of a bound variable whose value is pure, so
    that a chain of them, each used twice, takes time and text exponential in its length.
    """
    dtype, _, lanes = str(value.ty.dtype).partition("x")
    count = int(lanes or 1)
    buffer = T.alloc_buffer((count,), dtype)
    B.buffer_store(buffer, value, [span(0, count)])
    return buffer[span(0, count)]


def prefetch(buffer: Any, *index: Any) -> None:
    """Emit the fetch of a cache line, in builder code; an address past the buffer does no harm."""
    address = B.address_of(buffer[index])
    hints = [T.int32(v) for v in (_FOR_READING, _KEEP_IN_ALL_LEVELS, _DATA)]
    B.evaluate(T.call_llvm_intrin("void", "llvm.prefetch.p0", address, *hints))


def widen(loaded: Any, act: str, lanes: int) -> Any:
    """Return loaded activations as f32 lanes."""
    if act == "f32":
        return loaded
    wide = T.Cast(typed("uint32", lanes), loaded) << bits(16, lanes)
    return T.reinterpret(typed("float32", lanes), wide)


def is_nan(value: Any, lanes: int) -> Any:
    """Return which f32 lanes are NaN. By bits: TVM folds x == x to true for floats too."""
    u = T.reinterpret(typed("uint32", lanes), value) & bits(_MAGNITUDE, lanes)
    return u > bits(_INFINITY, lanes)


def narrow(value: Any, act: str, lanes: int) -> Any:
    """Return f32 lanes as activations to store: nearest, ties to even; NaN stays NaN."""
    if act == "f32":
        return value
    x = hold(value)
    u = hold(T.reinterpret(typed("uint32", lanes), x))
    odd = (u >> bits(16, lanes)) & bits(1, lanes)
    nearest = (u + (bits(_HALF_BELOW, lanes) + odd)) >> bits(16, lanes)
    kept = T.Select(is_nan(x, lanes), bits(_QUIET_NAN, lanes), nearest)
    return T.Cast(typed("uint16", lanes), kept)


def rounded(value: Any, act: str, lanes: int) -> Any:
    """Return f32 lanes rounded to the activation dtype and widened again."""
    return value if act == "f32" else widen(narrow(value, act, lanes), act, lanes)


def exp(value: Any, lanes: int) -> Any:
    """Return exp of f32 lanes (error below 2e-7); NaN passes, x is held in [-87, 88]."""
    power, part = _exp_parts(value, lanes)
    return hold(power * part + power)


def expm1(value: Any, lanes: int) -> Any:
    """Return exp(x) - 1 of f32 lanes, exact to rounding near 0."""
    power, part = _exp_parts(value, lanes)
    return hold(power * part + (power - splat(1.0, lanes)))


def sigmoid(value: Any, lanes: int) -> Any:
    """Return the logistic function of f32 lanes (error below 5e-7)."""
    one = splat(1.0, lanes)
    return hold(one / (one + exp(splat(0.0, lanes) - value, lanes)))


def tanh(value: Any, lanes: int) -> Any:
    """Return tanh of f32 lanes (error below 5e-7, also near 0)."""
    u = hold(T.reinterpret(typed("uint32", lanes), value))
    sign = u & bits(_SIGN, lanes)
    size = T.reinterpret(typed("float32", lanes), u & bits(_MAGNITUDE, lanes))
    # Past 15, tanh is 1 in float32; the bound keeps expm1 finite. NaN passes the comparison.
    held = hold(T.Select(size > splat(15.0, lanes), splat(15.0, lanes), size))
    e = expm1(held + held, lanes)
    positive = hold(e / (e + splat(2.0, lanes)))
    signed = T.reinterpret(typed("uint32", lanes), positive) | sign
    return hold(T.reinterpret(typed("float32", lanes), signed))


def situ(gate: Any, up: Any, beta: float, linear_beta: float | str, lanes: int) -> Any:
    """Return beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta) of f32 lanes."""
    g = hold(gate)
    u = hold(up)
    if not isinstance(linear_beta, str):
        cap = splat(linear_beta, lanes)
        u = hold(cap * tanh(u / cap, lanes))
    b = splat(beta, lanes)
    return hold(b * tanh(g / b, lanes) * sigmoid(g, lanes) * u)


def horizontal_sum(buffer: Any, start: int, lanes: int) -> Any:
    """Return the sum of `lanes` (a power of two) elements of a 1-d f32 buffer, as a tree."""
    terms = [buffer[start + i] for i in range(lanes)]
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [a + b for a, b in zip(terms[:half], terms[half:], strict=True)]
    return hold(terms[0])


def _exp_parts(value: Any, lanes: int) -> tuple[Any, Any]:
    """Return s = 2^k and p with exp(x) = s + s p, |p| < 0.42."""
    x = hold(value)
    x = hold(T.Select(x < splat(_EXP_LOW, lanes), splat(_EXP_LOW, lanes), x))
    x = hold(T.Select(x > splat(_EXP_HIGH, lanes), splat(_EXP_HIGH, lanes), x))
    k = hold(T.nearbyint(x * splat(_LOG2_E, lanes)))
    r = hold((x - k * splat(_LN2_HIGH, lanes)) - k * splat(_LN2_LOW, lanes))
    word = typed("int32", lanes)
    bias, shift = T.int32(_EXPONENT_BIAS), T.int32(_EXPONENT_BITS)
    if lanes > 1:
        bias, shift = T.broadcast(bias, lanes), T.broadcast(shift, lanes)
    power = T.reinterpret(typed("float32", lanes), (T.Cast(word, k) + bias) << shift)
    # Taylor terms of expm1 up to r^7: the next is below 2e-8 of r for |r| <= ln 2 / 2.
    part = splat(1 / 5040, lanes)
    for factor in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0):
        part = hold(part * r + splat(factor, lanes))
    return hold(power), hold(part * r)
