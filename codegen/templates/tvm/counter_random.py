"""The sampler's random number: splitmix64 of (seed, position), in arithmetic modulo 2^64.

TVM tells LLVM that 64-bit sums and products do not overflow, signed or unsigned; so they are made
of 32-bit halves, of which no sum or product does.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from k3c.codegen.templates.tvm.vector import hold

_HALF_BITS = 32
_HALF_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNIFORM_SHIFT = 40  # 24 bits remain: exact in float32
_UNIFORM_UNIT = 2.0**-24


def uniform(seed: Any, position: Any) -> Any:
    """Return u f32 in [0, 1) of seed u64 and position i32, as `counter_uniform` does."""
    extended = T.Cast("uint64", T.Cast("int64", position))
    z = _add(_add(_multiply(seed, _constant(_GOLDEN)), extended), _constant(_GOLDEN))
    z = _multiply(z ^ (z >> T.uint64(30)), _constant(_FIRST))
    z = _multiply(z ^ (z >> T.uint64(27)), _constant(_SECOND))
    top = (z ^ (z >> T.uint64(31))) >> T.uint64(_UNIFORM_SHIFT)
    return hold(T.Cast("float32", T.Cast("int32", top)) * T.float32(_UNIFORM_UNIT))


def _constant(value: int) -> Any:
    # TIR's literals are signed 64-bit integers.
    return _joined(T.uint64(value >> _HALF_BITS), T.uint64(value & _HALF_MASK))


def _add(a: Any, b: Any) -> Any:
    low = hold(_low(a) + _low(b))
    return _joined(_high(a) + _high(b) + _high(low), low)


def _multiply(a: Any, b: Any) -> Any:
    x, y = hold(a), hold(b)
    low = hold(_low(x) * _low(y))
    cross = _low(_low(x) * _high(y)) + _low(_high(x) * _low(y))
    return _joined(_high(low) + cross, low)


def _low(value: Any) -> Any:
    return value & T.uint64(_HALF_MASK)


def _high(value: Any) -> Any:
    return value >> T.uint64(_HALF_BITS)


def _joined(high: Any, low: Any) -> Any:
    return hold((_low(high) << T.uint64(_HALF_BITS)) | _low(low))
