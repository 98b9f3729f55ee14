"""What the kernels of `grouped_gemm` share: constants, buffers, the list of experts, one product.

The rows of an expert are `order[offsets[e]]` to `order[offsets[e + 1] - 1]`: flat ids t * k + j,
where row t of x (or row t, j) meets the token's j-th expert. Results stand at their flat id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from k3c.codegen.template import padded, refuse_dtype, result_bytes
from k3c.codegen.templates.tvm.epilogue import SITU_FLOPS, Epilogue
from k3c.codegen.templates.tvm.mxfp4_decode import decode_code, decode_scale, magnitude_table
from k3c.codegen.templates.tvm.mxfp4_layout import (
    CODES_PER_WORD,
    WORDS_PER_BLOCK,
    Mxfp4Layout,
    parse_mxfp4_layout,
)
from k3c.codegen.templates.tvm.panel_layout import HALVES
from k3c.codegen.templates.tvm.vector import (
    PREFETCH_BYTES,
    B,
    prefetch,
    put,
    span,
    splat,
    storage,
    widen,
)
from k3c.ir.graph import LayerAttr, Node
from k3c.ir.refusal import Refusal
from k3c.ir.types import MX_BLOCK
from k3c.targets.catalogue import Constant, Cost
from k3c.targets.target import Target

_EPILOGUES = ("none", "situ")
_BLOCKS_OF_LIST = 64
# Offsets and counts are 32 bits wide; flat ids must fit.
_ID_LIMIT = 2**31


@dataclass(frozen=True)
class GroupedShape:
    """Compile-time constants of a grouped kernel.

    Attributes:
        layout: The weight's layout.
        experts: E.
        inner: K.
        choices: k, experts a token.
        per_choice: Whether x has a row for each choice, [T, k, K].
        act: Dtype of x and of the result.
        beta: Gate cap of SiTU.
        linear_beta: Up cap of SiTU, or "none".
    """

    layout: Mxfp4Layout
    experts: int
    inner: int
    choices: int
    per_choice: bool
    act: str
    beta: float
    linear_beta: float | str

    @staticmethod
    def of(constants: Mapping[str, Constant]) -> GroupedShape:
        """Return the shape that `grouped_constants` described."""
        cap = constants["linear_beta"]
        return GroupedShape(
            layout=parse_mxfp4_layout(str(constants["layout"])),
            experts=int(constants["experts"]),
            inner=int(constants["inner"]),
            choices=int(constants["choices"]),
            per_choice=bool(constants["per_choice"]),
            act=str(constants["act"]),
            beta=float(constants["beta"]),
            linear_beta=cap if isinstance(cap, str) else float(cap),
        )

    @property
    def lanes(self) -> int:
        """f32 elements of a vector."""
        return self.layout.lanes

    @property
    def panels(self) -> int:
        """Panels of one expert."""
        return self.layout.columns.panels

    @property
    def epilogue(self) -> Epilogue:
        """How sums become the result."""
        layout = self.layout
        return Epilogue(
            layout.width, self.act, layout.situ, self.beta, self.linear_beta, layout.lanes
        )


def grouped_layout(node: Node, target: Target) -> Mxfp4Layout:
    """Return the layout of a node's weight."""
    situ = node.attrs.get("epilogue", "none") == "situ"
    return Mxfp4Layout(target.lanes, node.results[0].type.sizes[-1], situ)


def grouped_constants(node: Node, target: Target) -> dict[str, Constant]:
    """Return the constants of a node's kernel; rows are not among them."""
    layout = grouped_layout(node, target)
    x = node.operands[0].type
    return {
        "layout": layout.name,
        "experts": node.operands[1].type.sizes[0],
        "inner": x.sizes[-1],
        "choices": node.operands[3].type.sizes[1],
        "per_choice": int(len(x.sizes) == 3),
        "act": x.dtype.name,
        "beta": _number(node, "beta", 0.0) if layout.situ else 0.0,
        "linear_beta": _number(node, "linear_beta", "none") if layout.situ else "none",
    }


def refuse_grouped(node: Node, target: Target) -> Refusal | None:
    """Return why no grouped kernel implements a node, or None."""
    epilogue = node.attrs.get("epilogue", "none")
    if epilogue not in _EPILOGUES:
        return Refusal(f"epilogue must be {' or '.join(_EPILOGUES)}", epilogue)
    if (len(node.operands), len(node.results)) != (4, 1):
        return Refusal("grouped_gemm takes 4 operands to 1 result", len(node.results))
    wrong = refuse_dtype(node, 0, ("f32", "bf16")) or refuse_dtype(node, 1, ("mxfp4",))
    if wrong is not None:
        return wrong
    if node.results[0].type.dtype != node.operands[0].type.dtype:
        return Refusal("the result must have the dtype of x", node.results[0].type.dtype.name)
    return _refuse_sizes(node, target)


