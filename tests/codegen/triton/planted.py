"""Kernels with faults planted: offsets of 32 bits, as the tests of the overflow check need them."""

# Constexprs are capitals, as in the templates.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_by_width(x, y, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a block of every row: the row's offset is a 32-bit product."""
    row = tl.program_id(0)
    at = row * WIDTH + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=row < rows, other=0.0), mask=row < rows)


@triton.jit
def rows_by_width_64(x, y, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The same with a 64-bit row."""
    row = tl.program_id(0).to(tl.int64)
    at = row * WIDTH + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=row < rows, other=0.0), mask=row < rows)


@triton.jit
def rows_by_stride(x, y, rows, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy out of a view: the stride is an argument, and larger than the width."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    taken = tl.load(x + row * stride + column, mask=row < rows, other=0.0)
    tl.store(y + row.to(tl.int64) * WIDTH + column, taken, mask=row < rows)


@triton.jit
def loaded_starts(x, starts, y, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the first row of every segment: what is multiplied was loaded."""
    at = tl.load(starts + tl.program_id(0)) * WIDTH + tl.arange(0, BLOCK)
    tl.store(y + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.load(x + at))


@triton.jit
def rows_in_a_loop(x, y, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the first block of all rows: the loop's variable is multiplied, under a branch."""
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(0, rows):
        if row % 2 == 0:
            total += tl.load(x + row * WIDTH + tl.arange(0, BLOCK))
    tl.store(y + tl.arange(0, BLOCK), total)
