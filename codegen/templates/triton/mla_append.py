"""mla_append: write this step's rows to the paged cache, the latent part normalised.

A program is a row; rows that no segment owns write nothing.
"""

# Triton's own types: pyright cannot follow them through `@triton.jit`.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import triton
import triton.language as tl

from k3c.codegen.template import refuse_dtype
from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs
from k3c.codegen.templates.triton.segments import owner_of
from k3c.codegen.triton_template import TritonTemplate
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Cost, Scalar, Stage
from k3c.targets.target import Target

_CACHE = 2
_INTEGERS = (3, 4, 5, 6)
_PAGE_TABLE = 6
_FLOAT8 = "f8e4m3"
# A square and its addition, then two multiplications.
_FLOPS_PER_ELEMENT = 4
# Largest value of float8 e4m3; what is larger saturates, as the reference says.
FLOAT8_LIMIT = tl.constexpr(448.0)


@triton.jit
def to_cache(value, FLOAT8: tl.constexpr):
    """Return f32 values as the cache stores them; NaN stays NaN."""
    if FLOAT8:
        value = tl.where(value > FLOAT8_LIMIT, FLOAT8_LIMIT, value)
        value = tl.where(value < -FLOAT8_LIMIT, -FLOAT8_LIMIT, value)
    return value


# longer than the budget: one row from its load to its stores.
@triton.jit
def mla_append(
    kv, norm, cache, seg_start, seg_tokens, context, page_table, rows, segments, table,
    LATENT: tl.constexpr, WIDTH: tl.constexpr, LATENT_PAD: tl.constexpr, ROPE_PAD: tl.constexpr,
    PAGE: tl.constexpr, EPS: tl.constexpr, SEGMENTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalise one row's latent, round it to the dtype of kv, and write the row to its page.

    Args:
        kv: A[T, WIDTH].
        norm: f32[LATENT].
        cache: A or float8 e4m3 [P, PAGE, WIDTH]; written in place.
        seg_start: i32[B].
        seg_tokens: i32[B].
        context: i32[B].
        page_table: i32[B, M].
        rows: T.
        segments: B.
        table: M.
        LATENT: r.
        WIDTH: r + dr.
        LATENT_PAD: r padded to a power of two.
        ROPE_PAD: dr padded to a power of two.
        PAGE: Positions of a page.
        EPS: Added to the mean of squares.
        SEGMENTS: B padded to a power of two.
        PDL: Programmatic dependent launch.
    """
    FLOAT8: tl.constexpr = cache.dtype.element_ty == tl.float8e4nv
    column = tl.arange(0, LATENT_PAD)
    is_latent = column < LATENT
    gain = tl.load(norm + column, mask=is_latent, other=0.0)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    row = tl.program_id(0)
    source = kv + row.to(tl.int64) * WIDTH
    x = tl.load(source + column, mask=is_latent, other=0.0).to(tl.float32)
    shared = LATENT + tl.arange(0, ROPE_PAD)
    raw = tl.load(source + shared, mask=shared < WIDTH, other=0.0)
    seg, index, past = owner_of(row, seg_start, seg_tokens, context, segments, SEGMENTS)
    if seg >= 0:
        position = past + index
        page = tl.load(page_table + seg.to(tl.int64) * table + position // PAGE)
        place = cache + (page.to(tl.int64) * PAGE + position % PAGE) * WIDTH
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / LATENT + EPS)
        normed = (x * scale * gain).to(kv.dtype.element_ty)
        kind = cache.dtype.element_ty
        # Names of their own: what is defined outside a branch keeps its type in it.
        kept = to_cache(normed.to(tl.float32), FLOAT8) if FLOAT8 else normed
        kept_raw = to_cache(raw.to(tl.float32), FLOAT8) if FLOAT8 else raw
        tl.store(place + column, kept.to(kind), mask=is_latent)
        tl.store(place + shared, kept_raw.to(kind), mask=shared < WIDTH)


class MlaAppend(TritonTemplate):
    """`mla_append`; the cache is updated in place."""

    name: ClassVar[str] = "mla_append"
    op: ClassVar[str] = "mla_append"
    reference: ClassVar[str] = "mla_append"
    kernels: ClassVar[Mapping[str, Any]] = {"": mla_append}

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        for index in _INTEGERS:
            if refusal := refuse_dtype(node, index, ("i32",)):
                return refusal
        row, cache = node.operands[0].type, node.operands[_CACHE].type
        if cache.dtype not in (row.dtype,) and cache.dtype.name != _FLOAT8:
            both = f"{row.dtype.name} and {cache.dtype.name}"
            return Refusal("rows and cache must have one dtype", both)
        if row.sizes[1] != cache.sizes[2]:
            return Refusal(f"cache rows must be {row.sizes[1]} wide", cache.sizes[2])
        return refuse_dtype(node, 0, ("f32", "bf16")) or refuse_dtype(node, 1, ("f32",))

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: rows, segments, pages of a table row."""
        segments, table = node.operands[_PAGE_TABLE].type.sizes
        rows = node.operands[0].type.sizes[0]
        return ("rows", rows), ("segments", segments), ("table", table)

    def cost(self, node: Node, target: Target) -> Cost:
        """Return the bytes of the rows, not of the cache."""
        rows, cache = node.operands[0].type, node.operands[_CACHE].type
        read = sum(v.type.nbytes for i, v in enumerate(node.operands) if i != _CACHE)
        written = rows.elements * int(cache.dtype.bits) // 8
        return Cost(read, written, _FLOPS_PER_ELEMENT * rows.elements)

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return one launch, a program a row."""
        rows, width = node.operands[0].type.sizes
        latent, cache = node.operands[1].type.sizes[0], node.operands[_CACHE].type
        eps = node.attrs["eps"]
        assert isinstance(eps, int | float), f"eps {eps!r} is no number"
        launch = self.stage(
            node, target, "", (rows, 1, 1), num_warps=2, pdl=target.kind == "cuda",
            LATENT=latent, WIDTH=width, LATENT_PAD=_power(latent), ROPE_PAD=_power(width - latent),
            PAGE=cache.sizes[1], EPS=float(eps),
            SEGMENTS=_power(node.operands[_PAGE_TABLE].type.sizes[0]),
        )  # fmt: skip
        return (launch,)


def _power(count: int) -> int:
    """Return the smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


TEMPLATES = (MlaAppend(),)
