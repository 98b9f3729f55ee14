"""A device function that brings memory nearer before it is asked for."""

from __future__ import annotations

import triton
import triton.language as tl

LINE_BYTES = tl.constexpr(128)


@triton.jit
def into_l2(addresses, PDL: tl.constexpr):
    """Start to bring the lines that hold `addresses` (pointers) into the L2 cache.

    Only where programmatic launch is on: the instruction is of the same devices. Elsewhere nothing
    happens, and nothing depends on it.
    """
    if PDL:
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [addresses], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
