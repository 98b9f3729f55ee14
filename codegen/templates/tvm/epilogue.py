"""The end of a GEMM kernel: the columns of one panel for one row, cut at the result's width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from k3c.codegen.templates.tvm.panel_layout import HALVES
from k3c.codegen.templates.tvm.vector import B, narrow, put, rounded, situ, span, widen

# Operations of SiTU counted for one output: two tanh and a sigmoid of about 20 each.
SITU_FLOPS = 60


@dataclass(frozen=True)
class Epilogue:
    """How sums become a result.

    Attributes:
        width: Columns of the result.
        out: Dtype of the result.
        situ: Whether low and high half are gate and up of the same columns.
        beta: Gate cap of SiTU.
        linear_beta: Up cap of SiTU, or "none".
        lanes: f32 elements of a vector.
    """

    width: int
    out: str
    situ: bool
    beta: float
    linear_beta: float | str
    lanes: int


def write_panel(e: Epilogue, out: Any, panel: Any, row: Any, sums: Any) -> None:
    """Emit the stores of one row of a panel.

    Args:
        e: The epilogue.
        out: The result's buffer [rows, width].
        panel: Index of the panel within the result.
        row: Row of the result.
        sums: Low and high half, f32 lanes.
    """
    n = e.lanes
    if e.situ:
        gate, up = (rounded(s, e.out, n) for s in sums)
        value = situ(gate, up, e.beta, e.linear_beta, n)
        _write(e, out, (row, panel * n), narrow(value, e.out, n))
        return
    for half in range(HALVES):
        _write(e, out, (row, (panel * HALVES + half) * n), narrow(sums[half], e.out, n))


def write_panel_sum(e: Epilogue, out: Any, addend: Any, at: tuple[Any, Any], sums: Any) -> None:
    """Emit addend + round(sum), rounded; lanes past the width read and write nothing.

    Args:
        e: The epilogue; the addend has the result's dtype.
        out: The result's buffer [rows, width].
        addend: The addend's buffer, of the same shape.
        at: Index of the panel within the result, and row.
        sums: Low and high half, f32 lanes.
    """
    n = e.lanes
    panel, row = at
    for half in range(HALVES):
        column = (panel * HALVES + half) * n
        product = T.bind(rounded(sums[half], e.out, n))
        with B.If(column + n <= e.width):
            with B.Then():
                other = widen(addend[row, span(column, n)], e.out, n)
                put(out, narrow(product + other, e.out, n), row, span(column, n))
            with B.Else():
                edge = B.alloc_buffer((n,), "float32")
                put(edge, product, span(0, n))
                with B.serial(n) as i, B.If(column + i < e.width), B.Then():
                    other = widen(addend[row, column + i], e.out, 1)
                    put(out, narrow(edge[i] + other, e.out, 1), row, column + i)


def _write(e: Epilogue, out: Any, at: tuple[Any, Any], stored: Any) -> None:
    """Emit a store of a vector at (row, column), cut at the result's width."""
    row, column = at
    n = e.lanes
    value = T.bind(stored)
    with B.If(column + n <= e.width):
        with B.Then():
            put(out, value, row, span(column, n))
        with B.Else():
            edge = B.alloc_buffer((n,), out.dtype)
            put(edge, value, span(0, n))
            with B.serial(n) as i, B.If(column + i < e.width), B.Then():
                put(out, edge[i], row, column + i)
