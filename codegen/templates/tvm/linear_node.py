"""What a `linear` node asks of its kernels: constants, layout, cost, and why one is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from k3c.artifact import ALIGN_BYTES
from k3c.codegen.template import padded, refuse_dtype, result_bytes
from k3c.codegen.templates.tvm.epilogue import SITU_FLOPS
from k3c.codegen.templates.tvm.panel_layout import (
    PanelLayout,
    panel_layout,
    parse_panel_layout,
)
from k3c.ir.graph import LayerAttr, Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Constant, Cost
from k3c.targets.target import Target

_INDEX_LIMIT = 2**31  # weights are indexed in 32 bits
_EPILOGUES = ("none", "situ")


@dataclass(frozen=True)
class LinearShape:
    """Compile-time constants of a linear kernel.

    Attributes:
        layout: The weight's layout.
        inner: K.
        act: Dtype of x.
        outs: Dtype of each result.
        addend: Whether a third operand is added.
        beta: Gate cap of SiTU.
        linear_beta: Up cap of SiTU, or "none".
    """

    layout: PanelLayout
    inner: int
    act: str
    outs: tuple[str, ...]
    addend: bool
    beta: float
    linear_beta: float | str

    @property
    def lanes(self) -> int:
        """f32 elements of a vector."""
        return self.layout.lanes

    @staticmethod
    def of(constants: Mapping[str, Constant]) -> LinearShape:
        """Return the shape that `linear_constants` described."""
        cap = constants["linear_beta"]
        return LinearShape(
            layout=parse_panel_layout(str(constants["layout"])),
            inner=int(constants["inner"]),
            act=str(constants["act"]),
            outs=tuple(str(constants["outs"]).split("-")),
            addend=bool(constants["addend"]),
            beta=float(constants["beta"]),
            linear_beta=cap if isinstance(cap, str) else float(cap),
        )


def node_layout(node: Node, target: Target) -> PanelLayout:
    """Return the panel layout of a node's weight."""
    kinds = epilogues(node)
    columns = [(r.type.sizes[1], k == "situ") for r, k in zip(node.results, kinds, strict=True)]
    return panel_layout(node.operands[1].type.dtype.name, target.lanes, columns)


def epilogues(node: Node) -> tuple[str, ...]:
    """Return the epilogue of each result; without the attribute none has one."""
    given = node.attrs.get("epilogues", ("none",) * len(node.results))
    assert isinstance(given, tuple), f"epilogues of {node.op}: {given!r} is no tuple"
    return tuple(str(e) for e in given)


def linear_constants(node: Node, target: Target) -> dict[str, Constant]:
    """Return the constants of a node's kernel, without rows."""
    with_situ = "situ" in epilogues(node)
    return {
        "layout": node_layout(node, target).name,
        "inner": node.operands[0].type.sizes[1],
        "act": node.operands[0].type.dtype.name,
        "outs": "-".join(r.type.dtype.name for r in node.results),
        "addend": int(len(node.operands) > 2),
        "beta": _number(node, "beta", 0.0) if with_situ else 0.0,
        "linear_beta": _number(node, "linear_beta", "none") if with_situ else "none",
    }


def refuse_linear(node: Node, target: Target) -> Refusal | None:
    """Return why no panel kernel implements a node, or None."""
    if not 2 <= len(node.operands) <= 3 or not node.results:
        return Refusal("linear takes x, w and at most one addend", len(node.operands))
    for index in range(len(node.operands)):
        refusal = refuse_dtype(node, index, ("f32", "bf16"))
        if refusal is not None:
            return refusal
    return _refuse_results(node) or _refuse_sizes(node, target)


def linear_cost(node: Node, target: Target) -> Cost:
    """Return bytes and operations of one launch: packed weights once, x and results once."""
    rows, inner = node.operands[0].type.sizes
    layout = node_layout(node, target)
    others = sum(v.type.nbytes for i, v in enumerate(node.operands) if i != 1)
    flops = 2 * rows * inner * node.operands[1].type.sizes[0]
    for result, kind in zip(node.results, epilogues(node), strict=True):
        flops += result.type.elements * SITU_FLOPS if kind == "situ" else 0
    return Cost(layout.nbytes(inner) + others, result_bytes(node), flops)


def x_workspace_bytes(node: Node, tile: int) -> int:
    """Return the bytes of x in tiles of rows, f32."""
    rows, inner = node.operands[0].type.sizes
    return padded(padded(rows, tile) * inner * 4, ALIGN_BYTES)


def _refuse_results(node: Node) -> Refusal | None:
    kinds = epilogues(node)
    unknown = sorted(set(kinds) - set(_EPILOGUES))
    if unknown:
        return Refusal(f"epilogue must be {' or '.join(_EPILOGUES)}", unknown[0])
    if len(kinds) != len(node.results):
        return Refusal(f"{len(node.results)} results need as many epilogues", len(kinds))
    for result in node.results:
        if result.type.dtype.name not in ("f32", "bf16"):
            return Refusal("results of linear must be f32 or bf16", result.type.dtype.name)
    if len(node.operands) > 2:
        return _refuse_addend(node, kinds)
    return None


def _refuse_addend(node: Node, kinds: tuple[str, ...]) -> Refusal | None:
    if kinds != ("none",):
        return Refusal("an addend needs one result without epilogue", kinds)
    dtypes = {v.type.dtype.name for v in (node.operands[0], node.operands[2], node.results[0])}
    return None if len(dtypes) == 1 else Refusal("x, addend and result differ in dtype", dtypes)


def _refuse_sizes(node: Node, target: Target) -> Refusal | None:
    x, w = node.operands[0].type.sizes, node.operands[1].type.sizes
    if len(x) != 2 or len(w) != 2 or x[1] != w[1]:
        return Refusal("linear needs x [T, K] and w [N, K]", (x, w))
    layout = node_layout(node, target)
    consumed = sum(r.source_rows for r in layout.ranges)
    if consumed != w[0]:
        return Refusal(f"the results use {consumed} weight rows", w[0])
    words = layout.nbytes(w[1]) // 4
    return None if words < _INDEX_LIMIT else Refusal("2^31 weight words or more", words)


def _number(node: Node, name: str, default: float | str) -> float | str:
    value = node.attrs.get(name, default)
    assert not isinstance(value, tuple | LayerAttr), f"{node.op}: {name} is {value}"
    return value if isinstance(value, str) else float(value)
