"""Kimi Delta Attention: short convolution, decay gate, and the recurrence in two forms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3c.export.ops.registry import define, internal, optional_float
from k3c.export.ops.segments import live_segments

# Above this softplus is linear; the older gate's definition, not a tolerance.
_SOFTPLUS_LINEAR = 20.0


def _convolve(history: Tensor, raw: Tensor, weight: Tensor) -> Tensor:
    """Return SiLU of the causal depthwise convolution of raw A[T, C] after history A[taps-1, C]."""
    window = internal(torch.cat([history, raw])).unfold(0, weight.shape[1], 1)
    return F.silu((window * weight.to(window.dtype)).sum(-1)).to(raw.dtype)


@define(
    "(Tensor q, Tensor k, Tensor v, Tensor conv_q, Tensor conv_k, Tensor conv_v, Tensor conv_state,"
    " Tensor seg_start, Tensor seg_tokens, Tensor slots, Tensor context)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lambda q, k, v, conv_q, conv_k, conv_v, conv_state, *segments: (
        torch.empty_like(q),
        torch.empty_like(k),
        torch.empty_like(v),
        torch.empty_like(conv_state),
    ),
)
def short_conv(
    q: Tensor, k: Tensor, v: Tensor, conv_q: Tensor, conv_k: Tensor, conv_v: Tensor,
    conv_state: Tensor, seg_start: Tensor, seg_tokens: Tensor, slots: Tensor, context: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Convolve q, k and v over time, apply SiLU, and keep the last raw rows of each request.

    The last tap multiplies the current token. The activation is SiLU whatever `hidden_act` says.

    Args:
        q: A[T, P] raw projection; k and v likewise.
        k: A[T, P].
        v: A[T, P].
        conv_q: f32[P, 4]; conv_k and conv_v likewise.
        conv_k: f32[P, 4].
        conv_v: f32[P, 4].
        conv_state: A[S, 3, 3P], raw rows in channel order q, k, v.
        seg_start: i32[B].
        seg_tokens: i32[B].
        slots: i32[B].
        context: i32[B]; 0: the slot is not read, zeros precede the first token.

    Returns:
        q, k, v A[T, P] (padding rows zero) and the new conv_state.
    """
    raw, weight = torch.cat([q, k, v], -1), torch.cat([conv_q, conv_k, conv_v])
    out, state = torch.zeros_like(raw), conv_state.clone()
    for segment in live_segments(seg_start, seg_tokens, context):
        slot = int(slots[segment.index])
        history = conv_state[slot] if segment.context else torch.zeros_like(conv_state[slot])
        rows = raw[segment.rows]
        out[segment.rows] = _convolve(history, rows, weight)
        state[slot] = torch.cat([history, rows])[-history.shape[0] :]
    q_out, k_out, v_out = (part.clone() for part in out.split(q.shape[1], -1))
    return q_out, k_out, v_out, state


@define(
    "(Tensor f, Tensor a_log, Tensor dt_bias, float? lower_bound) -> Tensor",
    lambda f, a_log, dt_bias, lower_bound: f.new_empty(
        f.shape, dtype=torch.float64 if f.dtype == torch.float64 else torch.float32
    ),
)
def kda_gate(f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | str | None) -> Tensor:
    """Return g, the natural log of the per-channel decay.

    Args:
        f: A[T, P].
        a_log: f32[H], one value a head.
        dt_bias: f32[P].
        lower_bound: Bound of g, e.g. -5.0: g = lower_bound * sigmoid(exp(a_log) (f + dt_bias)).
            None or "none" selects the unbounded form, a different function:
            g = -exp(a_log) * softplus(f + dt_bias).

    Returns:
        f32[T, P].
    """
    x = (internal(f) + dt_bias).unflatten(-1, (a_log.shape[0], -1))
    rate = torch.exp(a_log.to(x.dtype))[:, None]
    bound = optional_float(lower_bound)
    if bound is None:
        return (-rate * F.softplus(x, threshold=_SOFTPLUS_LINEAR)).flatten(-2)
    return (bound * torch.sigmoid(rate * x)).flatten(-2)


