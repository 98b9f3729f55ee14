"""What a `linear` or `norm_linear` node asks of its GPU kernels, and why one is refused."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from k3c.codegen.template import refuse_dtype, result_bytes
from k3c.codegen.templates.triton.linear_layout import RowsLayout, rows_layout
from k3c.ir.graph import LayerAttr, Node
from k3c.ir.op_spec import EPILOGUES
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Cost

# Pointers to results that the kernels have parameters for.
MAX_RESULTS = 8
_INDEX_LIMIT = 2**31  # elements of a weight are indexed in 32 bits
# Elements of the widest store of a thread, with room.
_MOST_MULTIPLE = 16
_FLOATS = ("f32", "bf16")
_SITU_FLOPS = 10
_NORM_FLOPS = 4


@dataclass(frozen=True)
class LinearShape:
    """The facts of a node that its kernels and their configurations depend on.

    Attributes:
        layout: The weight's layout.
        rows: T.
        inner: K.
        act: Dtype of x.
        stored: Dtype of the weight.
        norm: Whether x is normalised first.
        addend: Whether an operand is added to the result.
    """

    layout: RowsLayout
    rows: int
    inner: int
    act: str
    stored: str
    norm: bool
    addend: bool

    @staticmethod
    def of(node: Node) -> LinearShape:
        """Return the shape of a node that is not refused."""
        rows, inner = node.operands[0].type.sizes
        place = weight_index(node)
        return LinearShape(
            layout=node_layout(node),
            rows=rows,
            inner=inner,
            act=node.operands[0].type.dtype.name,
            stored=node.operands[place].type.dtype.name,
            norm=node.op == "norm_linear",
            addend=len(node.operands) > place + 1,
        )

    @property
    def packed_rows(self) -> int:
        """Rows of the packed weight: columns of the product, with padding."""
        return self.layout.packed_rows

    @property
    def wide(self) -> bool:
        """Whether the product is computed in f32, without tensor cores."""
        return "f32" in (self.act, self.stored)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weight."""
        return self.packed_rows * self.inner * (4 if self.stored == "f32" else 2)


def weight_index(node: Node) -> int:
    """Return the place of the weight among the operands."""
    return 2 if node.op == "norm_linear" else 1


def epilogues(node: Node) -> tuple[str, ...]:
    """Return the epilogue of each result; without the attribute none has one."""
    given = node.attrs.get("epilogues", ()) or ("none",) * len(node.results)
    assert isinstance(given, tuple), f"epilogues of {node.op}: {given!r} is no tuple"
    return tuple(str(e) for e in given)


def node_layout(node: Node) -> RowsLayout:
    """Return the layout of a node's weight."""
    kinds = epilogues(node)
    return rows_layout(
        [(r.type.sizes[1], k == "situ") for r, k in zip(node.results, kinds, strict=True)]
    )


def epilogue_constants(node: Node) -> dict[str, Any]:
    """Return the constexprs that say where results lie in the product and what becomes of them."""
    ranges = node_layout(node).ranges
    with_situ = any(r.situ for r in ranges)
    kinds = [(r.type.dtype.name, e) for r, e in zip(node.results, epilogues(node), strict=True)]
    groups = [kinds.index(kind) for kind in kinds]
    widths = [[r.width for r, g in zip(ranges, groups, strict=True) if g == h] for h in groups]
    return {
        "STARTS": tuple(r.start for r in ranges),
        "WIDTHS": tuple(r.width for r in ranges),
        "SITU": tuple(int(r.situ) for r in ranges),
        "GROUPS": tuple(groups),
        "PLACES": tuple(groups[:i].count(g) for i, g in enumerate(groups)),
        "SIZES": tuple(groups.count(g) for g in groups),
        "MULTIPLES": tuple(gcd(_MOST_MULTIPLE, *w) for w in widths),
        "BETA": _number(node, "beta") if with_situ else 0.0,
        "LINEAR_BETA": _number(node, "linear_beta") if with_situ else 0.0,
    }


