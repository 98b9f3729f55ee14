"""grouped_gemm on MXFP4 experts, float32 accumulation: decode and prefill.

Decode: a task is one expert that has rows and one panel; codes are decoded for a few rows at once.
Prefill: where an expert has more rows than that, a task first decodes its panel into scratch, once,
and then multiplies all rows of the expert with it. Tasks are dealt out in turn, because experts
differ in rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.script import tirx as T

from k3c.codegen.templates.tvm.epilogue import write_panel
from k3c.codegen.templates.tvm.grouped_common import (
    GroupedBuffers,
    GroupedShape,
    grouped_constants,
    grouped_cost,
    grouped_function,
    grouped_layout,
    list_bytes,
    load_scale,
    multiply_codes,
    refuse_grouped,
    row_of_x,
    wide_bytes,
    zeroed,
)
from k3c.codegen.templates.tvm.mxfp4_decode import decode_code, magnitude_table
from k3c.codegen.templates.tvm.mxfp4_layout import CODES_PER_WORD, WORDS_PER_BLOCK
from k3c.codegen.templates.tvm.panel_layout import HALVES
from k3c.codegen.templates.tvm.single_launch import SingleLaunch
from k3c.codegen.templates.tvm.vector import B, put, span, splat
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.ir.types import MX_BLOCK
from k3c.targets.catalogue import Constant, Cost, Scalar
from k3c.targets.target import Target

_DECODE_TOKENS = 8
# Rows that share the decoding of a code, by lanes: sums, two values and x must fit the registers.
_CODE_ROWS = {8: 4, 16: 4}
# Rows of a tile over a decoded panel, by lanes, as in linear.
_TILE_ROWS = {8: 6, 16: 12}
# Tasks that run at one time at most: each has its own decoded panel in the scratch.
_WORKERS = 32


class _Grouped(SingleLaunch):
    """What both templates answer alike."""

    op = "grouped_gemm"
    reference = "grouped_gemm"

    def layouts(self, node: Node, target: Target) -> Mapping[int, str]:
        """Return the layout of the experts."""
        return {1: grouped_layout(node, target).name}

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the compile-time constants."""
        return grouped_constants(node, target)

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: tokens."""
        return (("tokens", node.operands[3].type.sizes[0]),)

    def cost(self, node: Node, target: Target) -> Cost:
        """Return bytes and operations of one launch."""
        return grouped_cost(node, target)


class GroupedDecode(_Grouped):
    """`grouped_gemm` for up to 8 tokens."""

    name = "grouped_decode"

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        refusal = refuse_grouped(node, target)
        if refusal is not None:
            return refusal
        tokens = node.operands[3].type.sizes[0]
        fits = tokens <= _DECODE_TOKENS
        return None if fits else Refusal(f"grouped_decode takes {_DECODE_TOKENS} tokens", tokens)

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of the list of experts and of x as f32."""
        return list_bytes(node) + wide_bytes(node)

    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        shape = GroupedShape.of(constants)

        def body(buffers: GroupedBuffers) -> None:
            with B.parallel(buffers.present[0] * shape.panels) as task:
                at = _expert_and_panel(shape, buffers, task)
                _emit_code_tiles(shape, buffers, at)

        return grouped_function(shape, body)


