"""References of the kernel-level ops: compositions of the model-level bodies, same roundings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3c.export.ops.activation import sigmoid_mul, situ
from k3c.export.ops.attention_residual import attn_res, bank_commit, residual_join
from k3c.export.ops.kda import kda_gate, kda_recurrence, short_conv
from k3c.export.ops.linear import linear, matmul_wide
from k3c.export.ops.mla import latent_to_values
from k3c.export.ops.moe import combine
from k3c.export.ops.norm import gated_rms_norm, l2_norm, rms_norm
from k3c.export.ops.registry import as_dtype, reference
from k3c.export.ops.sharded import Mxfp4, local_grouped_linear

DtypeName = torch.dtype | str


@dataclass(frozen=True)
class _Epilogue:
    """What happens to one column range of a GEMM."""

    name: str
    beta: float
    linear_beta: float | str | None

    def columns(self, width: int) -> int:
        """Number of GEMM columns that a result of `width` consumes."""
        return 2 * width if self.name == "situ" else width

    def apply(self, columns: Tensor) -> Tensor:
        """Return the result for its rounded columns [..., n]."""
        if self.name == "none":
            return columns
        assert self.name == "situ", f"epilogue {self.name!r}: want 'none' or 'situ'"
        gate, up = columns.chunk(2, -1)
        return situ(gate, up, self.beta, self.linear_beta)


@reference("linear")
def linear_ranges(
    x: Tensor, weight: Tensor, addend: Tensor | None = None, *,
    widths: Sequence[int] | None = None, result_dtypes: Sequence[DtypeName] | None = None,
    epilogues: Sequence[str] | None = None, beta: float = 0.0,
    linear_beta: float | str | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return column ranges of one GEMM, each with its epilogue.

    Args:
        x: A[T, K].
        weight: [N, K]; a "situ" result of width I takes I gate rows, then I up rows.
        addend: A[T, N], added after rounding, then rounded again; only with one result.
        widths: Result widths; None: one result of N.
        result_dtypes: Result dtypes, torch or IR names; None: that of x.
        epilogues: "none" or "situ" for each result; None: all "none".
        beta: Gate cap of situ.
        linear_beta: Up cap of situ.

    Returns:
        The results in order.
    """
    widths = [weight.shape[0]] if widths is None else widths
    dtypes = [as_dtype(d) for d in result_dtypes or [x.dtype] * len(widths)]
    kinds = [_Epilogue(e, beta, linear_beta) for e in epilogues or ["none"] * len(widths)]
    sizes = [kind.columns(width) for kind, width in zip(kinds, widths, strict=True)]
    columns = matmul_wide(x, weight).split(sizes, -1)
    results = tuple(k.apply(c.to(d)) for k, c, d in zip(kinds, columns, dtypes, strict=True))
    assert addend is None or len(results) == 1, f"addend with {len(results)} results: want 1"
    return results if addend is None else (results[0] + addend,)


