"""KDA, token by token: the kernel of decode buckets."""

from __future__ import annotations

from tvm.script import tirx as T

from k3c.codegen.templates.tvm.kda_common import (
    KdaShape,
    clear_padding,
    convolve,
    dot,
    expm1,
    forget,
    l2_normalise,
    log_decay,
    exp,
    sigmoid,
    span,
    splat,
    widen,
    write_output,
)


@T.inline
def update_state(c, state, qn, kn, vv, em1, ak, aq, kq, beta, h, slot):
    """One token: decay and correct the state; vv[0] becomes the output before its norm."""
    width = c.strip
    parts = width // c.lanes
    acc = T.alloc_buffer((2 * width,), "float32", scope="local")
    for strip in range(c.value // width):
        for u in T.unroll(2 * parts):
            acc[span(u * c.lanes, c.lanes)] = splat(0.0, c.lanes)
        for d in range(c.key):
            for u in T.unroll(parts):
                s = T.bind(state[slot, h, d, span(strip * width + u * c.lanes, c.lanes)])
                acc[span(u * c.lanes, c.lanes)] += s * splat(ak[d], c.lanes)
                acc[span(width + u * c.lanes, c.lanes)] += s * splat(aq[d], c.lanes)
        for u in T.unroll(parts):
            at = T.bind(strip * width + u * c.lanes)
            e = T.bind(beta * (vv[0, span(at, c.lanes)] - acc[span(u * c.lanes, c.lanes)]))
            acc[span(u * c.lanes, c.lanes)] = e
            vv[0, span(at, c.lanes)] = (
                acc[span(width + u * c.lanes, c.lanes)] + splat(kq, c.lanes) * e
            )
        for d in range(c.key):
            for u in T.unroll(parts):
                at = T.bind(strip * width + u * c.lanes)
                s = T.bind(state[slot, h, d, span(at, c.lanes)])
                state[slot, h, d, span(at, c.lanes)] = s + (
                    s * splat(em1[0, d], c.lanes)
                    + splat(kn[0, d], c.lanes) * acc[span(u * c.lanes, c.lanes)]
                )


def build(c: KdaShape):
    """Return the kernel; rows, segments and slots are its run-time integers."""

    @T.prim_func
    def kernel(
        q_h: T.handle,
        k_h: T.handle,
        v_h: T.handle,
        z_h: T.handle,
        f_h: T.handle,
        b_h: T.handle,
        conv_q_h: T.handle,
        conv_k_h: T.handle,
        conv_v_h: T.handle,
        a_log_h: T.handle,
        dt_bias_h: T.handle,
        o_norm_h: T.handle,
        history_h: T.handle,
        state_h: T.handle,
        seg_start_h: T.handle,
        seg_tokens_h: T.handle,
        slots_h: T.handle,
        context_h: T.handle,
        out_h: T.handle,
        rows: T.int64,
        segments: T.int64,
        slots: T.int64,
    ):
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
            h = T.bind(T.Cast("int32", task // segments))
            s = T.bind(task % segments)
            qn = T.alloc_buffer((1, c.key), "float32", scope="local")
            kn = T.alloc_buffer((1, c.key), "float32", scope="local")
            vv = T.alloc_buffer((1, c.value), "float32", scope="local")
            em1 = T.alloc_buffer((1, c.key), "float32", scope="local")
            ak = T.alloc_buffer((c.key,), "float32", scope="local")
            aq = T.alloc_buffer((c.key,), "float32", scope="local")
            kq = T.alloc_buffer((1,), "float32", scope="local")
            clear_padding(c, out, seg_start, seg_tokens, segments, rows, h, s)
            slot = T.bind(T.Cast("int64", slot_of[s]))
            rate = T.bind(exp(splat(a_log[h], c.lanes), c.lanes))
            if seg_tokens[s] > 0 and context[s] == 0:
                forget(c, history, state, h, slot)
            for t in range(seg_tokens[s]):
                row = T.bind(T.Cast("int64", seg_start[s] + t))
                convolve(c, qn, c.key, q, conv_q, history, 0, h, slot, row, 1)
                convolve(c, kn, c.key, k, conv_k, history, c.keys, h, slot, row, 1)
                convolve(c, vv, c.value, v, conv_v, history, 2 * c.keys, h, slot, row, 1)
                l2_normalise(c, qn, 0, c.scale)
                l2_normalise(c, kn, 0, 1.0)
                dot(c, kq, qn, kn, 0, c.key)
                for d in range(c.key // c.lanes):
                    at = T.bind(h * c.key + d * c.lanes)
                    here = span(d * c.lanes, c.lanes)
                    g = log_decay(
                        c, widen(f[row, span(at, c.lanes)], c), rate, dt_bias[span(at, c.lanes)]
                    )
                    em1[0, span(d * c.lanes, c.lanes)] = expm1(g, c.lanes)
                    ak[span(d * c.lanes, c.lanes)] = (
                        kn[0, span(d * c.lanes, c.lanes)]
                        + kn[0, span(d * c.lanes, c.lanes)] * em1[0, span(d * c.lanes, c.lanes)]
                    )
                    aq[span(d * c.lanes, c.lanes)] = (
                        qn[0, span(d * c.lanes, c.lanes)]
                        + qn[0, span(d * c.lanes, c.lanes)] * em1[0, span(d * c.lanes, c.lanes)]
                    )
                beta = sigmoid(widen(T.broadcast(b[row, h], c.lanes), c), c.lanes)
                update_state(c, state, qn, kn, vv, em1, ak, aq, kq[0], beta, h, slot)
                write_output(c, out, vv, 0, z, o_norm, h, row)

    return kernel