class GroupedPrefill(_Grouped):
    """`grouped_gemm` for any number of tokens."""

    name = "grouped_prefill"

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        return refuse_grouped(node, target)

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of the list of experts, of x as f32, and of the decoded panels."""
        panel = node.operands[0].type.sizes[-1] * HALVES * target.lanes * 4
        return list_bytes(node) + wide_bytes(node) + _WORKERS * panel

    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        shape = GroupedShape.of(constants)

        def body(buffers: GroupedBuffers) -> None:
            tasks = T.bind(buffers.present[0] * shape.panels)
            turns = T.bind(T.floordiv(tasks + (_WORKERS - 1), _WORKERS))
            with B.parallel(_WORKERS) as worker, B.serial(turns) as turn:
                task = T.bind(turn * _WORKERS + worker)
                with B.If(task < tasks), B.Then():
                    _emit_prefill_task(shape, buffers, task, worker)

        return grouped_function(shape, body)


def _expert_and_panel(shape: GroupedShape, buffers: GroupedBuffers, task: Any) -> tuple[Any, Any]:
    place = T.floordiv(task, shape.panels)
    expert = T.bind(T.Cast("int64", buffers.present[place + 1]))
    return expert, T.bind(T.Cast("int64", T.floormod(task, shape.panels)))


def _emit_prefill_task(
    shape: GroupedShape, buffers: GroupedBuffers, task: Any, worker: Any
) -> None:
    at = _expert_and_panel(shape, buffers, task)
    expert, panel = at
    start, count = _rows_of(buffers, expert)
    with B.If(count <= _CODE_ROWS[shape.lanes]):
        with B.Then():
            _emit_code_tiles(shape, buffers, at)
        with B.Else():
            size = shape.inner * HALVES * shape.lanes
            first = T.bind(T.Cast("int64", worker) * size)
            _decode_panel(shape, buffers, at, first)
            tile = _TILE_ROWS[shape.lanes]
            with B.serial(T.floordiv(count + (tile - 1), tile)) as index:
                done = T.bind(index * tile)
                places = [T.bind(start + T.min(done + i, count - 1)) for i in range(tile)]
                rows = [row_of_x(shape, buffers, place) for place in places]
                sums = _multiply_decoded(shape, buffers, first, rows)
                _write_rows(shape, buffers, panel, (start + done, count - done), sums)


def _rows_of(buffers: GroupedBuffers, expert: Any) -> tuple[Any, Any]:
    start = T.bind(buffers.offsets[expert])
    return start, T.bind(buffers.offsets[expert + 1] - start)


def _emit_code_tiles(shape: GroupedShape, buffers: GroupedBuffers, at: tuple[Any, Any]) -> None:
    """Emit tiles of 1, 2 or all rows that share a decoding; the last repeats the last row."""
    start, count = _rows_of(buffers, at[0])
    most = _CODE_ROWS[shape.lanes]
    with B.serial(T.floordiv(count + (most - 1), most)) as index:
        first = T.bind(index * most)
        left = T.bind(count - first)
        with B.If(left == 1):
            with B.Then():
                _emit_code_tile(shape, buffers, at, (start + first, left, 1))
            with B.Else(), B.If(left == 2):
                with B.Then():
                    _emit_code_tile(shape, buffers, at, (start + first, left, 2))
                with B.Else():
                    _emit_code_tile(shape, buffers, at, (start + first, left, most))


def _emit_code_tile(
    shape: GroupedShape, buffers: GroupedBuffers, at: tuple[Any, Any], rows: tuple[Any, Any, int]
) -> None:
    first, left, size = rows
    exact = size <= 2
    places = [T.bind(first + (i if exact else T.min(left - 1, i))) for i in range(size)]
    sums = multiply_codes(shape, buffers, at, [row_of_x(shape, buffers, p) for p in places])
    _write_rows(shape, buffers, at[1], (first, left), sums)


def _write_rows(
    shape: GroupedShape, buffers: GroupedBuffers, panel: Any, rows: tuple[Any, Any], sums: Any
) -> None:
    """Emit the epilogue of the rows (first place in the order, how many are left) of a tile."""
    n = shape.lanes
    first, left = rows
    kept = [B.alloc_buffer((len(sums) * n,), "float32") for _ in range(HALVES)]
    for i, halves in enumerate(sums):
        for half in range(HALVES):
            put(kept[half], halves[half], span(i * n, n))
    with B.serial(len(sums)) as i, B.If(i < left), B.Then():
        flat = T.bind(T.Cast("int64", buffers.order[first + i]))
        loaded = [T.bind(k[span(i * n, n)]) for k in kept]
        write_panel(shape.epilogue, buffers.out, panel, flat, loaded)


def _decode_panel(
    shape: GroupedShape, buffers: GroupedBuffers, at: tuple[Any, Any], first: Any
) -> None:
    """Emit the decoding of a panel into f32[K, 2, lanes] at `first` of the tiles."""
    n = shape.lanes
    table = magnitude_table(n)
    with B.serial(shape.inner // MX_BLOCK) as block:
        for half in range(HALVES):
            scale = load_scale(shape, buffers, (*at, block), half)
            with B.serial(WORDS_PER_BLOCK) as w:
                word = T.bind(buffers.words[(*at, block, w, half, span(0, n))])
                for i in range(CODES_PER_WORD):
                    k = block * MX_BLOCK + w * CODES_PER_WORD + i
                    value = decode_code(table, word, i, n) * scale
                    put(buffers.tiles, value, span(first + (k * HALVES + half) * n, n))


def _multiply_decoded(
    shape: GroupedShape, buffers: GroupedBuffers, first: Any, rows: list[Any]
) -> list[list[Any]]:
    n = shape.lanes
    acc = zeroed(len(rows) * HALVES, n)
    with B.serial(shape.inner) as k:
        at = [span(first + (k * HALVES + half) * n, n) for half in range(HALVES)]
        values = [T.bind(buffers.tiles[a]) for a in at]
        for r, row in enumerate(rows):
            x = T.bind(splat(buffers.wide[row, k], n))
            for half in range(HALVES):
                total = acc[r * HALVES + half]
                put(total, total[span(0, n)] + values[half] * x, span(0, n))
    loaded = [T.bind(a[span(0, n)]) for a in acc]
    return [loaded[r * HALVES : (r + 1) * HALVES] for r in range(len(rows))]


GROUPED_DECODE = GroupedDecode()
GROUPED_PREFILL = GroupedPrefill()