def grouped_cost(node: Node, target: Target) -> Cost:
    """Return bytes and operations: as many experts are read as the rows can choose."""
    experts, rows, inner = node.operands[1].type.sizes
    chosen = node.operands[3].type.elements
    weights = grouped_layout(node, target).nbytes(min(experts, chosen), inner)
    others = sum(v.type.nbytes for i, v in enumerate(node.operands) if i != 1)
    flops = 2 * chosen * rows * inner
    if node.attrs.get("epilogue") == "situ":
        flops += node.results[0].type.elements * SITU_FLOPS
    return Cost(weights + others, result_bytes(node), flops)


def list_bytes(node: Node) -> int:
    """Return the bytes of the list of experts that have rows, and its length."""
    present = min(node.operands[1].type.sizes[0], node.operands[3].type.elements)
    return padded(4 * (present + 1), _BLOCKS_OF_LIST)


def wide_bytes(node: Node) -> int:
    """Return the bytes of x as f32, where it has to be converted."""
    x = node.operands[0].type
    return 0 if x.dtype.name == "f32" else padded(4 * x.elements, _BLOCKS_OF_LIST)


@dataclass(frozen=True)
class GroupedBuffers:
    """The buffers of a kernel; matrices are flattened to [rows, columns].

    `present[0]` counts the experts that have rows, which follow it; `wide` is x in f32; `tiles` is
    the part of the scratch behind both, f32.
    """

    words: Any
    scales: Any
    offsets: Any
    order: Any
    out: Any
    wide: Any
    present: Any
    tiles: Any


def grouped_function(shape: GroupedShape, body: Callable[[GroupedBuffers], None]) -> Any:
    """Return a kernel: buffers, x converted to f32, the experts that have rows, then `body`."""
    with IRBuilder() as made, B.prim_func():
        B.func_attr({"tirx.noalias": True})
        names = ("x", "w", "offsets", "order", "y", "scratch")
        pointers = {name: B.arg(name, B.handle()) for name in names}
        tokens = B.arg("tokens", B.int64())
        buffers = _declare(shape, pointers, tokens)
        body(buffers)
    return made.get()


def row_of_x(shape: GroupedShape, buffers: GroupedBuffers, at: Any) -> Any:
    """Return the row of x at place `at` of the order."""
    flat = T.bind(T.Cast("int64", buffers.order[at]))
    return flat if shape.per_choice else T.bind(T.floordiv(flat, shape.choices))


