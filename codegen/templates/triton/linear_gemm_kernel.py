"""The kernels of `linear` for many rows: tiles of a matrix product, and the stages around it."""

# Triton's own types: pyright cannot follow them through `@triton.jit`.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs
from k3c.codegen.templates.triton.linear_parts import prefetch, row_scale, store_tile


@triton.jit
def workspace_floats(x, rows, K: tl.constexpr):
    """Return the f32 words that `rows` normalised rows like those of x take, a multiple of 16."""
    words = rows.to(tl.int64) * K
    if x.dtype.element_ty == tl.bfloat16:
        words = (words + 1) // 2
    return (words + 15) // 16 * 16


@triton.jit
def linear_norm(
    x, norm, w, addend, y0, y1, y2, y3, y4, y5, y6, y7, workspace, rows, inner,
    K: tl.constexpr, EPS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the normalised rows of x A[rows, K] to the workspace; one block a row."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    A: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) + tl.zeros((1,), tl.int64)
    scale = row_scale(x, row, row < rows, inner, K, EPS, CHUNK)
    out = workspace.to(tl.pointer_type(A), bitcast=True)
    for first in tl.range(0, inner, CHUNK):
        column = first + tl.arange(0, CHUNK)[None, :]
        at = row[:, None] * K + column
        values = tl.load(x + at, mask=column < K, other=0).to(tl.float32)
        factor = tl.load(norm + column, mask=column < K, other=0)
        tl.store(out + at, (values * scale[:, None] * factor).to(A), mask=column < K)


# The main loop with its tile order and epilogue: split, it would only pass its constants on.
# longer than the budget: tile order, loop and epilogues share every index.
@triton.jit
def linear_gemm(
    x, norm, w, addend, y0, y1, y2, y3, y4, y5, y6, y7, workspace, rows, inner,
    K: tl.constexpr, COLUMNS: tl.constexpr,
    STARTS: tl.constexpr, WIDTHS: tl.constexpr, SITU: tl.constexpr,
    GROUPS: tl.constexpr, PLACES: tl.constexpr, SIZES: tl.constexpr, MULTIPLES: tl.constexpr,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, NORM: tl.constexpr, ADDEND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply rows of x A[rows, K] with w [COLUMNS, K]; one block: one tile, K / SPLIT.

    Args:
        x: A[rows, K].
        norm: Not read here: with NORM the workspace starts with the normalised rows.
        w: The packed weight.
        addend: A[rows, N]; only with ADDEND.
        y0: Results, one for each of WIDTHS.
        workspace: The normalised rows, then f32[SPLIT, rows, COLUMNS] where SPLIT > 1 (the results
            are not written then).
        rows: Rows of x.
        inner: K again: unknown when compiling, the loop over it stays a loop.
        K: Columns of x.
        COLUMNS: Rows of w.
        STARTS: As `store_tile`, like the constants up to LINEAR_BETA, ADDEND.
        NORM: Whether the rows come from the workspace.
        BLOCK_M: Rows of a tile.
        BLOCK_N: Columns of a tile.
        BLOCK_K: Elements of K a step.
        GROUP: Tiles down before the next tile to the right, so that both operands stay cached.
        SPLIT: Blocks that share the K of one tile.
        STAGES: Depth of the software pipeline.
        PREFETCH: Bytes of each row of weights asked for before the inputs are ready.
        PDL: Whether the kernel waits for its predecessor itself.
    """
    release_dependents(PDL)
    A: tl.constexpr = x.dtype.element_ty
    per_part: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT) * BLOCK_K
    across: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    top = tile // (GROUP * across) * GROUP
    height = tl.minimum(tl.cdiv(rows, BLOCK_M) - top, GROUP)
    within = tile % (GROUP * across)
    row = (top + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_column = within // height * BLOCK_N
    column = first_column + tl.arange(0, BLOCK_N)
    # Columns that do not exist read row 0 of the weight: what they give is not stored.
    x_row = tl.where(row < rows, row, 0).to(tl.int64)
    w_row = tl.where(column < COLUMNS, column, 0)
    source = workspace.to(tl.pointer_type(A), bitcast=True) if NORM else x
    k = tl.arange(0, BLOCK_K)
    first = part * per_part
    if PDL and PREFETCH > 0:
        left = tl.minimum(PREFETCH, (inner - first) * w.dtype.element_ty.primitive_bitwidth // 8)
        prefetch(w + w_row * K + first, left + tl.zeros((BLOCK_N,), tl.int32))
    wait_for_inputs(PDL)
    x_at = source + x_row[:, None] * K + k[None, :]
    w_at = w + w_row[None, :] * K + k[:, None]
    live = (row < rows)[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in tl.range(first, tl.minimum(first + per_part, inner), BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            weights = tl.load(w_at + at)
        else:
            weights = tl.load(w_at + at, mask=(at + k < K)[:, None], other=0)
        if K % BLOCK_K == 0 and BLOCK_M > 64:
            values = tl.load(x_at + at)
        else:
            # A tile that is mostly padding is not filled with copies of row 0: they cost as much.
            values = tl.load(x_at + at, mask=live & (at + k < K)[None, :], other=0)
        if x.dtype.element_ty == tl.float32 or w.dtype.element_ty == tl.float32:
            sums = tl.dot(
                values.to(tl.float32), weights.to(tl.float32), sums, input_precision="ieee"
            )
        else:
            sums = tl.dot(values, weights, sums)
    if SPLIT > 1:
        partial = workspace + workspace_floats(x, rows, K) if NORM else workspace
        out = partial + (part * rows + row).to(tl.int64)[:, None] * COLUMNS + column[None, :]
        tl.store(out, sums, mask=live & (column < COLUMNS)[None, :])
    else:
        store_tile(
            sums, y0, y1, y2, y3, y4, y5, y6, y7, addend, row.to(tl.int64), rows, first_column,
            STARTS, WIDTHS, SITU, GROUPS, PLACES, SIZES, MULTIPLES, BETA, LINEAR_BETA, ADDEND,
        )  # fmt: skip


@triton.jit
def linear_finish(
    x, norm, w, addend, y0, y1, y2, y3, y4, y5, y6, y7, workspace, rows, inner,
    K: tl.constexpr, COLUMNS: tl.constexpr,
    STARTS: tl.constexpr, WIDTHS: tl.constexpr, SITU: tl.constexpr,
    GROUPS: tl.constexpr, PLACES: tl.constexpr, SIZES: tl.constexpr, MULTIPLES: tl.constexpr,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, ADDEND: tl.constexpr,
    SKIP: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the parts of the product in order and give the sums to the results.

    One block: one row, BLOCK_N columns. With SKIP the parts stand behind the normalised rows.
    """
    release_dependents(PDL)
    wait_for_inputs(PDL)
    across: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    first = tl.program_id(0) % across * BLOCK_N
    row = (tl.program_id(0) // across).to(tl.int64) + tl.zeros((1,), tl.int64)
    column = first + tl.arange(0, BLOCK_N)
    partial = workspace + workspace_floats(x, rows, K) if SKIP else workspace
    at = partial + row[:, None] * COLUMNS + column[None, :]
    sums = tl.zeros((1, BLOCK_N), tl.float32)
    for part in tl.static_range(SPLIT):
        stride = rows.to(tl.int64) * COLUMNS
        sums += tl.load(at + part * stride, mask=(column < COLUMNS)[None, :], other=0)
    store_tile(
        sums, y0, y1, y2, y3, y4, y5, y6, y7, addend, row, rows, first,
        STARTS, WIDTHS, SITU, GROUPS, PLACES, SIZES, MULTIPLES, BETA, LINEAR_BETA, ADDEND,
    )  # fmt: skip
