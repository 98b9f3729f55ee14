"""SiTU in registers with one division and three exponentials a result."""

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.mxfp4_gpu_decode import ASSEMBLY

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def situ(gate, up, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, NVIDIA: tl.constexpr):
    """Return beta tanh(gate / beta) sigmoid(gate) times up, capped where LINEAR_BETA is not 0."""
    over, under = _tanh(gate * (1 / BETA), NVIDIA)
    # The sigmoid as a quotient whose exponential is at most 1.
    small = _exp2(tl.abs(gate) * -_LOG2_E, NVIDIA)
    over *= tl.where(gate < 0, small, 1.0)
    under *= 1 + small
    if LINEAR_BETA != 0:
        over_up, under_up = _tanh(up * (1 / LINEAR_BETA), NVIDIA)
        over *= over_up * LINEAR_BETA
        under *= under_up
    else:
        over *= up
    return BETA * over * _inverse(under, NVIDIA)


@triton.jit
def _tanh(x, NVIDIA: tl.constexpr):
    """Return tanh of f32 as a quotient; a polynomial near 0, where the other would cancel."""
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    small = _exp2(tl.abs(x) * (-2 * _LOG2_E), NVIDIA)
    far = tl.where(x < 0, small - 1, 1 - small)
    is_near = square < 0.04
    return tl.where(is_near, near, far), tl.where(is_near, 1.0, 1 + small)


@triton.jit
def _exp2(x, NVIDIA: tl.constexpr):
    """Return 2^x of f32 x <= 0; on NVIDIA without the steps that keep subnormal results."""
    if NVIDIA and ASSEMBLY:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def _inverse(x, NVIDIA: tl.constexpr):
    """Return 1 / x of f32 x in [1, 8]."""
    if NVIDIA and ASSEMBLY:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1 / x
