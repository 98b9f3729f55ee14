"""KDA in chunks of 16 tokens: the kernel of prefill and score buckets.

A task is one head: its segments, then their chunks, in order, so that scratch is planned once a
head. Within a chunk, with G the running sum of log decays and T[d, j] = K_j[d] exp(G_i - G_j)[d]
kept while i advances (multiplied by exp(g_i) each token, so no exponential leaves (0, 1]):

    L_ij = beta_i K_i . T_j (j < i)      P_ij = Q_i . T_j (j <= i)
    E = (I + L)^-1 beta (V - (K exp(G)) S)       by forward substitution
    O = (Q exp(G)) S + P E               S' = S + expm1(G_C) S + T^T E

The last three run strip by strip over the columns of S: a strip of the state stays in the nearest
cache, and the state is read and written once a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from k3c.codegen.template import padded
from k3c.codegen.templates.tvm.kda_common import (
    KdaShape,
    kda_constants,
    kda_cost,
    kda_layouts,
    kda_scalars,
    kda_shape,
    refuse_kda,
)
from k3c.codegen.templates.tvm.kda_parts import (
    clear_padding,
    convolve,
    forget,
    l2_normalise,
    log_decay,
    write_output,
)
from k3c.codegen.templates.tvm.single_launch import SingleLaunch
from k3c.codegen.templates.tvm.vector import exp, expm1, hold, sigmoid, span, splat, widen
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Constant, Cost, Scalar
from k3c.targets.target import Target

CHUNK = 16
_TILE = 4  # rows of a register tile; divides CHUNK and every accepted head width


@dataclass(frozen=True)
class _Scratch:
    """f32 scratch of all heads: for each part (rows of one head, width) and its first byte."""

    shape: KdaShape

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Rows of one head and width of each part."""
        c = self.shape
        width = c.strip(2)
        return {
            "qn": (CHUNK, c.key),
            "kn": (CHUNK, c.key),
            "em1": (CHUNK, c.key),
            "vv": (CHUNK, c.value),
            "beta": (CHUNK, c.lanes),
            "reads": (2 * CHUNK, c.key),  # K exp(G), then Q exp(G)
            "carried": (c.key, CHUNK),  # T
            "lower": (CHUNK, CHUNK),  # L
            "mixed": (CHUNK, CHUNK),  # P
            "total": (2, c.key),  # exp(G) and G of the chunk's last row so far
            "strip": (c.key, width),
            "found": (2 * CHUNK, width),  # reads @ strip
            "error": (CHUNK, width),  # E
        }

    def offset(self, name: str) -> int:
        """Return the first byte of a part; without that part, the size."""
        at = 0
        for part, (rows, width) in self.parts.items():
            if part == name:
                break
            at += padded(4 * self.shape.heads * rows * width, 64)
        return at


class KdaPrefill(SingleLaunch):
    """`kda` for buckets with more rows than segments."""

    name = "kda_prefill"
    op = "kda"
    reference = "kda"

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        rows, segments = node.operands[0].type.sizes[0], node.operands[14].type.sizes[0]
        if rows <= segments:
            found = f"{rows} rows in {segments} segments"
            return Refusal("kda_prefill takes more rows than segments", found)
        return refuse_kda(node)

    def layouts(self, node: Node, target: Target) -> Mapping[int, str]:
        """Return the layout of the convolution weights."""
        return kda_layouts()

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the compile-time constants."""
        return kda_constants(node, target)

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: rows, segments, slots."""
        return kda_scalars(node)

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of a chunk's matrices, for every head."""
        return _Scratch(kda_shape(kda_constants(node, target))).offset("")

    def cost(self, node: Node, target: Target) -> Cost:
        """Return bytes and operations of one launch."""
        return kda_cost(node)

    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        shape = kda_shape(constants)
        return _kernel(shape, _Scratch(shape))


