"""The kernel of `grouped_gemm`: MXFP4 weights decoded in registers, for decode and for prefill.

The weights are the left operand of the product, so that what a thread decodes is what it
multiplies; rows of x, gathered through `order`, are the columns of the right operand. The blocks
of the grid share out the items: (expert, tile of its rows of x, block of weight rows).
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs
from k3c.codegen.templates.triton.mxfp4_gpu_decode import TOO_LARGE, decode_words
from k3c.codegen.templates.triton.prefetch import LINE_BYTES, into_l2
from k3c.codegen.templates.triton.situ import situ

# Rows and columns of a tile of the weight layout, and what it takes of u32 codes and scales.
TILE = tl.constexpr(16)
CHUNK = tl.constexpr(128)
TILE_CODES = tl.constexpr(256)
TILE_SCALES = tl.constexpr(16)


# longer than the budget: the persistent loop and what it carries from item to item stand together.
@triton.jit
def grouped_gemm(
    x, weight, offsets, order, out,
    E: tl.constexpr, E_PADDED: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    CHOICES: tl.constexpr, PER_CHOICE: tl.constexpr, SITU: tl.constexpr, BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr, BLOCK: tl.constexpr, SLICES: tl.constexpr, CHUNKS: tl.constexpr,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, WARPS: tl.constexpr, NVIDIA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write out A[rows, WIDTH], row order[i] of x times the matrix of its expert.

    Args:
        x: A[T, K], or A[T, CHOICES, K] where PER_CHOICE.
        weight: The matrices in layout `mxfp4_gpu`.
        offsets: i32[E + 1].
        order: i32[rows].
        out: A[rows, WIDTH].
        E: Experts.
        E_PADDED: The power of two from E on.
        K: Columns.
        WIDTH: Results a row.
        CHOICES: Experts a token.
        PER_CHOICE: Whether x has a row for each choice.
        SITU: 1: tiles hold gate and up rows, and the result is their SiTU.
        BETA: Gate cap.
        LINEAR_BETA: Up cap; 0: none.
        BLOCK: Weight rows of a product, a multiple of 16 * WARPS.
        SLICES: Parts of K that a product works on at once, on BLOCK / SLICES weight rows.
        CHUNKS: Chunks of 128 columns a step.
        TOKENS: Rows of x a tile, ascending; a tile takes the smallest that fits.
        GROUP: Tiles of x that share a block of weight rows in turn.
        WARPS: Warps of a block of the grid.
        NVIDIA: Whether the device is NVIDIA's.
        PDL: Whether to wait for the kernels before this one.
    """
    # Rows of each choice come from a grouped product with the same offsets, which releases its
    # dependents after its own wait: when this kernel starts, offsets and order are there, x is not.
    EARLY: tl.constexpr = PDL and PER_CHOICE
    if not EARLY:
        wait_for_inputs(PDL)
        release_dependents(PDL)
    OWN: tl.constexpr = BLOCK // SLICES
    BLOCKS: tl.constexpr = (WIDTH * (1 + SITU) + OWN - 1) // OWN
    WIDEST: tl.constexpr = TOKENS[len(TOKENS) - 1]
    index = tl.arange(0, E_PADDED)
    low = tl.load(offsets + index, mask=index < E, other=0)
    high = tl.load(offsets + index + 1, mask=index < E, other=0)
    ends = tl.cumsum((high - low + (WIDEST - 1)) // WIDEST, 0) * BLOCKS
    items = tl.max(ends, 0)
    if EARLY:
        if tl.program_id(0) < items:
            expert, _, _, block = _find(offsets, ends, tl.program_id(0), WIDEST, BLOCKS, GROUP)
            _prefetch(weight, expert, block, K, WIDTH * (1 + SITU), OWN)
        wait_for_inputs(PDL)
        release_dependents(PDL)
    # In f32, where speed does not count, there is one way to decode.
    FAST: tl.constexpr = NVIDIA and x.dtype.element_ty == tl.bfloat16
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        expert, begin, count, block = _find(offsets, ends, item, WIDEST, BLOCKS, GROUP)
        bad = True
        for i in tl.static_range(len(TOKENS)):
            if (count <= TOKENS[i]) & (count > (TOKENS[i - 1] if i > 0 else 0)):
                bad = _tile(
                    x, weight, order + begin, out, expert, block, count,
                    E, K, WIDTH, CHOICES, PER_CHOICE, SITU, BETA, LINEAR_BETA,
                    BLOCK, SLICES, CHUNKS, TOKENS[i], WARPS, FAST, NVIDIA,
                )  # fmt: skip
        # Nested, so that without FAST the second does not exist.
        if FAST:  # noqa: SIM102
            if bad:
                _tile(
                    x, weight, order + begin, out, expert, block, count,
                    E, K, WIDTH, CHOICES, PER_CHOICE, SITU, BETA, LINEAR_BETA,
                    BLOCK, SLICES, CHUNKS, WIDEST, WARPS, False, NVIDIA,
                )  # fmt: skip


@triton.jit
def _find(offsets, ends, item, WIDEST: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr):
    """Return what an item is: expert, place of its first row in `order`, rows, weight block.

    GROUP tiles of x at a time pass over all weight rows, so that both stay in the cache.

    Args:
        offsets: i32[E + 1].
        ends: i32[experts], the first item past those of each expert.
        item: Number of the item.
        WIDEST: Rows of a tile of x.
        BLOCKS: Blocks of weight rows.
        GROUP: Tiles of a group.
    """
    done = ends <= item
    expert = tl.sum(done.to(tl.int32), 0)
    inside = item - tl.max(tl.where(done, ends, 0), 0)
    start = tl.load(offsets + expert)
    rows = tl.load(offsets + expert + 1) - start
    first = inside // (GROUP * BLOCKS) * GROUP
    size = tl.minimum((rows + (WIDEST - 1)) // WIDEST - first, GROUP)
    inside -= first * BLOCKS
    begin = (first + inside % size) * WIDEST
    return expert, start + begin, tl.minimum(rows - begin, WIDEST), inside // size


@triton.jit
def _prefetch(weight, expert, block, K: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr):
    """Ask for the codes that a block of OWN weight rows meets first, 32 KiB at most."""
    LINES: tl.constexpr = 256
    A_CHUNK: tl.constexpr = TILE_CODES * 4 // LINE_BYTES
    TILES: tl.constexpr = (ROWS + TILE - 1) // TILE
    ACROSS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    EACH: tl.constexpr = LINES // (OWN // TILE)
    line = tl.arange(0, LINES)
    tile = tl.minimum(block * (OWN // TILE) + line // EACH, TILES - 1)
    chunk = tl.minimum(line % EACH // A_CHUNK, ACROSS - 1)
    place = (expert.to(tl.int64) * TILES + tile) * ACROSS + chunk
    into_l2(weight + place * (TILE_CODES * 4) + line % A_CHUNK * LINE_BYTES, True)


# Longer than a function may be elsewhere: the addresses of all operands.
# longer than the budget: one item from its rows to its results shares all of its masks.
@triton.jit
def _tile(
    x, weight, order, out, expert, block, count,
    E: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, CHOICES: tl.constexpr,
    PER_CHOICE: tl.constexpr, SITU: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
    BLOCK: tl.constexpr, SLICES: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr,
    WARPS: tl.constexpr, FAST: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """Multiply a block of an expert's weight rows with `count` rows of x, at most TOKENS.

    With SLICES > 1 the left operand is the same weight rows over several parts of K, which keeps
    all warps busy on few weight rows. Column (slice, token) of the right operand is that slice of
    the token, so the diagonal blocks of the product are the sums of the slices.

    Returns:
        Whether a scale was too large for FAST: nothing is written then.
    """
    TILES: tl.constexpr = (WIDTH * (1 + SITU) + TILE - 1) // TILE
    ACROSS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    STEPS: tl.constexpr = (ACROSS + SLICES * CHUNKS - 1) // (SLICES * CHUNKS)
    OWN: tl.constexpr = BLOCK // (TILE * SLICES)
    # Row r of what is loaded, (repeat, half, warp, row of 8), is row (repeat, warp, half, row of 8)
    # of the product: a thread of a matrix unit holds two rows eight apart.
    r = tl.arange(0, BLOCK)
    tile = r // (TILE * WARPS) * WARPS + r // 8 % WARPS
    within = r // (8 * WARPS) % 2 * 8 + r % 8
    source = tl.minimum(block * OWN + tile % OWN, TILES - 1)
    chunk = tl.arange(0, CHUNKS)[:, None] + (tile // OWN * (STEPS * CHUNKS))[None, :]
    tile_at = chunk + (source * ACROSS)[None, :]
    base = expert.to(tl.int64) * (TILES * ACROSS)
    words = weight.to(tl.pointer_type(tl.uint32))
    codes = words + base * TILE_CODES
    # A row's words are one dimension: with two, shared memory would take the words of all rows
    # before the next lane's, and one copy of a warp would become four of half a sector.
    code_at = (tile_at * TILE_CODES + (within * 16)[None, :])[:, :, None] + tl.arange(0, 16)
    scales = words + E * TILES * ACROSS * TILE_CODES + base * TILE_SCALES
    scale_at = tile_at * TILE_SCALES + within[None, :]
    column = tl.arange(0, SLICES * TOKENS)
    real = column % TOKENS < count
    flat = tl.load(order + column % TOKENS, mask=real, other=0)
    row = (flat if PER_CHOICE else flat // CHOICES).to(tl.int64)
    k = tl.arange(0, CHUNKS * CHUNK)[:, None] + (column // TOKENS * (STEPS * CHUNKS * CHUNK))[None]
    total, seen = _product(
        codes + code_at, scales + scale_at, x + (row[None, :] * K + k), chunk, k, real[None, :],
        K, STEPS, SLICES, TOKENS, WARPS, FAST, NVIDIA,
    )  # fmt: skip
    large = tl.max(tl.max(((seen & TOO_LARGE) != 0).to(tl.int32), 1), 0)
    bad = large != 0 if FAST else False
    if not bad:
        summed = _sum_of_slices(total, SLICES, TOKENS)
        _store(summed, order, out, block, count, WIDTH, SITU, BETA, LINEAR_BETA, NVIDIA)
    return bad


# longer than the budget: the pipelined loop over K, fast and exact, differs in one flag.
@triton.jit
def _product(
    codes, scales, x, chunk, k, real,
    K: tl.constexpr, STEPS: tl.constexpr, SLICES: tl.constexpr, TOKENS: tl.constexpr,
    WARPS: tl.constexpr, FAST: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """Return f32[BLOCK, SLICES * TOKENS], the product over K, and all scales or-ed where FAST.

    Args:
        codes: Pointers u32[CHUNKS, BLOCK, 16] of the first step.
        scales: Pointers u32[CHUNKS, BLOCK] of the first step.
        x: Pointers A[CHUNKS * 128, SLICES * TOKENS] of the first step.
        chunk: Chunk of K, i32[CHUNKS, BLOCK].
        k: Column of x, i32[CHUNKS * 128, SLICES * TOKENS].
        real: Which columns are rows of x.
        K: Columns.
        STEPS: Steps of CHUNKS chunks in each slice.
        SLICES: Slices of K.
        TOKENS: Rows of x.
        WARPS: Warps of a block of the grid.
        FAST: Whether to take all scales for at most 128.
        NVIDIA: Whether the device is NVIDIA's.
    """
    CHUNKS: tl.constexpr = codes.shape[0]
    BLOCK: tl.constexpr = codes.shape[1]
    REPEATS: tl.constexpr = BLOCK // (TILE * WARPS)
    ACROSS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    total = tl.zeros((BLOCK, SLICES * TOKENS), tl.float32)
    seen = tl.zeros((CHUNKS, BLOCK), tl.uint32)
    for step in range(STEPS):
        if K == STEPS * SLICES * CHUNKS * CHUNK:
            words = tl.load(codes + step * (CHUNKS * TILE_CODES))
            scale = tl.load(scales + step * (CHUNKS * TILE_SCALES))
            right = tl.load(x + step * (CHUNKS * CHUNK), mask=real, other=0)
        else:
            here = chunk + step * CHUNKS
            live = here < ACROSS
            at = codes + step * (CHUNKS * TILE_CODES)
            words = tl.load(at, mask=live[:, :, None], other=0)
            scale = tl.load(scales + step * (CHUNKS * TILE_SCALES), mask=live, other=0)
            scale = _without_padding(scale, K // 32 - here * 4)
            inside = real & (k + step * (CHUNKS * CHUNK) < K)
            right = tl.load(x + step * (CHUNKS * CHUNK), mask=inside, other=0)
        if FAST:
            seen |= scale
        words = tl.reshape(words, (CHUNKS, BLOCK, 4, 4))
        weights = decode_words(words, scale, right.dtype, FAST, NVIDIA)
        weights = tl.reshape(weights, (CHUNKS, REPEATS, 2, WARPS, 8, 4, 2, 2, 2, 2, 2))
        weights = tl.permute(weights, (1, 3, 2, 4, 0, 6, 10, 9, 8, 5, 7))
        weights = tl.reshape(weights, (BLOCK, CHUNKS * CHUNK))
        total = tl.dot(weights, right, total, input_precision="ieee")
    return total, seen


@triton.jit
def _without_padding(scale, blocks):
    """Return the u32 scales of four words with those past the first `blocks` set to 0.

    Padding may hold anything, NaN too; with scale 0 it is finite, and zero once times x.
    """
    keep = tl.where(blocks > 0, 0xFF, 0).to(tl.uint32) | tl.where(blocks > 2, 0xFF00, 0)
    keep |= tl.where(blocks > 1, 0xFF0000, 0) | (tl.where(blocks > 3, 0xFF, 0).to(tl.uint32) << 24)
    return scale & keep


@triton.jit
def _sum_of_slices(total, SLICES: tl.constexpr, TOKENS: tl.constexpr):
    """Return f32[weight rows, TOKENS]: the diagonal blocks of a product, added up."""
    if SLICES == 1:
        return total
    else:
        parts = tl.reshape(total, (SLICES, total.shape[0] // SLICES, SLICES, TOKENS))
        part = tl.arange(0, SLICES)
        same = (part[:, None] == part[None, :])[:, None, :, None]
        return tl.sum(tl.sum(tl.where(same, parts, 0.0), 2), 0)


@triton.jit
def _store(
    total, order, out, block, count,
    WIDTH: tl.constexpr, SITU: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
    NVIDIA: tl.constexpr,
):  # fmt: skip
    """Write the results of a product f32[weight rows, tokens] to the flat rows `order`."""
    dtype: tl.constexpr = out.dtype.element_ty
    TOKENS: tl.constexpr = total.shape[1]
    OUTPUTS: tl.constexpr = total.shape[0] // (1 + SITU)
    if SITU:
        pairs = tl.reshape(total.to(dtype), (OUTPUTS // 8, 2, 8, TOKENS))
        gate, up = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
        value = situ(gate.to(tl.float32), up.to(tl.float32), BETA, LINEAR_BETA, NVIDIA)
        total = tl.reshape(value, (OUTPUTS, TOKENS))
    place = block * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.arange(0, TOKENS)
    flat = tl.load(order + token, mask=token < count, other=0).to(tl.int64)
    inside = (token < count)[None, :] & (place < WIDTH)[:, None]
    tl.store(out + flat[None, :] * WIDTH + place[:, None], total.to(dtype), mask=inside)