def absent_pointers(node: Node, workspace: bool) -> dict[str, int]:
    """Return, as constexprs, the pointer parameters of a kernel that a node has no value for."""
    shape = LinearShape.of(node)
    missing = [f"y{i}" for i in range(len(node.results), MAX_RESULTS)]
    missing += [] if shape.norm else ["norm"]
    missing += [] if shape.addend else ["addend"]
    missing += [] if workspace else ["workspace"]
    return dict.fromkeys(missing, 0)


def epsilon(node: Node) -> float:
    """Return the eps of a node's norm, 0 where it has none."""
    return _number(node, "eps") if node.op == "norm_linear" else 0.0


def linear_cost(node: Node) -> Cost:
    """Return bytes and operations: the packed weight once, x and results once."""
    shape, place = LinearShape.of(node), weight_index(node)
    others = sum(v.type.nbytes for i, v in enumerate(node.operands) if i != place)
    flops = 2 * shape.rows * shape.inner * shape.layout.source_rows
    flops += _NORM_FLOPS * shape.rows * shape.inner if shape.norm else 0
    flops += sum(shape.rows * r.width * _SITU_FLOPS for r in shape.layout.ranges if r.situ)
    return Cost(shape.weight_bytes + others, result_bytes(node), flops)


def refuse_linear(node: Node) -> Refusal | None:
    """Return why no kernel implements a node, or None."""
    place = weight_index(node)
    if not place < len(node.operands) <= place + 2 or not node.results:
        return Refusal(f"{node.op} takes x, w and at most one addend", len(node.operands))
    for index in range(len(node.operands)):
        refusal = refuse_dtype(node, index, _FLOATS)
        if refusal is not None:
            return refusal
    return _refuse_results(node) or _refuse_sizes(node)


def _refuse_results(node: Node) -> Refusal | None:
    kinds = epilogues(node)
    unknown = sorted(set(kinds) - set(EPILOGUES))
    if unknown:
        return Refusal(f"epilogue must be {' or '.join(EPILOGUES)}", unknown[0])
    if len(kinds) != len(node.results):
        return Refusal(f"{len(node.results)} results need as many epilogues", len(kinds))
    if len(node.results) > MAX_RESULTS:
        return Refusal(f"at most {MAX_RESULTS} results", len(node.results))
    for result in node.results:
        if result.type.dtype.name not in _FLOATS:
            return Refusal("results of linear must be f32 or bf16", result.type.dtype.name)
    return _refuse_addend(node, kinds) if len(node.operands) > weight_index(node) + 1 else None


def _refuse_addend(node: Node, kinds: tuple[str, ...]) -> Refusal | None:
    if kinds != ("none",):
        return Refusal("an addend needs one result without epilogue", str(kinds))
    dtypes = {v.type.dtype.name for v in (node.operands[0], node.operands[-1], node.results[0])}
    if len(dtypes) == 1:
        return None
    return Refusal("x, addend and result differ in dtype", ", ".join(sorted(dtypes)))


def _refuse_sizes(node: Node) -> Refusal | None:
    x, w = node.operands[0].type.sizes, node.operands[weight_index(node)].type.sizes
    if len(x) != 2 or len(w) != 2 or x[1] != w[1]:
        return Refusal(f"{node.op} needs x [T, K] and w [N, K]", str((x, w)))
    layout = node_layout(node)
    if layout.source_rows != w[0]:
        return Refusal(f"the results use {layout.source_rows} weight rows", w[0])
    elements = layout.packed_rows * w[1]
    return None if elements < _INDEX_LIMIT else Refusal("2^31 weight elements or more", elements)


def _number(node: Node, name: str) -> float:
    """Return an attribute; a cap of 0 stands for none."""
    found = node.attrs.get(name, 0.0)
    assert not isinstance(found, tuple | LayerAttr), f"{node.op}: {name} is {found}"
    return 0.0 if found == "none" else float(found)