def kda_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token; this is the definition.

    Args:
        q: f32[T, H, K], normalised and scaled.
        k: f32[T, H, K], normalised.
        v: f32[T, H, V].
        g: f32[T, H, K], log decay.
        beta: f32[T, H], write strength.
        state: f32[H, K, V] before the first token.

    Returns:
        o f32[T, H, V] and the state after the last token.
    """
    outputs: list[Tensor] = []
    for t in range(q.shape[0]):
        state = g[t].exp()[..., None] * state
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + k[t][..., None] * (beta[t][:, None] * error)[:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs), state


def _kda_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run one chunk; head first: q, k, g f32[H, C, K], v f32[H, C, V], beta f32[H, C]."""
    size = q.shape[1]
    total = g.cumsum(1)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    # exp(G_i - G_j) directly: exp(G_i) and exp(-G_j) apart would leave float32's range.
    span = (total[:, :, None] - total[:, None]).masked_fill(later[..., None], -torch.inf).exp()
    reads = torch.einsum("hik,hjk,hijk->hij", q, k, span)
    writes = beta[..., None] * torch.einsum("hik,hjk,hijk->hij", k, k, span).tril(-1)
    decay = total.exp()
    target = beta[..., None] * (v - (k * decay) @ state)
    corrected = torch.linalg.solve_triangular(writes, target, upper=False, unitriangular=True)
    out = (q * decay) @ state + reads @ corrected
    carried = k * (total[:, -1:] - total).exp()
    return out, decay[:, -1, :, None] * state + carried.mT @ corrected


def kda_chunkwise(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, chunk: int
) -> tuple[Tensor, Tensor]:
    """Run the recurrence in chunks of `chunk` tokens; same arguments as `kda_recurrent`."""
    outputs: list[Tensor] = []
    for start in range(0, q.shape[0], chunk):
        rows = slice(start, start + chunk)
        qc, kc, vc, gc, bc = (x[rows].transpose(0, 1) for x in (q, k, v, g, beta))
        out, state = _kda_chunk(qc, kc, vc, gc, bc, state)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs), state


@define(
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor b, Tensor kda_state, Tensor seg_start,"
    " Tensor seg_tokens, Tensor slots, Tensor context, int chunk) -> (Tensor, Tensor)",
    lambda q, k, v, g, b, kda_state, *rest: (torch.empty_like(v), torch.empty_like(kda_state)),
)
def kda_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, kda_state: Tensor,
    seg_start: Tensor, seg_tokens: Tensor, slots: Tensor, context: Tensor, chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run every segment's recurrence from its slot; beta = sigmoid(b).

    Args:
        q: f32[T, P], normalised and scaled.
        k: f32[T, P], normalised.
        v: A[T, P].
        g: f32[T, P], log decay.
        b: A[T, H].
        kda_state: f32[S, H, K, V].
        seg_start: i32[B].
        seg_tokens: i32[B].
        slots: i32[B].
        context: i32[B]; 0: the slot is not read, the state starts at zero.
        chunk: 0: token by token; else chunks of this many tokens where a segment has several.

    Returns:
        o A[T, P] (padding rows zero) and the new kda_state.
    """
    heads = b.shape[1]
    qh, kh, vh, gh = (internal(x).unflatten(-1, (heads, -1)) for x in (q, k, v, g))
    beta = torch.sigmoid(internal(b))
    out, states = torch.zeros_like(v), kda_state.clone()
    for segment in live_segments(seg_start, seg_tokens, context):
        slot, rows = int(slots[segment.index]), segment.rows
        state = kda_state[slot] if segment.context else torch.zeros_like(kda_state[slot])
        inputs = (qh[rows], kh[rows], vh[rows], gh[rows], beta[rows], state)
        chunked = chunk > 0 and segment.tokens > 1
        o, states[slot] = kda_chunkwise(*inputs, chunk=chunk) if chunked else kda_recurrent(*inputs)
        out[rows] = o.flatten(-2).to(v.dtype)
    return out, states