@reference("attn_res_norm")
def attn_res_norm(
    prefix: Tensor, delta: Tensor, bank: Tensor, res_norm: Tensor, res_proj: Tensor, norm: Tensor,
    *, restart: Tensor | int, rows: Tensor | int, commit_row: Tensor | int, res_eps: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Join, mix and normalise one site; commit the joined prefix where `commit_row` >= 0.

    Returns:
        prefix A[T, D], y A[T, D] and bank A[NB, T, D].
    """
    joined = residual_join(prefix, delta, restart)
    mixed = attn_res(joined, bank, res_norm, res_proj, rows, res_eps)
    return joined, rms_norm(mixed, norm, eps), bank_commit(bank, joined, commit_row)


@reference("kda")
def kda(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, f: Tensor, b: Tensor,
    conv_q: Tensor, conv_k: Tensor, conv_v: Tensor, a_log: Tensor, dt_bias: Tensor, o_norm: Tensor,
    conv_state: Tensor, kda_state: Tensor,
    seg_start: Tensor, seg_tokens: Tensor, slots: Tensor, context: Tensor,
    *, heads: int, lower_bound: float | str | None, scale: float, l2_eps: float, eps: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Everything of a KDA layer between its projections.

    Returns:
        o A[T, P] (padding rows zero), conv_state and kda_state.
    """
    where = (seg_start, seg_tokens, slots, context)
    q, k, v, conv_state = short_conv(q, k, v, conv_q, conv_k, conv_v, conv_state, *where)
    q, k = l2_norm(q, heads, scale, l2_eps), l2_norm(k, heads, 1.0, l2_eps)
    g = kda_gate(f, a_log, dt_bias, lower_bound)
    o, kda_state = kda_recurrence(q, k, v, g, b, kda_state, *where, chunk)
    return gated_rms_norm(o, o_norm, z, heads, eps), conv_state, kda_state


@reference("kda_fb")
def kda_fb(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, f_a: Tensor, b: Tensor,
    conv_q: Tensor, conv_k: Tensor, conv_v: Tensor, a_log: Tensor, dt_bias: Tensor, o_norm: Tensor,
    f_b: Tensor, *states_and_segments: Tensor, **attrs: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`kda` whose forget input is f = f_a A[T, F] times f_b [P, F] transposed, rounded to A.

    Returns:
        o A[T, P] (padding rows zero), conv_state and kda_state.
    """
    small = (conv_q, conv_k, conv_v, a_log, dt_bias, o_norm)
    f = linear(f_a, f_b)
    return kda(q, k, v, z, f, b, *small, *states_and_segments, **attrs)


@reference("norm_linear")
def norm_linear(
    x: Tensor, norm: Tensor, weight: Tensor, addend: Tensor | None = None, *, eps: float,
    **attrs: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`linear` of rms_norm(x A[T, K], norm f32[K]) rounded to A; attributes as those of linear."""
    return linear_ranges(rms_norm(x, norm, eps), weight, addend, **attrs)


@reference("mla_absorb_v")
def mla_absorb_v(
    o_lat: Tensor, kv_b: Tensor, z: Tensor | None = None, *,
    heads: int, nope_dim: int, v_dim: int, result_dtypes: Sequence[DtypeName] | None = None,
) -> Tensor:  # fmt: skip
    """Return the values A[T, n * dv] of o_lat f32[T, n, r], times sigmoid(z A[T, n * dv]) if given.

    Without z the dtype comes from `result_dtypes`, or is that of o_lat.
    """
    values = latent_to_values(o_lat, kv_b, heads=heads, nope_dim=nope_dim, v_dim=v_dim)
    if result_dtypes is not None:
        values = values.to(as_dtype(result_dtypes[0]))
    return values if z is None else sigmoid_mul(values.to(z.dtype), z)


@reference("grouped_gemm")
def grouped_gemm(
    x: Tensor, weight: Mxfp4, offsets: Tensor, order: Tensor, *,
    epilogue: str = "none", beta: float = 0.0, linear_beta: float | str | None = None,
    total_experts: int = 0,
) -> Tensor:  # fmt: skip
    """Multiply rows, grouped by expert, with MXFP4 matrices; results stand in token order.

    Rows that `order` does not name are not written: NaN here.

    Args:
        x: A[T, K] or A[T, k, K].
        weight: (packed u8[E, N', K/2], scale u8[E, N', K/32]); "situ": I gate rows, then I up rows.
        offsets: i32[E + 1].
        order: i32[T, k].
        epilogue: "none" or "situ".
        beta: Gate cap of situ.
        linear_beta: Up cap of situ.
        total_experts: Experts of all ranks; changes nothing.

    Returns:
        A[T, k, N].
    """
    counts = offsets.diff().long()
    sorted_experts = torch.arange(len(counts), device=order.device).repeat_interleave(counts)
    # -1: the row's expert lies on another rank.
    experts = torch.full_like(order, -1).flatten()
    experts[order.flatten()[: len(sorted_experts)].long()] = sorted_experts.to(torch.int32)
    rows = local_grouped_linear(x, weight, experts.view(order.shape))
    return _Epilogue(epilogue, beta, linear_beta).apply(rows)


@reference("combine_norm")
def combine_norm(rows: Tensor, weights: Tensor, norm: Tensor, *, eps: float) -> Tensor:
    """Return rms_norm(combine(rows A[T, k, L], weights f32[T, k]), norm f32[L]) as A[T, L]."""
    return rms_norm(combine(rows, weights), norm, eps)
