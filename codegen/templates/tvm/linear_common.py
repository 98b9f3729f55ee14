"""What the kernels of `linear` share: tiles of x, the register tile and the epilogue.

A tile is some rows of x times one panel of weights. Its accumulators are one small buffer each:
the code generator keeps those in registers, while one above 1 KiB would become a heap allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from k3c.codegen.templates.tvm.epilogue import (
    Epilogue,
    write_panel,
    write_panel_sum,
)
from k3c.codegen.templates.tvm.linear_node import LinearShape
from k3c.codegen.templates.tvm.panel_layout import (
    HALVES,
)
from k3c.codegen.templates.tvm.vector import (
    PREFETCH_BYTES,
    B,
    bits,
    prefetch,
    put,
    span,
    splat,
    storage,
    typed,
    widen,
)

_HIGH_HALF = 0xFFFF0000


@dataclass(frozen=True)
class LinearBuffers:
    """The buffers of a kernel.

    `tiles` is x as f32[count, K, rows of a tile], flat: one step of K reads one place, where the
    rows themselves stand a power of two apart and would evict each other from the cache. `streamed`
    says that weights are used as they come from memory, so that fetching ahead pays.
    """

    x: Any
    w: Any
    addend: Any
    outs: tuple[Any, ...]
    tiles: Any
    count: Any
    tile: int
    rows: Any
    streamed: bool

    def at(self, shape: LinearShape, tile: Any, k: Any, row: Any) -> Any:
        """Return the index in `tiles` of column k of a tile's row."""
        return (tile * shape.inner + k) * self.tile + row


def linear_function(
    shape: LinearShape, tile: int, static_rows: bool, body: Callable[[LinearBuffers], None]
) -> Any:
    """Return a kernel: parameters and buffers, x converted to tiles, then `body`.

    Args:
        shape: The constants.
        tile: Rows of a tile.
        static_rows: Whether x has exactly one tile of rows; else rows are a run-time integer.
        body: Emits the rest.
    """
    with IRBuilder() as made, B.prim_func():
        B.func_attr({"tirx.noalias": True})
        buffers = _declare(shape, tile, static_rows)
        _fill_tiles(shape, buffers, static_rows)
        body(buffers)
    return made.get()


