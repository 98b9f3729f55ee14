"""Dense products of a decode step at the shapes of a TP16 rank: cuBLAS, and vLLM's skinny GEMM."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from perf.peers.case import Case, random_bf16, sets_for

# Name, rows of the weight, columns.
SHAPES = (
    ("kda_qkvg", 3072, 7168),
    ("kda_o", 7168, 768),
    ("mla_q_a_kv_a", 2112, 7168),
    ("router", 896, 7168),
    ("latent_down", 3584, 7168),
    ("latent_up", 7168, 3584),
    ("shared_gate_up", 768, 7168),
    ("shared_down", 7168, 384),
    ("head", 10240, 7168),
    ("kda_f_a_beta", 224, 7168),
    ("kda_f_b", 768, 128),
)
# What `dsv3_fused_a_gemm` takes, at up to 16 rows.
SKINNY = ("kda_o", "mla_q_a_kv_a", "latent_down", "shared_gate_up", "shared_down")
ROWS = (1, 8, 64)
LIBRARIES = ("_C_stable_libtorch",)


def cases() -> Iterator[Case]:
    """Yield every product with every peer that takes it."""
    for name, n, k in SHAPES:
        count = sets_for(2 * n * k, 2000)
        weights = [random_bf16(n, k, scale=0.02) for _ in range(count)]
        for m in ROWS:
            yield from _of_rows(name, m, weights)
        del weights


def _of_rows(name: str, m: int, weights: list[torch.Tensor]) -> Iterator[Case]:
    n, k = weights[0].shape
    x, out = random_bf16(m, k), torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    shape, nbytes, flops = f"{name} m{m} {n}x{k}", 2 * (n * k + m * k + m * n), 2.0 * m * n * k
    calls = [lambda w=w: F.linear(x, w) for w in weights]
    yield Case("gemm", shape, "cuBLAS", calls, nbytes, flops)
    if name in SKINNY and m <= 16:
        op = torch.ops._C.dsv3_fused_a_gemm
        calls = [lambda w=w: op(out, x, w.t(), False) for w in weights]
        yield Case("gemm", shape, "vLLM dsv3_fused_a_gemm", calls, nbytes, flops)
