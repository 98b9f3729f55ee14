"""KDA: one decode step (convolution, recurrence, gated norm) and prefill of one sequence.

Peers: vLLM's fused_kda_decode (12, 24, 48, 96 heads), fla's chain, FlashKDA and fla's chunk_kda.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from perf.peers.case import Call, Case, random_bf16, random_f32, sets_for

DIM, KERNEL, LOWER_BOUND, EPS = 128, 4, -5.0, 1e-5
DECODE_HEADS, DECODE_REQUESTS = (6, 12, 96), (1, 8, 64, 256)
FUSED_HEADS = (12, 24, 48, 96)
PREFILL_HEADS, PREFILL_TOKENS = (6, 12, 96), (2048, 8192)
LIBRARIES = ("_C_stable_libtorch", "_flashkda_C")


@dataclass(frozen=True)
class Decode:
    """Inputs of decode steps: states of all sets in one tensor, activations shared."""

    heads: int
    requests: int
    sets: int
    state: torch.Tensor  # f32[sets*B, H, 128, 128], value-major for the fused kernel
    conv: torch.Tensor  # bf16[sets*B, 3, 3*H*128]
    qkv: torch.Tensor  # bf16[B, 3*H*128]
    forget: torch.Tensor  # bf16[1, B, H, 128]
    beta: torch.Tensor  # bf16[1, B, H]
    gate: torch.Tensor  # bf16[B, H, 128]
    a_log: torch.Tensor  # f32[H]
    dt_bias: torch.Tensor  # f32[H*128]

    @property
    def shape(self) -> str:
        """What the row is called."""
        return f"H{self.heads} b{self.requests}"

    @property
    def nbytes(self) -> float:
        """State and convolution tail read and written, activations once."""
        per_head = 2 * 4 * DIM * DIM + 2 * 2 * 3 * DIM * 3 + 2 * (3 * DIM + 3 * DIM + 1)
        return float(self.requests * self.heads * per_head)

    def states(self, index: int) -> torch.Tensor:
        """Return the states of one set, f32[B, H, 128, 128]."""
        return self.state[index * self.requests : (index + 1) * self.requests]


def decode_cases() -> Iterator[Case]:
    """Yield every decode point with the peers that take it."""
    for heads in DECODE_HEADS:
        for requests in DECODE_REQUESTS:
            p = _decode(heads, requests)
            if heads in FUSED_HEADS:
                calls = _fused(p)
                yield Case("kda_decode", p.shape, "vLLM fused_kda_decode", calls, p.nbytes)
            yield Case("kda_decode", p.shape, "fla conv + rec + norm", _fla_chain(p), p.nbytes)
            del p
            torch.cuda.empty_cache()


def _decode(heads: int, requests: int) -> Decode:
    width = heads * DIM
    sets = sets_for(requests * heads * 2 * 4 * DIM * DIM, 256)
    return Decode(
        heads,
        requests,
        sets,
        random_f32(sets * requests, heads, DIM, DIM, scale=0.1),
        random_bf16(sets * requests, KERNEL - 1, 3 * width),
        random_bf16(requests, 3 * width),
        random_bf16(1, requests, heads, DIM),
        random_bf16(1, requests, heads),
        random_bf16(requests, heads, DIM),
        torch.zeros(heads, device="cuda"),
        random_f32(width),
    )


def _fused(p: Decode) -> list[Call]:
    op = torch.ops._C.fused_kda_decode
    weight = random_f32(3, KERNEL, p.heads * DIM, scale=0.3)
    norm, conv = torch.ones(DIM, device="cuda"), p.conv.transpose(1, 2)
    out = torch.empty(1, p.requests, p.heads, DIM, device="cuda", dtype=torch.bfloat16)
    rows = torch.arange(p.sets * p.requests, device="cuda", dtype=torch.int32).view(p.sets, -1)

    def call(slots: torch.Tensor) -> object:
        return op(
            p.qkv, weight, None, conv, p.forget, p.beta, p.a_log, p.dt_bias, slots, p.state, out,
            LOWER_BOUND, p.gate, norm, EPS,
        )  # fmt: skip

    return [lambda s=s: call(s) for s in rows]


def _fla_chain(p: Decode) -> list[Call]:
    from fla.modules.causal_conv1d import causal_conv1d_update
    from fla.modules.norm.fused_norm_gate import layer_norm_gated_fwd
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    b, h, width = p.requests, p.heads, p.heads * DIM
    tails = random_bf16(p.sets, b, 3 * width, KERNEL)
    weight, norm = random_bf16(3 * width, KERNEL), torch.ones(DIM, device="cuda").bfloat16()
    out = torch.empty(b, 1, h, DIM, device="cuda", dtype=torch.bfloat16)
    x, gate, beta = p.qkv.view(b, 1, -1), p.forget.view(b, 1, h, DIM), p.beta.view(b, 1, h)

    def call(index: int) -> object:
        y = causal_conv1d_update(x, tails[index], None, weight, None, "silu")
        y = (y[0] if isinstance(y, tuple) else y).view(b, 1, 3, h, DIM)
        q, k, v = (y[:, :, i].contiguous() for i in range(3))
        fused_recurrent_kda_fwd(
            q, k, v, gate, beta, p.a_log, p.dt_bias, initial_state=p.states(index),
            inplace_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, lower_bound=LOWER_BOUND, out=out,
        )  # fmt: skip
        return layer_norm_gated_fwd(
            out.view(-1, DIM), p.gate.view(-1, DIM), norm, None,
            activation="sigmoid", eps=EPS, is_rms_norm=True,
        )  # fmt: skip

    return [lambda i=i: call(i) for i in range(p.sets)]


@dataclass(frozen=True)
class Prefill:
    """One sequence, all bf16 but the state."""

    q: torch.Tensor  # bf16[1, T, H, 128], as k, v and g
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor  # bf16[1, T, H]
    state: torch.Tensor  # f32[1, H, 128, 128]


def prefill_cases() -> Iterator[Case]:
    """Yield every prefill point, and the convolution before it, with every peer."""
    for heads in PREFILL_HEADS:
        for tokens in PREFILL_TOKENS:
            nbytes = float(tokens * heads * (5 * 2 * DIM + 2) + 2 * 4 * DIM * DIM * heads)
            sets = [_prefill(tokens, heads) for _ in range(2 if nbytes > 3e8 else 8)]
            shape = f"H{heads} T{tokens}"
            yield Case("kda_prefill", shape, "FlashKDA", _flash(sets), nbytes)
            yield Case("kda_prefill", shape, "fla chunk_kda", _chunked(sets), nbytes)
            conv_bytes = 2.0 * 2 * tokens * 3 * heads * DIM
            yield Case("kda_conv", shape, "fla causal_conv1d", _conv(tokens, heads), conv_bytes)
            del sets
            torch.cuda.empty_cache()


def _prefill(tokens: int, heads: int) -> Prefill:
    q, k, v, g = (random_bf16(1, tokens, heads, DIM) for _ in range(4))
    return Prefill(
        q, k, v, g, random_bf16(1, tokens, heads), random_f32(1, heads, DIM, DIM, scale=0.1)
    )


def _flash(sets: list[Prefill]) -> list[Call]:
    ops, (_, tokens, heads, _) = torch.ops._flashkda_C, sets[0].q.shape
    nbytes = ops.get_workspace_size(tokens, heads, 1)
    scratch = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    out, last = torch.empty_like(sets[0].v), torch.empty_like(sets[0].state)
    a_log, dt_bias = torch.zeros(heads, device="cuda"), random_f32(heads, DIM)
    starts = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")

    def call(s: Prefill) -> object:
        return ops.fwd(
            s.q, s.k, s.v, s.g, s.beta, DIM**-0.5, out, scratch, a_log, dt_bias, LOWER_BOUND,
            s.state, last, starts, None, None,
        )  # fmt: skip

    return [lambda s=s: call(s) for s in sets]


def _chunked(sets: list[Prefill]) -> list[Call]:
    from fla.ops.kda import chunk_kda

    heads = sets[0].q.shape[2]
    a_log, dt_bias = torch.zeros(heads, device="cuda"), random_f32(heads * DIM)

    def call(s: Prefill) -> object:
        with torch.inference_mode():
            return chunk_kda(
                s.q, s.k, s.v, s.g, s.beta, initial_state=s.state, output_final_state=True,
                use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=LOWER_BOUND,
                A_log=a_log, dt_bias=dt_bias,
            )  # fmt: skip

    return [lambda s=s: call(s) for s in sets]


def _conv(tokens: int, heads: int) -> list[Call]:
    from fla.modules.causal_conv1d import causal_conv1d_fwd

    width = 3 * heads * DIM
    inputs = [random_bf16(1, tokens, width) for _ in range(sets_for(4.0 * tokens * width, 8))]
    weight = random_bf16(width, KERNEL)
    return [lambda x=x: causal_conv1d_fwd(x, weight, None, None, activation="silu") for x in inputs]
