"""Device code of mla_absorb_q and mla_absorb_v: one small matrix product a head.

A program is a tile of rows, a head and a range of the head's columns. Weights are fetched before
the wait for the kernel that makes the rows.
"""

# Triton's own types: pyright cannot follow them through `@triton.jit`.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs


# longer than the budget: one tile from its loads to its stores.
@triton.jit
def absorb_q(
    q, w, out, rows,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, LATENT: tl.constexpr,
    NOPE_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Queries into the latent space; their shared dims are copied by a head's first program.

    Args:
        q: A[T, n * (dn + dr)].
        w: [n, dn, r].
        out: f32[T, n, r + dr].
        rows: T.
        HEADS: n.
        NOPE: dn.
        ROPE: dr.
        LATENT: r.
        NOPE_PAD: dn padded to a power of two.
        ROPE_PAD: dr padded to a power of two.
        BM: Rows of a tile.
        BN: Columns of a tile.
        PDL: Programmatic dependent launch.
    """
    CHUNKS: tl.constexpr = (LATENT + BN - 1) // BN
    F32: tl.constexpr = (q.dtype.element_ty == tl.float32) or (w.dtype.element_ty == tl.float32)
    DOT: tl.constexpr = tl.float32 if F32 else tl.bfloat16
    pid = tl.program_id(0)
    chunk = pid % CHUNKS
    head = pid // CHUNKS % HEADS
    row = pid // (CHUNKS * HEADS) * BM + tl.arange(0, BM)
    inner = tl.arange(0, NOPE_PAD)
    column = chunk * BN + tl.arange(0, BN)
    weight = tl.load(
        w + head.to(tl.int64) * (NOPE * LATENT) + inner[:, None] * LATENT + column[None, :],
        mask=(inner < NOPE)[:, None] & (column < LATENT)[None, :], other=0.0,
    )  # fmt: skip
    wait_for_inputs(PDL)
    release_dependents(PDL)
    source = q + row.to(tl.int64) * (HEADS * (NOPE + ROPE)) + head * (NOPE + ROPE)
    live = row < rows
    x = tl.load(
        source[:, None] + inner[None, :], mask=live[:, None] & (inner < NOPE)[None, :], other=0.0
    )
    value = tl.dot(x.to(DOT), weight.to(DOT), input_precision="ieee")
    place = out + (row.to(tl.int64) * HEADS + head) * (LATENT + ROPE)
    mask = live[:, None] & (column < LATENT)[None, :]
    tl.store(place[:, None] + column[None, :], value, mask=mask)
    if chunk == 0:
        shared = tl.arange(0, ROPE_PAD)
        is_rope = live[:, None] & (shared < ROPE)[None, :]
        raw = tl.load(source[:, None] + (NOPE + shared)[None, :], mask=is_rope, other=0.0)
        tl.store(place[:, None] + (LATENT + shared)[None, :], raw.to(tl.float32), mask=is_rope)


@triton.jit
def add_product(x, weight, acc, F32: tl.constexpr):
    """Return acc + x @ weight for f32 x: with bf16 weights as the product of two halves of x."""
    if F32:
        return tl.dot(x, weight.to(tl.float32), acc, input_precision="ieee")
    high = x.to(tl.bfloat16)
    low = (x - high.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(low, weight, tl.dot(high, weight, acc))


# longer than the budget: one tile from its loads to its stores.
@triton.jit
def absorb_v(
    o_lat, w, z, out, rows,
    HEADS: tl.constexpr, LATENT: tl.constexpr, VALUE: tl.constexpr, LATENT_PAD: tl.constexpr,
    GATED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Values out of the latent space, times sigmoid(z) where GATED.

    Args:
        o_lat: f32[T, n, r].
        w: [n, dv, r].
        z: A[T, n * dv]; where GATED.
        out: A[T, n * dv].
        rows: T.
        HEADS: n.
        LATENT: r.
        VALUE: dv.
        LATENT_PAD: r padded to a multiple of BK.
        GATED: Whether there is a gate.
        BM: Rows of a tile.
        BN: Columns of a tile.
        BK: Terms of a sum at a time; all at once: the weights are fetched before the wait.
        PDL: Programmatic dependent launch.
    """
    CHUNKS: tl.constexpr = (VALUE + BN - 1) // BN
    F32: tl.constexpr = w.dtype.element_ty == tl.float32
    pid = tl.program_id(0)
    head = pid // CHUNKS % HEADS
    row = pid // (CHUNKS * HEADS) * BM + tl.arange(0, BM)
    column = pid % CHUNKS * BN + tl.arange(0, BN)
    live = row < rows
    inner = tl.arange(0, BK)
    weights = w + (head.to(tl.int64) * VALUE + column) * LATENT
    has_column = column < VALUE
    source = o_lat + (row.to(tl.int64) * HEADS + head) * LATENT
    acc = tl.zeros([BM, BN], tl.float32)
    if BK == LATENT_PAD:
        has_inner = inner < LATENT
        weight = tl.load(
            weights[None, :] + inner[:, None], mask=has_inner[:, None] & has_column[None, :],
            other=0.0,
        )  # fmt: skip
        wait_for_inputs(PDL)
        release_dependents(PDL)
        x = tl.load(
            source[:, None] + inner[None, :], mask=live[:, None] & has_inner[None, :], other=0.0
        )
        acc = add_product(x, weight, acc, F32)
    else:
        wait_for_inputs(PDL)
        release_dependents(PDL)
        for first in tl.range(0, LATENT_PAD, BK):
            k = first + inner
            mask = (k < LATENT)[:, None] & has_column[None, :]
            weight = tl.load(weights[None, :] + k[:, None], mask=mask, other=0.0)
            mask = live[:, None] & (k < LATENT)[None, :]
            x = tl.load(source[:, None] + k[None, :], mask=mask, other=0.0)
            acc = add_product(x, weight, acc, F32)
    kind = out.dtype.element_ty
    at = row.to(tl.int64)[:, None] * (HEADS * VALUE) + (head * VALUE + column)[None, :]
    mask = live[:, None] & has_column[None, :]
    if GATED:
        gate = tl.load(z + at, mask=mask, other=0.0).to(tl.float32)
        gate = tl.sigmoid(gate).to(kind).to(tl.float32)
        acc = acc.to(kind).to(tl.float32) * gate
    tl.store(out + at, acc.to(kind), mask=mask)
