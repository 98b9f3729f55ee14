"""join_columns and norm_columns: a rank's columns, together and apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import triton
import triton.language as tl

from k3c.codegen.template import refuse_dtype
from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs
from k3c.codegen.triton_template import TritonTemplate
from k3c.ir.graph import LayerAttr, Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Scalar, Stage
from k3c.targets.target import Target

_BLOCK = 1024  # elements of a block of join_columns: 8 a thread


@triton.jit
def join_columns(
    parts, out, rows,
    RANKS: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Copy a run of one part's row to its place; columns from WIDTH on are padding."""
    blocks = tl.cdiv(N, BLOCK)
    run, piece = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    row, part = (run // RANKS).to(tl.int64), (run % RANKS).to(tl.int64)
    columns = piece * BLOCK + tl.arange(0, BLOCK)
    inside = (columns < N) & (part * N + columns < WIDTH)
    wait_for_inputs(PDL)
    values = tl.load(parts + (part * rows + row) * N + columns, mask=inside)
    release_dependents(PDL)
    tl.store(out + row * WIDTH + part * N + columns, values, mask=inside)


@triton.jit
def norm_columns(
    x, weight, y, rows, first_column,
    D: tl.constexpr, N: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalise one row and keep some of its columns."""
    columns = tl.arange(0, triton.next_power_of_2(D))
    kept = tl.arange(0, triton.next_power_of_2(N))
    factors = tl.load(weight + first_column + kept, mask=kept < N, other=0.0)
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64) * D
    values = tl.load(x + at + columns, mask=columns < D, other=0.0).to(tl.float32)
    chosen = tl.load(x + at + first_column + kept, mask=kept < N, other=0.0).to(tl.float32)
    release_dependents(PDL)
    scale = tl.rsqrt(tl.sum(values * values, 0) / D + EPS)
    result = chosen * scale * factors
    tl.store(
        y + tl.program_id(0).to(tl.int64) * N + kept, result.to(y.dtype.element_ty), mask=kept < N
    )


class JoinColumns(TritonTemplate):
    """`join_columns`: parts A[R, T, N] -> A[T, V]."""

    name: ClassVar[str] = "join_columns"
    op: ClassVar[str] = "join_columns"
    reference: ClassVar[str] = "join_columns"
    kernels: ClassVar[Mapping[str, Any]] = {"": join_columns}

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        return refuse_dtype(node, 0, ("f32", "bf16"))

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launch."""
        ranks, rows, columns = node.operands[0].type.sizes
        width = node.results[0].type.sizes[1]
        grid = (rows * ranks * -(-columns // _BLOCK), 1, 1)
        sizes = {"RANKS": ranks, "N": columns, "WIDTH": width, "BLOCK": _BLOCK}
        return (self.stage(node, target, "", grid, pdl=target.kind == "cuda", **sizes),)


class NormColumns(TritonTemplate):
    """`norm_columns`: columns of rms_norm, x A[T, D], w f32[D] -> A[T, columns]."""

    name: ClassVar[str] = "norm_columns"
    op: ClassVar[str] = "norm_columns"
    reference: ClassVar[str] = "norm_columns"
    kernels: ClassVar[Mapping[str, Any]] = {"": norm_columns}

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        return refuse_dtype(node, 0, ("f32", "bf16")) or refuse_dtype(node, 1, ("f32",))

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: rows, first column."""
        first = node.attrs["first_column"]
        assert isinstance(first, int | LayerAttr), f"first_column {first!r} is no integer"
        return (*super().scalars(node), ("first_column", first))

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launch: a block a row."""
        rows, width = node.operands[0].type.sizes
        sizes = {"D": width, "N": node.results[0].type.sizes[1], "EPS": node.attrs["eps"]}
        pdl = target.kind == "cuda"
        return (self.stage(node, target, "", (rows, 1, 1), num_warps=8, pdl=pdl, **sizes),)


TEMPLATES = (JoinColumns(), NormColumns())