@T.inline
def _decay_reads(c, w, f, dt_bias, rate, h, i, row):
    """For token i: em1 = decay - 1, and the rows of `reads`; `total` advances."""
    at_i = T.bind(h * CHUNK + i)
    for d in range(c.key // c.lanes):
        at = T.bind(h * c.key + d * c.lanes)
        here = T.meta_var(span(d * c.lanes, c.lanes))
        raw = T.meta_var(widen(f[row, span(at, c.lanes)], c.act, c.lanes))
        g = T.meta_var(log_decay(c, raw, rate, dt_bias[span(at, c.lanes)]))
        loss = T.meta_var(expm1(g, c.lanes))
        kept = T.meta_var(hold(w["total"][2 * h, here] * (splat(1.0, c.lanes) + loss)))
        w["em1"][at_i, here] = loss
        w["total"][2 * h, here] = kept
        w["total"][2 * h + 1, here] += g
        w["reads"][h * 2 * CHUNK + i, here] = w["kn"][at_i, here] * kept
        w["reads"][h * 2 * CHUNK + CHUNK + i, here] = w["qn"][at_i, here] * kept


@T.inline
def _pairs(c, w, h, i):
    """Row i of L and P: decay T by token i, set its column i to K_i, multiply by K_i and Q_i."""
    row = T.bind(h * CHUNK + i)
    sums = T.alloc_buffer((2 * _TILE * c.lanes,), "float32")
    for u in T.unroll(CHUNK // c.lanes):
        if u * c.lanes <= i:
            for r in T.unroll(2 * _TILE):
                sums[span(r * c.lanes, c.lanes)] = splat(0.0, c.lanes)
            for d in range(c.key // _TILE):
                for r in T.unroll(_TILE):
                    at = T.bind(h * c.key + d * _TILE + r)
                    key = T.meta_var(splat(w["kn"][row, d * _TILE + r], c.lanes))
                    query = T.meta_var(splat(w["qn"][row, d * _TILE + r], c.lanes))
                    loss = T.meta_var(splat(w["em1"][row, d * _TILE + r], c.lanes))
                    old = T.meta_var(hold(w["carried"][at, span(u * c.lanes, c.lanes)]))
                    lane = T.meta_var(span(u * c.lanes, c.lanes))
                    new = T.meta_var(
                        hold(T.Select(lane == T.broadcast(i, c.lanes), key, old + old * loss))
                    )
                    w["carried"][at, span(u * c.lanes, c.lanes)] = new
                    sums[span(2 * r * c.lanes, c.lanes)] += new * key
                    sums[span((2 * r + 1) * c.lanes, c.lanes)] += new * query
            for r in T.unroll(_TILE - 1):
                for half in T.unroll(2):
                    sums[span(half * c.lanes, c.lanes)] += sums[
                        span((2 * r + 2 + half) * c.lanes, c.lanes)
                    ]
            w["lower"][row, span(u * c.lanes, c.lanes)] = (
                sums[span(0, c.lanes)] * w["beta"][row, span(0, c.lanes)]
            )
            w["mixed"][row, span(u * c.lanes, c.lanes)] = sums[span(c.lanes, c.lanes)]


@T.inline
def _read_strip(c, width, w, h, n):
    """Set found = reads @ strip for the chunk's n rows of K exp(G) and of Q exp(G)."""
    acc = T.alloc_buffer((_TILE * width,), "float32")
    for half in range(2):
        for tile in range((n + _TILE - 1) // _TILE):
            first = T.bind((h * 2 + half) * CHUNK + tile * _TILE)
            for u in T.unroll(_TILE * width // c.lanes):
                acc[span(u * c.lanes, c.lanes)] = splat(0.0, c.lanes)
            for d in range(c.key):
                for r in T.unroll(_TILE):
                    for u in T.unroll(width // c.lanes):
                        acc[span(r * width + u * c.lanes, c.lanes)] += (
                            splat(w["reads"][first + r, d], c.lanes)
                            * w["strip"][h * c.key + d, span(u * c.lanes, c.lanes)]
                        )
            for r in T.unroll(_TILE):
                for u in T.unroll(width // c.lanes):
                    w["found"][first + r, span(u * c.lanes, c.lanes)] = acc[
                        span(r * width + u * c.lanes, c.lanes)
                    ]


@T.inline
def _solve_strip(c, width, w, h, n, column):
    """Set error = E by forward substitution, then the output rows, which replace v in `vv`."""
    acc = T.alloc_buffer((width,), "float32")
    for i in range(n):
        row = T.bind(h * CHUNK + i)
        for u in T.unroll(width // c.lanes):
            acc[span(u * c.lanes, c.lanes)] = w["beta"][row, span(0, c.lanes)] * (
                w["vv"][row, span(column + u * c.lanes, c.lanes)]
                - w["found"][h * 2 * CHUNK + i, span(u * c.lanes, c.lanes)]
            )
        for j in range(i):
            for u in T.unroll(width // c.lanes):
                acc[span(u * c.lanes, c.lanes)] -= (
                    splat(w["lower"][row, j], c.lanes)
                    * w["error"][h * CHUNK + j, span(u * c.lanes, c.lanes)]
                )
        for u in T.unroll(width // c.lanes):
            w["error"][row, span(u * c.lanes, c.lanes)] = acc[span(u * c.lanes, c.lanes)]
            acc[span(u * c.lanes, c.lanes)] = w["found"][
                (h * 2 + 1) * CHUNK + i, span(u * c.lanes, c.lanes)
            ]
        for j in range(i + 1):
            for u in T.unroll(width // c.lanes):
                acc[span(u * c.lanes, c.lanes)] += (
                    splat(w["mixed"][row, j], c.lanes)
                    * w["error"][h * CHUNK + j, span(u * c.lanes, c.lanes)]
                )
        for u in T.unroll(width // c.lanes):
            w["vv"][row, span(column + u * c.lanes, c.lanes)] = acc[span(u * c.lanes, c.lanes)]


@T.inline
def _write_strip(c, width, w, state, h, slot, n, column):
    """The strip of the state after the chunk; row 2h+1 of `total` holds expm1(G_C) by now."""
    acc = T.alloc_buffer((_TILE * width,), "float32")
    for tile in range(c.key // _TILE):
        for r in T.unroll(_TILE):
            for u in T.unroll(width // c.lanes):
                s = T.meta_var(
                    hold(w["strip"][h * c.key + tile * _TILE + r, span(u * c.lanes, c.lanes)])
                )
                acc[span(r * width + u * c.lanes, c.lanes)] = s + s * splat(
                    w["total"][2 * h + 1, tile * _TILE + r], c.lanes
                )
        for j in range(n):
            for r in T.unroll(_TILE):
                for u in T.unroll(width // c.lanes):
                    acc[span(r * width + u * c.lanes, c.lanes)] += (
                        splat(w["carried"][h * c.key + tile * _TILE + r, j], c.lanes)
                        * w["error"][h * CHUNK + j, span(u * c.lanes, c.lanes)]
                    )
        for r in T.unroll(_TILE):
            for u in T.unroll(width // c.lanes):
                state[slot, h, tile * _TILE + r, span(column + u * c.lanes, c.lanes)] = acc[
                    span(r * width + u * c.lanes, c.lanes)
                ]


@T.inline
def _recurrence(c, width, w, state, h, slot, n):
    """The chunk's outputs, into `vv`, and the state after it."""
    for d in range(c.key // c.lanes):
        here = T.meta_var(span(d * c.lanes, c.lanes))
        w["total"][2 * h + 1, here] = expm1(w["total"][2 * h + 1, here], c.lanes)
    for strip in range(c.value // width):
        column = T.bind(strip * width)
        for d in range(c.key):
            for u in T.unroll(width // c.lanes):
                w["strip"][h * c.key + d, span(u * c.lanes, c.lanes)] = state[
                    slot, h, d, span(column + u * c.lanes, c.lanes)
                ]
        _read_strip(c, width, w, h, n)
        _solve_strip(c, width, w, h, n, column)
        _write_strip(c, width, w, state, h, slot, n, column)


@T.inline
def _clear_chunk(c, w, h):
    """Start a chunk: T = 0, exp(G) = 1, G = 0."""
    for d in range(c.key):
        for u in T.unroll(CHUNK // c.lanes):
            w["carried"][h * c.key + d, span(u * c.lanes, c.lanes)] = splat(0.0, c.lanes)
    for d in range(c.key // c.lanes):
        w["total"][2 * h, span(d * c.lanes, c.lanes)] = splat(1.0, c.lanes)
        w["total"][2 * h + 1, span(d * c.lanes, c.lanes)] = splat(0.0, c.lanes)


def _part(c: KdaShape, scratch: _Scratch, workspace: Any, name: str) -> Any:
    """Declare one part of the workspace as f32[heads * rows, width]."""
    rows, width = scratch.parts[name]
    start = T.bind(T.handle_add_byte_offset(workspace, scratch.offset(name)))
    return T.decl_buffer((c.heads * rows, width), "float32", data=start)


# One signature of 23 buffers and integers, their declarations and the task's order of parts:
# longer than the budget: splitting would only pass the same names on.
def _kernel(c: KdaShape, scratch: _Scratch) -> Any:
    @T.prim_func
    def kernel(
        q_h: T.handle, k_h: T.handle, v_h: T.handle, z_h: T.handle, f_h: T.handle, b_h: T.handle,
        conv_q_h: T.handle, conv_k_h: T.handle, conv_v_h: T.handle,
        a_log_h: T.handle, dt_bias_h: T.handle, o_norm_h: T.handle,
        history_h: T.handle, state_h: T.handle,
        seg_start_h: T.handle, seg_tokens_h: T.handle, slots_h: T.handle, context_h: T.handle,
        out_h: T.handle, workspace_h: T.handle, rows: T.int64, segments: T.int64, slots: T.int64,
    ):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        q = T.decl_buffer((rows, c.keys), c.storage, data=q_h)
        k = T.decl_buffer((rows, c.keys), c.storage, data=k_h)
        v = T.decl_buffer((rows, c.values), c.storage, data=v_h)
        z = T.decl_buffer((rows, c.values), c.storage, data=z_h)
        f = T.decl_buffer((rows, c.keys), c.storage, data=f_h)
        b = T.decl_buffer((rows, c.heads), c.storage, data=b_h)
        conv_q = T.decl_buffer((4, c.keys), "float32", data=conv_q_h)
        conv_k = T.decl_buffer((4, c.keys), "float32", data=conv_k_h)
        conv_v = T.decl_buffer((4, c.values), "float32", data=conv_v_h)
        a_log = T.decl_buffer((c.heads,), "float32", data=a_log_h)
        dt_bias = T.decl_buffer((c.keys,), "float32", data=dt_bias_h)
        o_norm = T.decl_buffer((c.value,), "float32", data=o_norm_h)
        history = T.decl_buffer((slots, 3, c.channels), c.storage, data=history_h)
        state = T.decl_buffer((slots, c.heads, c.key, c.value), "float32", data=state_h)
        seg_start = T.decl_buffer((segments,), "int32", data=seg_start_h)
        seg_tokens = T.decl_buffer((segments,), "int32", data=seg_tokens_h)
        slot_of = T.decl_buffer((segments,), "int32", data=slots_h)
        context = T.decl_buffer((segments,), "int32", data=context_h)
        out = T.decl_buffer((rows, c.values), c.storage, data=out_h)
        w = T.meta_var({name: _part(c, scratch, workspace_h, name) for name in scratch.parts})
        for h in T.parallel(c.heads):
            first = T.bind(h * CHUNK)
            clear_padding(c, out, seg_start, seg_tokens, segments, rows, h, T.int64(0), 1)
            for s in range(segments):
                slot = T.bind(T.Cast("int64", slot_of[s]))
                if seg_tokens[s] > 0 and context[s] == 0:
                    forget(c, history, state, h, slot)
                for chunk in range((seg_tokens[s] + CHUNK - 1) // CHUNK):
                    n = T.bind(T.min(CHUNK, seg_tokens[s] - chunk * CHUNK))
                    row = T.bind(T.Cast("int64", seg_start[s] + chunk * CHUNK))
                    rate = T.meta_var(exp(splat(a_log[h], c.lanes), c.lanes))
                    convolve(c, w["qn"], first, c.key, q, conv_q, history, 0, h, slot, row, n)
                    convolve(c, w["kn"], first, c.key, k, conv_k, history, c.keys, h, slot, row, n)
                    convolve(
                        c, w["vv"], first, c.value, v, conv_v, history, 2 * c.keys, h, slot, row, n
                    )
                    _clear_chunk(c, w, h)
                    for i in range(n):
                        write = T.meta_var(
                            widen(T.broadcast(b[row + i, h], c.lanes), c.act, c.lanes)
                        )
                        w["beta"][first + i, span(0, c.lanes)] = sigmoid(write, c.lanes)
                        l2_normalise(c, w["qn"], first + i, c.scale)
                        l2_normalise(c, w["kn"], first + i, 1.0)
                        _decay_reads(c, w, f, dt_bias, rate, h, i, row + i)
                        _pairs(c, w, h, i)
                    _recurrence(c, c.strip(2), w, state, h, slot, n)
                    for i in range(n):
                        write_output(c, out, w["vv"], first + i, z, o_norm, h, row + i)

    return kernel


TEMPLATES = (KdaPrefill(),)
