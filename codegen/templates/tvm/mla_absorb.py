"""mla_absorb_q and mla_absorb_v: one small matrix product a head, into and out of latent space.

A task is a head and a group of its panels. It takes the rows in blocks that fit the registers, and
what remains in smaller ones; every sum runs over K in the same order, so that a row's result does
not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder

from k3c.codegen.template import padded, refuse_dtype, result_bytes
from k3c.codegen.templates.tvm.mla_absorb_layout import HALVES, AbsorbLayout, parse_absorb_layout
from k3c.codegen.templates.tvm.single_launch import SingleLaunch
from k3c.codegen.templates.tvm.vector import (
    bits,
    narrow,
    put,
    rounded,
    sigmoid,
    span,
    splat,
    storage,
    typed,
    widen,
)
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Constant, Cost, Scalar
from k3c.targets.target import Target

# The builder's annotations want an Expr where it takes Python numbers as well.
B: Any = builder

_HIGH_HALF = 0xFFFF0000
# Rows of a block by lanes: with two accumulators a row, 12 of 16 or 24 of 32 registers.
_BLOCK_ROWS = {8: 6, 16: 12}
# Blocks of what remains: (rows, most panels at once), so that 8 sums are open to hide latency.
_REST_BLOCKS = ((4, 1), (2, 2), (1, 4))
# Tasks of a head, where its panels can be split so.
_SPLITS = (4, 2, 1)
_ACTS = ("f32", "bf16")


@dataclass(frozen=True)
class AbsorbShape:
    """Compile-time constants of a kernel: its weight's layout, r, dr (of queries), act, gate."""

    layout: AbsorbLayout
    latent: int
    rope: int
    act: str
    gated: bool

    @property
    def lanes(self) -> int:
        """f32 elements of a vector."""
        return self.layout.lanes

    @property
    def inner(self) -> int:
        """K, the length of the sums."""
        return self.layout.inner(self.latent)

    @property
    def columns(self) -> int:
        """Columns of a head's product."""
        return self.layout.columns(self.latent)

    @property
    def panels(self) -> int:
        """Panels of a head."""
        return self.layout.panels(self.latent)

    @property
    def splits(self) -> int:
        """Tasks of a head."""
        return next(s for s in _SPLITS if self.panels % s == 0)

    @property
    def converts(self) -> bool:
        """Whether a block of x is first converted to f32."""
        return self.layout.half == "q" and self.act != "f32"

    @property
    def scratch_words(self) -> int:
        """f32 words of scratch: a block of rows of x a task."""
        tasks = self.layout.heads * self.splits
        return tasks * _BLOCK_ROWS[self.lanes] * self.inner if self.converts else 0

    @staticmethod
    def of(constants: Mapping[str, Constant]) -> AbsorbShape:
        """Return the shape that `constants` of a template described."""
        return AbsorbShape(
            layout=parse_absorb_layout(str(constants["layout"])),
            latent=int(constants["latent"]),
            rope=int(constants["rope"]),
            act=str(constants["act"]),
            gated=bool(constants["gated"]),
        )


