"""The kernels of `linear` for up to 16 rows: every weight is read once, in one pass over memory.

A block owns a few columns of the product and all of K. Its warps split K: each multiplies its own
slice with the tensor core and the sums are added, in order, at the end. So a block needs few
columns, there are enough blocks for every multiprocessor, and no second kernel is needed.
"""

# Triton's own types: pyright cannot follow them through `@triton.jit`.
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs
from k3c.codegen.templates.triton.linear_parts import prefetch, row_scale, store_tile


# One loop with its prologue and epilogue: split, it would only pass its constants on.
# longer than the budget: prefetch, wait, loop and ordered sum show the order of memory traffic.
@triton.jit
def linear_decode(
    x, norm, w, addend, y0, y1, y2, y3, y4, y5, y6, y7, workspace, rows, inner,
    K: tl.constexpr, COLUMNS: tl.constexpr,
    STARTS: tl.constexpr, WIDTHS: tl.constexpr, SITU: tl.constexpr,
    GROUPS: tl.constexpr, PLACES: tl.constexpr, SIZES: tl.constexpr, MULTIPLES: tl.constexpr,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, EPS: tl.constexpr,
    NORM: tl.constexpr, NORM_CHUNK: tl.constexpr, ADDEND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply rows of x A[rows, K] with w [COLUMNS, K]; one block: BLOCK_N columns, K / SPLIT.

    Args:
        x: A[rows, K].
        norm: f32[K], weight of the norm of x; only with NORM.
        w: The packed weight.
        addend: A[rows, N]; only with ADDEND.
        y0: Results, one for each of WIDTHS.
        workspace: f32[SPLIT, rows, COLUMNS]; where SPLIT > 1; then no result is written.
        rows: At most BLOCK_M.
        inner: K again: a bound known only at run time keeps the loop from being unrolled, and
            cold code is as slow to fetch as cold weights.
        K: Columns of x.
        COLUMNS: Rows of w.
        STARTS: As `store_tile`, like the constants up to LINEAR_BETA.
        EPS: Epsilon of the norm.
        NORM: Whether x is normalised first.
        NORM_CHUNK: Columns of x that the norm reads at a time.
        ADDEND: Whether there is an addend.
        BLOCK_M: Rows of the tile.
        BLOCK_N: Columns of a block.
        BLOCK_K: Elements of K that a warp takes at a time.
        SLICES: Warps; a step takes SLICES * BLOCK_K elements of K.
        SPLIT: Blocks that share the K of one tile.
        STAGES: Depth of the software pipeline.
        PREFETCH: Bytes of weights asked for before the inputs are ready; 0 where SPLIT > 1.
        PDL: Whether the kernel waits for its predecessor itself.
    """
    step: tl.constexpr = SLICES * BLOCK_K
    per_part: tl.constexpr = (K + step * SPLIT - 1) // (step * SPLIT) * step
    even: tl.constexpr = per_part * SPLIT == K
    # The next kernel may come as soon as all blocks of this one run: it has weights to ask for.
    release_dependents(PDL)
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    if PDL and PREFETCH > 0:
        threads: tl.constexpr = SLICES * 32
        piece: tl.constexpr = PREFETCH // threads
        first_byte = (w + tile * BLOCK_N * K).to(tl.pointer_type(tl.uint8), bitcast=True)
        pieces = first_byte + tl.arange(0, threads) * piece
        prefetch(pieces, tl.full((threads,), piece, tl.int32))
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    live = row < rows
    at_k = tl.arange(0, SLICES)[:, None, None] * BLOCK_K
    w_k = at_k + tl.arange(0, BLOCK_K)[None, None, :]
    x_k = at_k + tl.arange(0, BLOCK_K)[None, :, None]
    w_at = w + column[None, :, None] * K + w_k
    x_at = x + row[None, None, :] * K + x_k
    wait_for_inputs(PDL)
    if NORM:
        scale = row_scale(x, row.to(tl.int64), live, inner, K, EPS, NORM_CHUNK)
    sums = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
    first = part * per_part
    for k in tl.range(first, tl.minimum(first + per_part, inner), step, num_stages=STAGES):
        w_mask = (column < COLUMNS)[None, :, None]
        x_mask = live[None, None, :]
        if not even:
            w_mask = w_mask & (k + w_k < K)
            x_mask = x_mask & (k + x_k < K)
        if even and COLUMNS % BLOCK_N == 0:
            weights = tl.load(w_at + k)
        else:
            weights = tl.load(w_at + k, mask=w_mask, other=0)
        values = tl.load(x_at + k, mask=x_mask, other=0)
        if NORM:
            factor = tl.load(norm + k + x_k, mask=k + x_k < K, other=0)
            normed = values.to(tl.float32) * scale[None, None, :] * factor
            values = normed.to(x.dtype.element_ty)
        if x.dtype.element_ty == tl.float32 or w.dtype.element_ty == tl.float32:
            sums = tl.dot(
                weights.to(tl.float32), values.to(tl.float32), sums, input_precision="ieee"
            )
        else:
            sums = tl.dot(weights, values, sums)
    product = tl.trans(tl.sum(sums, 0))
    if SPLIT > 1:
        at = workspace + (part * rows + row)[:, None] * COLUMNS + column[None, :]
        tl.store(at, product, mask=live[:, None] & (column < COLUMNS)[None, :])
    else:
        store_tile(
            product, y0, y1, y2, y3, y4, y5, y6, y7, addend, row.to(tl.int64), rows,
            tile * BLOCK_N, STARTS, WIDTHS, SITU, GROUPS, PLACES, SIZES, MULTIPLES,
            BETA, LINEAR_BETA, ADDEND,
        )  # fmt: skip