def multiply_codes(
    shape: GroupedShape, buffers: GroupedBuffers, at: tuple[Any, Any], rows: Sequence[Any]
) -> list[list[Any]]:
    """Emit the product of some rows with a panel, decoding codes on the way.

    Args:
        shape: The constants.
        buffers: The buffers.
        at: Expert and panel.
        rows: Rows of x.

    Returns:
        For each row, low and high half, f32 lanes.
    """
    n = shape.lanes
    # One sum a row and half, over ascending k, of codes that carry their scale: the same sum as
    # over a decoded panel, so that a row's bits do not depend on how many rows its expert has.
    acc = zeroed(len(rows) * HALVES, n)
    table = magnitude_table(n)
    with B.serial(shape.inner // MX_BLOCK) as block:
        scales = [load_scale(shape, buffers, (*at, block), half) for half in range(HALVES)]
        with B.serial(WORDS_PER_BLOCK) as word:
            _add_word(shape, buffers, (*at, block, word), rows, (table, scales, acc))
    return [
        [T.bind(a[span(0, n)]) for a in acc[r * HALVES : (r + 1) * HALVES]]
        for r in range(len(rows))
    ]


def zeroed(count: int, lanes: int) -> list[Any]:
    """Return accumulators of zeros: small buffers, which the code generator keeps in registers."""
    made = [B.alloc_buffer((lanes,), "float32") for _ in range(count)]
    for buffer in made:
        put(buffer, splat(0.0, lanes), span(0, lanes))
    return made


def load_scale(shape: GroupedShape, buffers: GroupedBuffers, at: Any, half: int) -> Any:
    """Return the scales of half a panel for an mx_block; `at` is expert, panel, block."""
    expert, panel, block = at
    blocks, n = shape.inner // MX_BLOCK, shape.lanes
    index = ((expert * shape.panels + panel) * blocks + block) * HALVES + half
    start = T.int64(shape.layout.words_nbytes(shape.experts, shape.inner)) + index * n
    return decode_scale(buffers.scales[span(start, n)], n)


def _add_word(
    shape: GroupedShape, buffers: GroupedBuffers, at: Any, rows: Sequence[Any], into: Any
) -> None:
    """Emit the products of one word of each lane; `at` is expert, panel, block, word."""
    n = shape.lanes
    table, scales, acc = into
    words = [T.bind(buffers.words[(*at, h, span(0, n))]) for h in range(HALVES)]
    expert, panel, block, word = at
    ahead = block + PREFETCH_BYTES // (WORDS_PER_BLOCK * HALVES * n * 4)
    for h in range(HALVES):
        prefetch(buffers.words, expert, panel, ahead, word, h, 0)
    for i in range(CODES_PER_WORD):
        k = block * MX_BLOCK + word * CODES_PER_WORD + i
        codes = [decode_code(table, w, i, n) for w in words]
        values = [T.bind(code * scale) for code, scale in zip(codes, scales, strict=True)]
        for r, row in enumerate(rows):
            x = T.bind(splat(buffers.wide[row, k], n))
            for half in range(HALVES):
                total = acc[r * HALVES + half]
                put(total, total[span(0, n)] + values[half] * x, span(0, n))


def _declare(shape: GroupedShape, pointers: Mapping[str, Any], tokens: Any) -> GroupedBuffers:
    n, inner, layout = shape.lanes, shape.inner, shape.layout
    flat = T.bind(tokens * shape.choices)
    rows = flat if shape.per_choice else tokens
    blocks = inner // MX_BLOCK
    word_shape = (shape.experts, shape.panels, blocks, WORDS_PER_BLOCK, HALVES, n)
    x = B.decl_buffer((rows, inner), storage(shape.act), data=pointers["x"])
    total = layout.nbytes(shape.experts, inner)
    offsets = B.decl_buffer((shape.experts + 1,), "int32", data=pointers["offsets"])
    scratch = pointers["scratch"]
    count = T.bind(T.min(flat, T.int64(shape.experts)) + 1)
    lists = T.bind(T.floordiv(count * 4 + (_BLOCKS_OF_LIST - 1), _BLOCKS_OF_LIST) * _BLOCKS_OF_LIST)
    present = B.decl_buffer((count,), "int32", data=scratch)
    _list_experts(shape, offsets, present)
    wide, behind = x, lists
    if shape.act != "f32":
        wide = B.decl_buffer((rows, inner), "float32", data=_offset(scratch, lists))
        _convert(shape, x, wide, rows)
        size = rows * (inner * 4) + (_BLOCKS_OF_LIST - 1)
        behind = T.bind(lists + T.floordiv(size, _BLOCKS_OF_LIST) * _BLOCKS_OF_LIST)
    return GroupedBuffers(
        words=B.decl_buffer(word_shape, "uint32", data=pointers["w"]),
        scales=B.decl_buffer((T.int64(total),), "uint8", data=pointers["w"]),
        offsets=offsets,
        order=B.decl_buffer((flat,), "int32", data=pointers["order"]),
        out=B.decl_buffer((flat, layout.width), storage(shape.act), data=pointers["y"]),
        wide=wide,
        present=present,
        tiles=B.decl_buffer((1,), "float32", data=_offset(scratch, behind)),
    )


def _offset(pointer: Any, nbytes: Any) -> Any:
    return T.handle_add_byte_offset(pointer, nbytes)


def _list_experts(shape: GroupedShape, offsets: Any, present: Any) -> None:
    put(present, T.int32(0), 0)
    with B.serial(shape.experts) as e, B.If(offsets[e + 1] > offsets[e]), B.Then():
        put(present, present[0] + 1, 0)
        put(present, e, present[0])


def _convert(shape: GroupedShape, x: Any, wide: Any, rows: Any) -> None:
    n = shape.lanes
    with B.parallel(rows) as row, B.serial(shape.inner // n) as block:
        put(wide, widen(x[row, span(block * n, n)], shape.act, n), row, span(block * n, n))


def _refuse_sizes(node: Node, target: Target) -> Refusal | None:
    x, w = node.operands[0].type.sizes, node.operands[1].type.sizes
    offsets, order = node.operands[2].type.sizes, node.operands[3].type.sizes
    if w[2] % MX_BLOCK:
        return Refusal(f"K must be a multiple of {MX_BLOCK}", w[2])
    if x[-1] != w[2] or offsets != (w[0] + 1,) or x[:-1] not in (order[:1], order):
        return Refusal("shapes of x, w, offsets and order do not fit", (x, w, offsets, order))
    layout = grouped_layout(node, target)
    if layout.source_rows != w[1] or node.results[0].type.sizes != (*order, layout.width):
        return Refusal(f"the result uses {layout.source_rows} rows an expert", w[1])
    ids = node.operands[3].type.elements
    return None if ids < _ID_LIMIT else Refusal("2^31 flat row ids or more", ids)


def _number(node: Node, name: str, default: float | str) -> float | str:
    value = node.attrs.get(name, default)
    assert not isinstance(value, tuple | LayerAttr), f"{node.op}: {name} is {value}"
    return value if isinstance(value, str) else float(value)