class _MlaAbsorb(SingleLaunch):
    """What the two templates share; `half` names the layout."""

    half: str

    def layouts(self, node: Node, target: Target) -> Mapping[int, str]:
        """Return the layout of kv_b's half."""
        return {1: self._layout(node, target).name}

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: rows."""
        return (("rows", node.operands[0].type.sizes[0]),)

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the compile-time constants."""
        latent = node.operands[1].type.sizes[1]
        queries = self.half == "q"
        act = node.operands[0].type if queries else node.results[0].type
        return {
            "layout": self._layout(node, target).name,
            "latent": latent,
            "rope": node.results[0].type.sizes[2] - latent if queries else 0,
            "act": act.dtype.name,
            "gated": int(len(node.operands) > 2),
        }

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of rows as f32."""
        return padded(AbsorbShape.of(self.constants(node, target)).scratch_words * 4, 64)

    def cost(self, node: Node, target: Target) -> Cost:
        """Return half of kv_b read once, and a multiplication and an addition per product."""
        layout, latent = self._layout(node, target), node.operands[1].type.sizes[1]
        others = sum(v.type.nbytes for i, v in enumerate(node.operands) if i != 1)
        products = layout.heads * layout.inner(latent) * layout.columns(latent)
        flops = 2 * node.operands[0].type.sizes[0] * products
        return Cost(layout.nbytes(latent) + others, result_bytes(node), flops)

    def _layout(self, node: Node, target: Target) -> AbsorbLayout:
        sizes = [_integer(node, name) for name in ("heads", "nope_dim", "v_dim")]
        return AbsorbLayout(self.half, node.operands[1].type.dtype.name, target.lanes, *sizes)

    def _refuse_weight(self, node: Node) -> Refusal | None:
        heads, nope, value = (_integer(node, name) for name in ("heads", "nope_dim", "v_dim"))
        rows = node.operands[1].type.sizes[0]
        if rows != heads * (nope + value):
            return Refusal(f"kv_b must have {heads * (nope + value)} rows", rows)
        return refuse_dtype(node, 1, _ACTS)


class MlaAbsorbQ(_MlaAbsorb):
    """`mla_absorb_q`: q A[T, n * (dn + dr)], kv_b -> f32[T, n, r + dr]."""

    name, op, reference, half = "mla_absorb_q", "mla_absorb_q", "mla_absorb_q", "q"

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        (rows, width), out = node.operands[0].type.sizes, node.results[0].type
        heads, nope = _integer(node, "heads"), _integer(node, "nope_dim")
        wanted = (rows, heads, node.operands[1].type.sizes[1] + width // heads - nope)
        if (out.dtype.name, out.sizes) != ("f32", wanted) or width % heads:
            return Refusal(f"the result must be f32{list(wanted)}", str(out))
        return refuse_dtype(node, 0, _ACTS) or self._refuse_weight(node)

    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        shape = AbsorbShape.of(constants)
        layout, n = shape.layout, shape.lanes
        width = layout.nope + shape.rope

        def body(x: Any, w: Any, out: Any, scratch: Any, rows: Any) -> None:
            def convert(task: Any, row: Any, slot: int) -> None:
                step = n if shape.inner % n == 0 else 1
                with B.serial(shape.inner // step) as d:
                    at = span(T.floordiv(task, shape.splits) * width + d * step, step)
                    value = widen(x[row, at], shape.act, step)
                    put(scratch, value, task, slot, span(d * step, step))

            def source(task: Any, row: Any, slot: int, k: Any) -> Any:
                if shape.converts:
                    return scratch[task, slot, k]
                return x[row, T.floordiv(task, shape.splits) * width + k]

            def store(head: Any, row: Any, column: Any, value: Any, lanes: int) -> None:
                put(out, value, row, head, span(column, lanes))

            with B.parallel(layout.heads * shape.splits) as task:
                _emit_task(_Task(shape, w, rows, convert, source, store), task)
                first = task % shape.splits == 0
                with B.If(first), B.Then(), B.serial(rows) as row, B.serial(shape.rope) as d:
                    at = T.floordiv(task, shape.splits) * width + layout.nope + d
                    rope = widen(x[row, at], shape.act, 1)
                    put(out, rope, row, T.floordiv(task, shape.splits), shape.latent + d)

        return _function(shape, body)


class MlaAbsorbV(_MlaAbsorb):
    """`mla_absorb_v`: o_lat f32[T, n, r], kv_b, maybe z A[T, n * dv] -> A[T, n * dv]."""

    name, op, reference, half = "mla_absorb_v", "mla_absorb_v", "mla_absorb_v", "v"

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        (rows, heads, latent), out = node.operands[0].type.sizes, node.results[0].type
        wanted = (rows, _integer(node, "heads") * _integer(node, "v_dim"))
        if out.sizes != wanted or heads * _integer(node, "v_dim") != wanted[1]:
            return Refusal(f"the result must be {list(wanted)}", str(out))
        if latent != node.operands[1].type.sizes[1]:
            return Refusal(f"kv_b must be {latent} wide", node.operands[1].type.sizes[1])
        for other in node.operands[2:]:
            if other.type != out:
                return Refusal(f"the gate must be {out}", str(other.type))
        if out.dtype.name not in _ACTS:
            return Refusal("the result must be f32 or bf16", out.dtype.name)
        return refuse_dtype(node, 0, ("f32",)) or self._refuse_weight(node)

    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        shape = AbsorbShape.of(constants)
        value_dim, act = shape.layout.value, shape.act

        def body(x: Any, w: Any, out: Any, z: Any, rows: Any) -> None:
            def source(task: Any, row: Any, slot: int, k: Any) -> Any:
                return x[row, T.floordiv(task, shape.splits), k]

            def store(head: Any, row: Any, column: Any, value: Any, lanes: int) -> None:
                at = span(head * value_dim + column, lanes)
                if shape.gated:
                    gate = rounded(sigmoid(widen(z[row, at], act, lanes), lanes), act, lanes)
                    value = rounded(value, act, lanes) * gate
                put(out, narrow(value, act, lanes), row, at)

            with B.parallel(shape.layout.heads * shape.splits) as task:
                _emit_task(_Task(shape, w, rows, None, source, store), task)

        return _function(shape, body)


@dataclass(frozen=True)
class _Task:
    """How a task reads x and stores its sums.

    Attributes:
        shape: The constants.
        w: The packed weight.
        rows: Rows of x.
        convert: (task, row, slot): convert a row of x to f32; None where x is f32.
        source: (task, row, slot, k): f32 element k of a row of x.
        store: (head, row, column, f32 lanes, lanes): store at a column of the head.
    """

    shape: AbsorbShape
    w: Any
    rows: Any
    convert: Callable[[Any, Any, int], None] | None
    source: Callable[[Any, Any, int, Any], Any]
    store: Callable[[Any, Any, Any, Any, int], None]


def _function(shape: AbsorbShape, body: Callable[..., None]) -> Any:
    """Return a kernel: x, w, [z], out, [scratch], rows; body gets x, w, out, z or scratch, rows."""
    names = ["x", "w", *(["z"] if shape.gated else []), "out"]
    names += ["scratch"] if shape.scratch_words else []
    layout, n = shape.layout, shape.lanes
    heads, latent, values = layout.heads, shape.latent, layout.heads * layout.value
    with IRBuilder() as made, B.prim_func():
        B.func_attr({"tirx.noalias": True})
        pointer = {name: B.arg(name, B.handle()) for name in names}
        rows = B.arg("rows", B.int64())
        panel = (n,) if layout.dtype == "bf16" else (HALVES * n,)
        kind = "uint32" if layout.dtype == "bf16" else "float32"
        panels = (heads * shape.panels, shape.inner, *panel)
        w = B.decl_buffer(panels, kind, data=pointer["w"])
        other = None
        if layout.half == "q":
            queries = (rows, heads * (layout.nope + shape.rope))
            x = B.decl_buffer(queries, storage(shape.act), data=pointer["x"])
            latents = (rows, heads, latent + shape.rope)
            out = B.decl_buffer(latents, "float32", data=pointer["out"])
            if shape.scratch_words:
                blocks = (heads * shape.splits, _BLOCK_ROWS[n], shape.inner)
                other = B.decl_buffer(blocks, "float32", data=pointer["scratch"])
        else:
            x = B.decl_buffer((rows, heads, latent), "float32", data=pointer["x"])
            out = B.decl_buffer((rows, values), storage(shape.act), data=pointer["out"])
            if shape.gated:
                other = B.decl_buffer((rows, values), storage(shape.act), data=pointer["z"])
        body(x, w, out, other, rows)
    return made.get()


def _emit_task(t: _Task, task: Any) -> None:
    """Emit all rows of one task: full blocks, then ever smaller ones."""
    group = t.shape.panels // t.shape.splits
    first = T.bind(task % t.shape.splits * group)
    base, rest = T.int64(0), t.rows
    for size, most in ((_BLOCK_ROWS[t.shape.lanes], 1), *_REST_BLOCKS):
        at_once = most if group % most == 0 else 1
        with B.serial(T.floordiv(rest, size)) as index:
            rows = [T.bind(base + index * size + i) for i in range(size)]
            _emit_block(t, task, rows, (first, group, at_once))
        base = T.bind(base + T.floordiv(rest, size) * size)
        rest = T.bind(T.floormod(rest, size))


def _emit_block(t: _Task, task: Any, rows: Sequence[Any], panels: tuple[Any, int, int]) -> None:
    """Emit some rows times panels given as (first, count, how many at once)."""
    first, count, at_once = panels
    if t.shape.converts and t.convert:
        for slot, row in enumerate(rows):
            t.convert(task, row, slot)
    with B.serial(count // at_once) as index:
        taken = [T.bind(first + index * at_once + i) for i in range(at_once)]
        sums = _accumulate(t, task, rows, taken)
        head = T.floordiv(task, t.shape.splits)
        for row, by_panel in zip(rows, sums, strict=True):
            for panel, halves in zip(taken, by_panel, strict=True):
                for half in range(HALVES):
                    column = T.bind((panel * HALVES + half) * t.shape.lanes)
                    _store_cut(t, (head, row, column), halves[half])


def _accumulate(t: _Task, task: Any, rows: Sequence[Any], panels: Sequence[Any]) -> Any:
    """Return for each row and panel the two halves of the sums, as buffers."""
    n, whole = t.shape.lanes, span(0, t.shape.lanes)
    acc = [[[B.alloc_buffer((n,), "float32") for _ in range(HALVES)] for _ in panels] for _ in rows]
    for a in (a for by_panel in acc for halves in by_panel for a in halves):
        put(a, splat(0.0, n), whole)
    base = T.floordiv(task, t.shape.splits) * t.shape.panels
    with B.serial(t.shape.inner) as k:
        loaded = [_load_panel(t, base + panel, k) for panel in panels]
        for slot, row in enumerate(rows):
            x = T.bind(splat(t.source(task, row, slot, k), n))
            for halves, sums in zip(loaded, acc[slot], strict=True):
                for value, a in zip(halves, sums, strict=True):
                    put(a, a[whole] + value * x, whole)
    return acc


def _load_panel(t: _Task, panel: Any, k: Any) -> tuple[Any, Any]:
    n = t.shape.lanes
    if t.shape.layout.dtype == "f32":
        return T.bind(t.w[panel, k, span(0, n)]), T.bind(t.w[panel, k, span(n, n)])
    word, kind = T.bind(t.w[panel, k, span(0, n)]), typed("float32", n)
    low = T.bind(T.reinterpret(kind, word << bits(16, n)))
    return low, T.bind(T.reinterpret(kind, word & bits(_HIGH_HALF, n)))


def _store_cut(t: _Task, at: tuple[Any, Any, Any], sums: Any) -> None:
    """Emit a store of a vector of sums, cut at the head's last column."""
    n, columns = t.shape.lanes, t.shape.columns
    head, row, column = at
    always = columns % (HALVES * n) == 0
    inside, then = (nullcontext(),) * 2 if always else (B.If(column + n <= columns), B.Then())
    with inside, then:
        t.store(head, row, column, sums[span(0, n)], n)
    if columns % n:
        edge = B.If(column + n > columns), B.Then(), B.serial(n)
        with edge[0], edge[1], edge[2] as i, B.If(column + i < columns), B.Then():
            t.store(head, row, column + i, sums[i], 1)


def _integer(node: Node, name: str) -> int:
    value = node.attrs[name]
    assert isinstance(value, int), f"{name} {value!r} is no integer"
    return value


TEMPLATES = (MlaAbsorbQ(), MlaAbsorbV())
