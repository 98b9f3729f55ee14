"""Routed MXFP4 experts of an EP16 rank, after routing: Marlin as vLLM calls it, triton_kernels.

T is the tokens of the whole group; every token has one local expert, spread evenly over the 56.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from perf.peers.case import Call, Case, random_bf16

LOCAL, EXPERTS, TOP, LATENT, INNER = 56, 896, 16, 3584, 3072
EXPERT_BYTES = 3 * LATENT * INNER * 4.25 / 8
TOKENS = (1, 8, 64, 2048, 8192)
# Sets of routings: with few tokens each set must choose other experts, or they stay in L2.
SETS = {1: 56, 8: 7}
LIBRARIES = ("_C_stable_libtorch", "_moe_C_stable_libtorch")
# vLLM's number for float4 e2m1 in its scalar type registry.
E2M1 = 562949953487106


@dataclass(frozen=True)
class Raw:
    """Codes (two per byte) and e8m0 scales, as a checkpoint has them: u8[56, rows, columns]."""

    w13: torch.Tensor
    s13: torch.Tensor
    w2: torch.Tensor
    s2: torch.Tensor


def raw_weights() -> Raw:
    """Draw weights whose scales are near 1."""
    draw = partial(torch.randint, device="cuda", dtype=torch.uint8)
    return Raw(
        draw(0, 256, (LOCAL, 2 * INNER, LATENT // 2)),
        draw(118, 123, (LOCAL, 2 * INNER, LATENT // 32)),
        draw(0, 256, (LOCAL, LATENT, INNER // 2)),
        draw(118, 123, (LOCAL, LATENT, INNER // 32)),
    )


def balanced(tokens: int, seed: int) -> list[int]:
    """Return the local expert of each token, all equally often; other ones for another seed."""
    experts = [(i + seed * tokens) % LOCAL for i in range(tokens)]
    random.Random(seed).shuffle(experts)
    return experts


def _case(tokens: int, peer: str, calls: Sequence[Call]) -> Case:
    distinct = min(tokens, LOCAL)
    nbytes = distinct * EXPERT_BYTES + tokens * 2 * 2 * LATENT
    return Case("moe", f"EP16 T{tokens}", peer, calls, nbytes, 6.0 * tokens * LATENT * INNER)


def cases() -> Iterator[Case]:
    """Yield every point with both peers."""
    weights = raw_weights()
    marlin = Marlin(weights)
    for tokens in TOKENS:
        yield _case(tokens, "Marlin call", marlin.calls(tokens))
    del marlin
    torch.cuda.empty_cache()
    kernels = TritonKernels(weights)
    for tokens in TOKENS:
        yield _case(tokens, "triton_kernels", kernels.calls(tokens))


class Marlin:
    """align, w13, SiTU, w2, sum, over all 16 choices of a token: what vLLM does for a rank."""

    def __init__(self, raw: Raw) -> None:
        self.codes13 = self._codes(raw.w13, 2 * INNER, LATENT)
        self.codes2 = self._codes(raw.w2, LATENT, INNER)
        self.scales13 = self._scales(raw.s13, 2 * INNER)
        self.scales2 = self._scales(raw.s2, LATENT)
        self.locks = torch.zeros(132 * 4, dtype=torch.int32, device="cuda")
        self.expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32, device="cuda")
        self.expert_map[:LOCAL] = torch.arange(LOCAL, device="cuda", dtype=torch.int32)

    @staticmethod
    def _codes(raw: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        repack = torch.ops._C.gptq_marlin_repack
        return torch.stack(
            [repack(w.view(torch.int32).T.contiguous(), columns, rows, 4, False) for w in raw]
        )

    @staticmethod
    def _scales(raw: torch.Tensor, rows: int) -> torch.Tensor:
        """Bring scales into the order in which Marlin's threads read them."""
        order = [i + 8 * j for i in range(8) for j in range(8)]
        made: list[torch.Tensor] = []
        for scales in raw:
            by_column = scales.T.contiguous().reshape(-1, 64)[:, order].reshape(-1, rows)
            quads = by_column.contiguous().view(-1, 4)[:, [0, 2, 1, 3]]
            made.append(quads.reshape(by_column.shape))
        return torch.stack(made).contiguous().view(torch.float8_e8m0fnu)

    def calls(self, tokens: int) -> list[Call]:
        """Return one call per set of routings."""
        x = random_bf16(tokens, LATENT)
        scratch = tuple(
            torch.empty(tokens * TOP, n, device="cuda", dtype=torch.bfloat16)
            for n in (2 * INNER, INNER, LATENT)
        )
        out = torch.empty(tokens, LATENT, device="cuda", dtype=torch.bfloat16)
        routings = [
            _all_choices(balanced(tokens, seed), seed) for seed in range(SETS.get(tokens, 2))
        ]
        return [partial(self._call, x, ids, gates, scratch, out) for ids, gates in routings]

    def _call(
        self, x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor,
        scratch: tuple[torch.Tensor, ...], out: torch.Tensor,
    ) -> None:  # fmt: skip
        both, inner, rows = scratch
        tokens, block = x.shape[0], _block_rows(x.shape[0])
        order = self._align(ids, block)
        self._gemm((x, both), (self.codes13, self.scales13), order, (gates, block, TOP, False))
        torch.ops._C.situ_and_mul(inner, both, 4.0, 25.0)
        self._gemm((inner, rows), (self.codes2, self.scales2), order, (gates, block, 1, True))
        torch.ops._moe_C.moe_sum(rows.view(tokens, TOP, LATENT), out, ids, self.expert_map)

    def _align(self, ids: torch.Tensor, block: int) -> tuple[torch.Tensor, ...]:
        """Sort the choices by expert, each expert's rows padded to whole blocks."""
        most = ids.numel() + EXPERTS * (block - 1)
        if ids.numel() < EXPERTS:
            most = min(ids.numel() * block, most)
        sizes = (most, -(-most // block), 1)
        order = tuple(torch.empty(n, dtype=torch.int32, device="cuda") for n in sizes)
        align = torch.ops._moe_C.moe_align_block_size
        align(ids, EXPERTS, block, *order, self.expert_map, None)
        return order

    def _gemm(
        self, rows: tuple[torch.Tensor, ...], weights: tuple[torch.Tensor, ...],
        order: tuple[torch.Tensor, ...], how: tuple[torch.Tensor, int, int, bool],
    ) -> None:  # fmt: skip
        (x, out), (codes, scales), (gates, block, top, weighted) = rows, weights, how
        torch.ops._moe_C.moe_wna16_marlin_gemm(
            x, out, codes, None, scales, None, None, None, self.locks, *order, gates, block, top,
            weighted, E2M1, x.shape[0], out.shape[1], x.shape[1], False, True, False, -1, -1, -1,
        )  # fmt: skip


def _all_choices(experts: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return i32[T, 16] with one local choice a token, the others on other ranks; f32 gates."""
    draw = random.Random(seed)
    rows = [[e, *draw.sample(range(LOCAL, EXPERTS), TOP - 1)] for e in experts]
    return torch.tensor(rows, dtype=torch.int32, device="cuda"), torch.rand(
        len(rows), TOP, device="cuda"
    )


def _block_rows(tokens: int) -> int:
    """Return the rows of a block that vLLM takes for the rows that an expert has on average."""
    mean_rows = -(-tokens * LOCAL // EXPERTS) * TOP / LOCAL
    return next((block for block in (8, 16, 32, 48) if mean_rows / block < 0.9), 64)


class TritonKernels:
    """Two matmul_ogs with gather, fused SwiGLU (it has no SiTU) and scatter; routing beforehand."""

    def __init__(self, raw: Raw) -> None:
        from triton_kernels.matmul_ogs_details import opt_flags

        # Split-K sums in an order that differs from run to run.
        opt_flags.update_opt_flags_constraints({"split_k": 1})
        self.w13, self.how13 = self._weights(raw.w13, raw.s13)
        self.w2, self.how2 = self._weights(raw.w2, raw.s2)

    @staticmethod
    def _weights(codes: torch.Tensor, scales: torch.Tensor) -> tuple[object, object]:
        from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
        from triton_kernels.numerics import InFlexData
        from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
        from triton_kernels.tensor_details import layout

        value, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        scale, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(
            mx_axis=1, num_warps=8
        )
        packed = wrap_torch_tensor(codes.transpose(-2, -1), dtype=FP4)
        packed_scales = wrap_torch_tensor(scales.transpose(-2, -1))
        how = PrecisionConfig(
            weight_scale=convert_layout(packed_scales, scale, **scale_options),
            flex_ctx=FlexCtx(rhs_data=InFlexData()),
        )
        return convert_layout(packed, value, **value_options), how

    def calls(self, tokens: int) -> list[Call]:
        """Return one call per set of routings."""
        x = random_bf16(tokens, LATENT)
        routings = [_compact(balanced(tokens, seed)) for seed in range(SETS.get(tokens, 2))]
        return [partial(self._call, x, routing) for routing in routings]

    def _call(self, x: torch.Tensor, routing: tuple) -> torch.Tensor:
        from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, matmul_ogs
        from triton_kernels.swiglu import swiglu_fn

        data, gather, scatter = routing
        swiglu = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit")), (1.702, 7.0), 2)
        inner = matmul_ogs(
            x, self.w13, None, data, gather_indx=gather, precision_config=self.how13,
            fused_activation=swiglu,
        )  # fmt: skip
        return matmul_ogs(
            inner.view(-1, INNER), self.w2, None, data, scatter_indx=scatter,
            precision_config=self.how2, gammas=data.gate_scal,
        )  # fmt: skip


def _compact(experts: list[int]) -> tuple:
    """Return the routing of tokens that have one local expert each."""
    from triton_kernels.routing import GatherIndx, RoutingData, ScatterIndx, compute_expt_data

    ids = torch.tensor(experts, device="cuda")
    counts = torch.bincount(ids, minlength=LOCAL).int()
    order = torch.argsort(ids, stable=True).int()
    back = torch.argsort(order, stable=True).int()
    gates = torch.rand(len(experts), device="cuda")[order.long()].bfloat16()
    data = compute_expt_data(counts, LOCAL, len(experts))
    routing = RoutingData(gates, counts, LOCAL, 1, data)
    return routing, GatherIndx(order, back), ScatterIndx(back, order)
