"""Device functions that the kernels of `linear` share: row statistics, prefetch, epilogue."""

# Triton's own types: pyright cannot follow them through `@triton.jit`.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Return tanh of f32; a polynomial near 0, where the quotient would cancel."""
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    # exp overflows to infinity and the quotient becomes 0, which is right.
    far = 1 - 2 / (tl.exp(2 * tl.abs(x)) + 1)
    return tl.where(square < 0.04, near, tl.where(x < 0, -far, far))


@triton.jit
def situ(gate, up, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """Return beta tanh(gate / beta) sigmoid(gate) times up, capped where LINEAR_BETA is not 0."""
    if LINEAR_BETA != 0:
        up = LINEAR_BETA * tanh(up / LINEAR_BETA)
    return BETA * tanh(gate / BETA) * (1 / (1 + tl.exp(-gate))) * up


@triton.jit
def row_scale(x, row, live, inner, K: tl.constexpr, EPS: tl.constexpr, CHUNK: tl.constexpr):
    """Return f32[rows] 1 / sqrt(mean(x^2) + eps) of rows `row` i64 of x A[., K]; live: which are.

    Args:
        x: Pointer to x.
        row: Rows of x.
        live: Which of them exist; the others are not read.
        inner: Columns; known at run time only, so that the loop stays a loop.
        K: Columns.
        EPS: Epsilon.
        CHUNK: Columns read at a time, a power of two.
    """
    column = tl.arange(0, CHUNK)
    total = tl.zeros((row.shape[0], CHUNK), tl.float32)
    for first in tl.range(0, inner, CHUNK, num_stages=3):
        inside = live[:, None] & (first + column < K)[None, :]
        at = x + row[:, None] * K + (first + column)[None, :]
        part = tl.load(at, mask=inside, other=0).to(tl.float32)
        total += part * part
    return tl.rsqrt(tl.sum(total, 1) / K + EPS)


@triton.jit
def prefetch(at, nbytes):
    """Ask for `nbytes` i32 behind each pointer of `at` in the second-level cache; NVIDIA only.

    Addresses and sizes are multiples of 16 bytes.
    """
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [at.to(tl.int64), nbytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


# longer than the budget: the results of one tile differ in columns alone, and share its masks.
@triton.jit
def store_tile(
    product, y0, y1, y2, y3, y4, y5, y6, y7, addend, row, rows, first,
    STARTS: tl.constexpr, WIDTHS: tl.constexpr, SITU: tl.constexpr, GROUPS: tl.constexpr,
    PLACES: tl.constexpr, SIZES: tl.constexpr, MULTIPLES: tl.constexpr,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, ADDEND: tl.constexpr,
):  # fmt: skip
    """Give a tile of the product to the results whose columns it holds.

    Args:
        product: f32[rows of the tile, columns of the tile].
        y0: Pointers to the results; 0 for those that the node does not have.
        addend: Pointer to the addend.
        row: i64 rows of the tile.
        rows: Number of rows.
        first: First column of the tile, even.
        STARTS: First column of each result.
        WIDTHS: Width of each result.
        SITU: Whether a result is SiTU of pairs of columns.
        GROUPS: For each result, the first one of its dtype and epilogue: they share code.
        PLACES: Place of a result in its group.
        SIZES: Results in a result's group.
        MULTIPLES: A power of two that divides the widths of a result's group.
        BETA: Gate cap of SiTU.
        LINEAR_BETA: Up cap of SiTU; 0: none.
        ADDEND: Whether there is an addend.
    """
    ys = (y0, y1, y2, y3, y4, y5, y6, y7)
    for lead in tl.static_range(len(WIDTHS)):
        if GROUPS[lead] == lead and SIZES[lead] == 1:
            _store_range(
                product, ys[lead], addend, row, rows, first, STARTS[lead], WIDTHS[lead],
                SITU[lead], BETA, LINEAR_BETA, ADDEND,
            )  # fmt: skip
        elif GROUPS[lead] == lead:
            # A loop over the group keeps its code short: it is cold at each launch.
            for place in tl.range(SIZES[lead]):
                y, start, width = ys[lead], STARTS[lead], WIDTHS[lead]
                for i in tl.static_range(lead + 1, len(WIDTHS)):
                    if GROUPS[i] == lead:
                        chosen = place == PLACES[i]
                        y = tl.where(chosen, ys[i], y)
                        start = tl.where(chosen, STARTS[i], start)
                        width = tl.where(chosen, WIDTHS[i], width)
                _store_range(
                    product, y, addend, row, rows, first,
                    tl.multiple_of(start, 16), tl.multiple_of(width, MULTIPLES[lead]),
                    SITU[lead], BETA, LINEAR_BETA, ADDEND,
                )  # fmt: skip


@triton.jit
def _store_range(
    product, y, addend, row, rows, first, start, width, SITU: tl.constexpr,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, ADDEND: tl.constexpr,
):  # fmt: skip
    """Store the part of a tile that lies in the result of `width` that begins at column `start`."""
    wide: tl.constexpr = product.shape[1]
    dtype: tl.constexpr = y.dtype.element_ty
    if (first + wide > start) & (first < start + width * (1 + SITU)):
        if SITU:
            column = (first - start) // 2 + tl.arange(0, wide // 2)
            gate, up = tl.split(tl.reshape(product, (product.shape[0], wide // 2, 2)))
            gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
            value = situ(gate, up, BETA, LINEAR_BETA).to(dtype)
        else:
            column = first - start + tl.arange(0, wide)
            value = product.to(dtype)
        inside = (row < rows)[:, None] & ((column >= 0) & (column < width))[None, :]
        at = row[:, None] * width + column[None, :]
        if ADDEND:
            other = tl.load(addend + at, mask=inside, other=0).to(tl.float32)
            value = (value.to(tl.float32) + other).to(dtype)
        tl.store(y + at, value, mask=inside)