def accumulate(
    shape: LinearShape,
    buffers: LinearBuffers,
    at: tuple[Any, Any],
    rows: Sequence[int],
    unroll: int,
) -> list[list[Any]]:
    """Emit the product of some rows of a tile with a panel.

    Args:
        shape: The constants; `unroll` divides K.
        buffers: The buffers.
        at: Index of the panel, index of the tile.
        rows: The rows, counted within the tile.
        unroll: Steps of K in flight, each with its own accumulators, to hide the latency of FMA.

    Returns:
        For each row, the low and the high half of the panel's columns, f32 lanes.
    """
    n = shape.lanes
    panel, tile = at
    acc = [[B.alloc_buffer((n,), "float32") for _ in range(unroll * HALVES)] for _ in rows]
    for a in (a for row in acc for a in row):
        put(a, splat(0.0, n), span(0, n))
    with B.serial(shape.inner // unroll) as step:
        for u in range(unroll):
            k = step * unroll + u
            if buffers.streamed:
                prefetch(buffers.w, panel, k + PREFETCH_BYTES // _step_bytes(shape), 0)
            halves = _load_panel(shape, buffers.w, panel, k)
            for row, sums in zip(rows, acc, strict=True):
                x = T.bind(splat(buffers.tiles[buffers.at(shape, tile, k, row)], n))
                for half in range(HALVES):
                    a = sums[u * HALVES + half]
                    put(a, a[span(0, n)] + halves[half] * x, span(0, n))
    return [[_sum_of(sums[half::HALVES], n) for half in range(HALVES)] for sums in acc]


def write_rows(
    shape: LinearShape, buffers: LinearBuffers, panel: Any, first: Any, sums: Sequence[Any]
) -> None:
    """Emit the epilogue of the rows from `first` on that exist; `sums` is what accumulate returns.

    A loop over the rows, whose sums pass through memory: unrolled, its code would be most of the
    kernel.
    """
    n = shape.lanes
    kept = [B.alloc_buffer((len(sums) * n,), "float32") for _ in range(HALVES)]
    for i, halves in enumerate(sums):
        for half in range(HALVES):
            put(kept[half], halves[half], span(i * n, n))
    with B.serial(len(sums)) as i:
        loaded = [T.bind(k[span(i * n, n)]) for k in kept]
        row = T.bind(first + i)
        with B.If(row < buffers.rows), B.Then():
            _write_outputs(shape, buffers, panel, row, loaded)


def _write_outputs(
    shape: LinearShape, buffers: LinearBuffers, panel: Any, row: Any, sums: Any
) -> None:
    """Emit the epilogue of one row of a panel: the range that the panel lies in stores it."""
    ranges = shape.layout.ranges
    if len(ranges) == 1:
        _write_range(shape, buffers, 0, (panel, row), sums)
        return
    for index, r in enumerate(ranges):
        inside = (panel >= r.first_panel) & (panel < r.first_panel + r.panels)
        with B.If(inside), B.Then():
            _write_range(shape, buffers, index, (panel - r.first_panel, row), sums)


def _declare(shape: LinearShape, tile: int, static_rows: bool) -> LinearBuffers:
    pointer = {name: B.arg(name, B.handle()) for name in _pointers(shape)}
    rows = tile if static_rows else B.arg("rows", B.int64())
    inner, layout, n = shape.inner, shape.layout, shape.lanes
    panel = (n,) if layout.dtype == "bf16" else (HALVES * n,)
    kind = "uint32" if layout.dtype == "bf16" else "float32"
    outs = [
        B.decl_buffer((rows, r.width), storage(out), data=pointer[f"y{i}"])
        for i, (r, out) in enumerate(zip(layout.ranges, shape.outs, strict=True))
    ]
    addend = None
    if shape.addend:
        shape_of_sum = (rows, layout.ranges[0].width)
        addend = B.decl_buffer(shape_of_sum, storage(shape.act), data=pointer["addend"])
    tiles = 1 if static_rows else T.bind(T.floordiv(rows + (tile - 1), tile))
    return LinearBuffers(
        x=B.decl_buffer((rows, inner), storage(shape.act), data=pointer["x"]),
        w=B.decl_buffer((layout.panels, inner, *panel), kind, data=pointer["w"]),
        addend=addend,
        outs=tuple(outs),
        tiles=B.decl_buffer((tiles * (inner * tile),), "float32", data=pointer["scratch"]),
        count=tiles,
        tile=tile,
        rows=rows,
        streamed=static_rows,
    )


def _pointers(shape: LinearShape) -> list[str]:
    outs = [f"y{i}" for i in range(len(shape.outs))]
    return ["x", "w", *(["addend"] if shape.addend else []), *outs, "scratch"]


def _fill_tiles(shape: LinearShape, buffers: LinearBuffers, static_rows: bool) -> None:
    """Write x in tiles; the last tile repeats the last row. One tile is not worth a launch."""
    n = shape.lanes
    whole = shape.inner // n
    tiles = B.serial(1) if static_rows else B.parallel(buffers.count)
    with tiles as t, B.serial(buffers.tile) as r:
        row = r if static_rows else T.bind(T.min(t * buffers.tile + r, buffers.rows - 1))
        if whole:
            with B.serial(whole) as block:
                value = widen(buffers.x[row, span(block * n, n)], shape.act, n)
                _put_column(buffers, T.bind(value), buffers.at(shape, t, block * n, r), n)
        for k in range(whole * n, shape.inner):
            value = widen(buffers.x[row, k], shape.act, 1)
            put(buffers.tiles, value, buffers.at(shape, t, k, r))


def _put_column(buffers: LinearBuffers, value: Any, first: Any, n: int) -> None:
    """Emit the store of a row's lanes, which stand the rows of a tile apart."""
    if buffers.tile == 1:
        put(buffers.tiles, value, span(first, n))
        return
    lanes = B.alloc_buffer((n,), "float32")
    put(lanes, value, span(0, n))
    for i in range(n):
        put(buffers.tiles, lanes[i], first + i * buffers.tile)


def _load_panel(shape: LinearShape, w: Any, panel: Any, k: Any) -> tuple[Any, Any]:
    n = shape.lanes
    if shape.layout.dtype == "f32":
        return T.bind(w[panel, k, span(0, n)]), T.bind(w[panel, k, span(n, n)])
    word, kind = T.bind(w[panel, k, span(0, n)]), typed("float32", n)
    low = T.bind(T.reinterpret(kind, word << bits(16, n)))
    return low, T.bind(T.reinterpret(kind, word & bits(_HIGH_HALF, n)))


def _step_bytes(shape: LinearShape) -> int:
    """Return the bytes of a panel for one step of K."""
    return HALVES * shape.lanes * (2 if shape.layout.dtype == "bf16" else 4)


def _sum_of(parts: Sequence[Any], n: int) -> Any:
    terms = [p[span(0, n)] for p in parts]
    while len(terms) > 1:
        terms = [T.bind(a + b) for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return T.bind(terms[0])


def _epilogue(shape: LinearShape, index: int) -> Epilogue:
    r = shape.layout.ranges[index]
    return Epilogue(r.width, shape.outs[index], r.situ, shape.beta, shape.linear_beta, shape.lanes)


def _write_range(
    shape: LinearShape, buffers: LinearBuffers, index: int, at: tuple[Any, Any], sums: Any
) -> None:
    epilogue, out = _epilogue(shape, index), buffers.outs[index]
    if shape.addend:
        write_panel_sum(epilogue, out, buffers.addend, at, sums)
    else:
        write_panel(epilogue, out, *at, sums)
