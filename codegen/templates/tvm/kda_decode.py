"""KDA token by token: the kernel of decode buckets.

One launch does all of a KDA layer between its projections. A task is one head of one segment; the
state is streamed in strips of columns that stay in the nearest cache between their two passes: the
first reads S'^T k and S'^T q, the second writes S' + k (beta e)^T. With e = v - S'^T k the output
is S^T q = S'^T q + (k . q) beta e. A segment of several tokens is correct too, only slower than in
the chunked kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.script import tirx as T

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
    dot,
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


class KdaDecode(SingleLaunch):
    """`kda` for buckets with one row a segment."""

    name = "kda_decode"
    op = "kda"
    reference = "kda"

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        rows, segments = node.operands[0].type.sizes[0], node.operands[14].type.sizes[0]
        if rows != segments:
            found = f"{rows} rows in {segments} segments"
            return Refusal("kda_decode takes one row a segment", found)
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
        """Return 0: a head's row fits the stack."""
        return 0

    def cost(self, node: Node, target: Target) -> Cost:
        """Return bytes and operations of one launch."""
        return kda_cost(node)

    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        return _kernel(kda_shape(constants))


@T.inline
def _gate(c, f, dt_bias, rate, qn, kn, em1, aq, ak, h, row):
    """em1 = decay - 1; aq, ak = q and k times the decay.

    Near 1 the rounding of the decay itself, repeated each token, would bend the time constant of a
    slow channel; decay - 1 is exact there.
    """
    for d in range(c.key // c.lanes):
        at = T.bind(h * c.key + d * c.lanes)
        bias = T.meta_var(dt_bias[span(at, c.lanes)])
        g = T.meta_var(log_decay(c, widen(f[row, span(at, c.lanes)], c.act, c.lanes), rate, bias))
        loss = T.meta_var(expm1(g, c.lanes))
        query = T.meta_var(hold(qn[0, span(d * c.lanes, c.lanes)]))
        key = T.meta_var(hold(kn[0, span(d * c.lanes, c.lanes)]))
        em1[span(d * c.lanes, c.lanes)] = loss
        aq[span(d * c.lanes, c.lanes)] = query + query * loss
        ak[span(d * c.lanes, c.lanes)] = key + key * loss


@T.inline
def _update(c, width, state, kn, vv, em1, aq, ak, kq, beta, h, slot):
    """Decay and correct the state by one token; vv[0] becomes the output before its norm."""
    acc = T.alloc_buffer((2 * width,), "float32")
    for strip in range(c.value // width):
        first = T.bind(strip * width)
        for u in T.unroll(2 * width // c.lanes):
            acc[span(u * c.lanes, c.lanes)] = splat(0.0, c.lanes)
        for d in range(c.key):
            for u in T.unroll(width // c.lanes):
                s = T.meta_var(hold(state[slot, h, d, span(first + u * c.lanes, c.lanes)]))
                acc[span(u * c.lanes, c.lanes)] += s * splat(ak[d], c.lanes)
                acc[span(width + u * c.lanes, c.lanes)] += s * splat(aq[d], c.lanes)
        for u in T.unroll(width // c.lanes):
            e = T.meta_var(
                hold(
                    beta
                    * (vv[0, span(first + u * c.lanes, c.lanes)] - acc[span(u * c.lanes, c.lanes)])
                )
            )
            acc[span(u * c.lanes, c.lanes)] = e
            vv[0, span(first + u * c.lanes, c.lanes)] = (
                acc[span(width + u * c.lanes, c.lanes)] + splat(kq[0], c.lanes) * e
            )
        for d in range(c.key):
            for u in T.unroll(width // c.lanes):
                s = T.meta_var(hold(state[slot, h, d, span(first + u * c.lanes, c.lanes)]))
                state[slot, h, d, span(first + u * c.lanes, c.lanes)] = s + (
                    s * splat(em1[d], c.lanes)
                    + splat(kn[0, d], c.lanes) * acc[span(u * c.lanes, c.lanes)]
                )


# One signature of 22 buffers and integers, their declarations and the task's order of parts:
# longer than the budget: splitting would only pass the same names on.
def _kernel(c: KdaShape) -> Any:
    @T.prim_func
    def kernel(
        q_h: T.handle, k_h: T.handle, v_h: T.handle, z_h: T.handle, f_h: T.handle, b_h: T.handle,
        conv_q_h: T.handle, conv_k_h: T.handle, conv_v_h: T.handle,
        a_log_h: T.handle, dt_bias_h: T.handle, o_norm_h: T.handle,
        history_h: T.handle, state_h: T.handle,
        seg_start_h: T.handle, seg_tokens_h: T.handle, slots_h: T.handle, context_h: T.handle,
        out_h: T.handle, rows: T.int64, segments: T.int64, slots: T.int64,
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
        for task in T.parallel(segments * c.heads):
            # Heads outermost: threads take runs of tasks, and live segments come first.
            h = T.bind(T.Cast("int32", task // segments))
            s = T.bind(task % segments)
            qn = T.alloc_buffer((1, c.key), "float32")
            kn = T.alloc_buffer((1, c.key), "float32")
            vv = T.alloc_buffer((1, c.value), "float32")
            em1 = T.alloc_buffer((c.key,), "float32")
            aq = T.alloc_buffer((c.key,), "float32")
            ak = T.alloc_buffer((c.key,), "float32")
            kq = T.alloc_buffer((1,), "float32")
            clear_padding(c, out, seg_start, seg_tokens, segments, rows, h, s, segments)
            slot = T.bind(T.Cast("int64", slot_of[s]))
            if seg_tokens[s] > 0 and context[s] == 0:
                forget(c, history, state, h, slot)
            for t in range(seg_tokens[s]):
                row = T.bind(T.Cast("int64", seg_start[s] + t))
                rate = T.meta_var(exp(splat(a_log[h], c.lanes), c.lanes))
                beta = T.meta_var(
                    sigmoid(widen(T.broadcast(b[row, h], c.lanes), c.act, c.lanes), c.lanes)
                )
                convolve(c, qn, 0, c.key, q, conv_q, history, 0, h, slot, row, 1)
                convolve(c, kn, 0, c.key, k, conv_k, history, c.keys, h, slot, row, 1)
                convolve(c, vv, 0, c.value, v, conv_v, history, 2 * c.keys, h, slot, row, 1)
                l2_normalise(c, qn, 0, c.scale)
                l2_normalise(c, kn, 0, 1.0)
                dot(c, kq, qn, kn, 0, c.key)
                _gate(c, f, dt_bias, rate, qn, kn, em1, aq, ak, h, row)
                _update(c, c.strip(4), state, kn, vv, em1, aq, ak, kq, beta, h, slot)
                write_output(c, out, vv, 0, z, o_norm, h, row)

    return kernel


TEMPLATES = (KdaDecode(),)
