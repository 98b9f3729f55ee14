"""Device functions that several Triton templates call."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until the kernels before this one are done; without PDL they are done already."""
    if PDL:
        gdc_wait()


@triton.jit
def release_dependents(PDL: tl.constexpr):
    """Let the next kernel start its prologue; it waits for this one's end by itself."""
    if PDL:
        gdc_launch_dependents()
