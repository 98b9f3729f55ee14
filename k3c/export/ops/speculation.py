"""References of speculative verification: KDA without a write to its state, and the fold after it.

A verify step reads the states of its requests and keeps, for every token, what the token did to
them. Once it is known how many tokens stand, the fold does the same to the states.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from k3c.export.ops.kda import kda_gate, short_conv
from k3c.export.ops.linear import linear
from k3c.export.ops.norm import gated_rms_norm, l2_norm
from k3c.export.ops.registry import internal, reference
from k3c.export.ops.segments import live_segments


def _recurrent_with_records(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token; return o and the updates u, both f32[T, H, V]."""
    outputs, updates = [], []
    for t in range(q.shape[0]):
        state = g[t].exp()[..., None] * state
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        updates.append(beta[t][:, None] * error)
        state = state + k[t][..., None] * updates[-1][:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs), torch.stack(updates)


@reference("kda_verify")
def kda_verify(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, f_a: Tensor, b: Tensor,
    conv_q: Tensor, conv_k: Tensor, conv_v: Tensor, a_log: Tensor, dt_bias: Tensor, o_norm: Tensor,
    f_b: Tensor, conv_state: Tensor, kda_state: Tensor,
    rec_k: Tensor, rec_g: Tensor, rec_u: Tensor, rec_conv: Tensor,
    seg_start: Tensor, seg_tokens: Tensor, slots: Tensor, context: Tensor,
    *, lower_bound: float | str | None, scale: float, l2_eps: float, eps: float, **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`kda_fb` that writes no state but, by slot, what each token does to it.

    By slot stand: rec_k f32[S, W, H, K], normalised keys; rec_g f32[S, W, H, K], log decays, where
    context is 0 that of the first token -inf, because the slot's state does not count; rec_u
    f32[S, W, H, V], beta times the prediction errors; rec_conv A[S, W, 3P], raw rows of the
    convolution.

    Returns:
        o A[T, P] (padding rows zero), rec_k, rec_g, rec_u and rec_conv; tokens that a segment does
        not have leave their records alone.
    """
    where = (seg_start, seg_tokens, slots, context)
    heads, raw = b.shape[1], torch.cat([q, k, v], -1)
    q, k, v, _ = short_conv(q, k, v, conv_q, conv_k, conv_v, conv_state, *where)
    normal = [l2_norm(q, heads, scale, l2_eps), l2_norm(k, heads, 1.0, l2_eps), internal(v)]
    gates = kda_gate(linear(f_a, f_b), a_log, dt_bias, lower_bound)
    qh, kh, vh, gh = (x.unflatten(-1, (heads, -1)) for x in (*normal, gates))
    beta, out = torch.sigmoid(internal(b)), torch.zeros_like(v)
    rec_k, rec_g, rec_u, rec_conv = (x.clone() for x in (rec_k, rec_g, rec_u, rec_conv))
    for segment in live_segments(seg_start, seg_tokens, context):
        slot, rows, n = int(slots[segment.index]), segment.rows, segment.tokens
        before = internal(kda_state[slot])
        state = before if segment.context else torch.zeros_like(before)
        o, u = _recurrent_with_records(qh[rows], kh[rows], vh[rows], gh[rows], beta[rows], state)
        out[rows] = o.flatten(-2).to(v.dtype)
        rec_k[slot, :n], rec_g[slot, :n], rec_u[slot, :n] = kh[rows], gh[rows], u
        rec_conv[slot, :n] = raw[rows]
        if segment.context == 0:
            rec_g[slot, 0] = -torch.inf
    return gated_rms_norm(out, o_norm, z, heads, eps), rec_k, rec_g, rec_u, rec_conv


@reference("kda_fold")
def kda_fold(
    conv_state: Tensor, kda_state: Tensor, rec_k: Tensor, rec_g: Tensor, rec_u: Tensor,
    rec_conv: Tensor, slots: Tensor, accepted: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Do to the states what the first `accepted` tokens of a verify step did.

    Args:
        conv_state: A[S, 3, 3P].
        kda_state: f32[S, H, K, V].
        rec_k: f32[S, W, H, K].
        rec_g: f32[S, W, H, K].
        rec_u: f32[S, W, H, V].
        rec_conv: A[S, W, 3P].
        slots: i32[B].
        accepted: i32[B]; 0: the slot is left alone.

    Returns:
        conv_state and kda_state.
    """
    conv_state, kda_state = conv_state.clone(), kda_state.clone()
    for slot, count in zip(slots.tolist(), accepted.tolist(), strict=True):
        if count == 0:
            continue
        g = internal(rec_g[slot, :count])
        later = F.pad(g[1:], (0, 0, 0, 0, 0, 1)).flip(0).cumsum(0).flip(0)
        written = torch.einsum(
            "thk,thv->hkv", rec_k[slot, :count] * later.exp(), rec_u[slot, :count]
        )
        fresh = bool(torch.isneginf(g[0]).all())
        history = torch.zeros_like(conv_state[slot]) if fresh else conv_state[slot]
        before = torch.zeros_like(kda_state[slot]) if fresh else kda_state[slot]
        kda_state[slot] = (internal(before) * g.sum(0).exp()[..., None] + written).to(
            kda_state.dtype
        )
        conv_state[slot] = torch.cat([history, rec_conv[slot, :count]])[-history.shape[0] :]
    return conv_state, kda_state
