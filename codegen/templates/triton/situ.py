"""SiTU in registers with one reciprocal and one exponential a result."""

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.mxfp4_gpu_decode import ASSEMBLY

_LOG2_E = tl.constexpr(1.4426950408889634)


# tanh(x) is x P(x^2) / Q(x^2) within 7e-7 of itself for |x| <= 9; beyond, it is 1 in f32. Fitted
# for the largest relative error; lowest coefficient first.
_LIMIT = tl.constexpr(9.0)
_P = tl.constexpr((0.99999964, 0.12835369, 0.0028551345, 1.0424347e-05))
_Q = tl.constexpr((1.0, 0.46168417, 0.023420151, 0.00022529202, 2.1457357e-07))


@triton.jit
def situ(gate, up, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, NVIDIA: tl.constexpr):
    """Return beta tanh(gate / beta) sigmoid(gate) times up, capped where LINEAR_BETA is not 0."""
    over, under = _tanh(gate * (1 / BETA))
    # Infinite for a gate far below zero, where the result is 0.
    under *= 1 + _exp2(gate * -_LOG2_E, NVIDIA)
    if LINEAR_BETA != 0:
        over_up, under_up = _tanh(up * (1 / LINEAR_BETA))
        over *= over_up * LINEAR_BETA
        under *= under_up
    else:
        over *= up
    return BETA * over * _inverse(under, NVIDIA)


@triton.jit
def _tanh(x):
    """Return tanh of f32 as a quotient; NaN stays NaN."""
    x = tl.maximum(x, -_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, _LIMIT, propagate_nan=tl.PropagateNan.ALL)
    square = x * x
    over = ((_P[3] * square + _P[2]) * square + _P[1]) * square + _P[0]
    under = (((_Q[4] * square + _Q[3]) * square + _Q[2]) * square + _Q[1]) * square + _Q[0]
    return x * over, under


@triton.jit
def _exp2(x, NVIDIA: tl.constexpr):
    """Return 2^x of f32; on NVIDIA without the steps that keep subnormal results."""
    if NVIDIA and ASSEMBLY:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def _inverse(x, NVIDIA: tl.constexpr):
    """Return 1 / x of f32 x >= 1."""
    if NVIDIA and ASSEMBLY:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1 / x
