"""Cases of the GPU templates of linear and norm_linear."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3c.codegen.templates.triton.linear_base import LinearTemplate
from k3c.codegen.templates.triton.linear_decode import LinearDecode, NormLinearDecode
from k3c.codegen.templates.triton.linear_gemm import LinearGemm, NormLinearGemm
from k3c.ir.graph import Node
from tests.support.triton_runner import check, node

# f32: sums of at most 2048 products in another order than torch's. bf16: a sum near a rounding
# boundary may round the other way, one unit of 2^-8; two where SiTU multiplies rounded halves or
# the norm's rounding flips an input.
BOUNDS = {"f32": 3e-6, "bf16": 2**-7}
TORCH = {"bf16": torch.bfloat16, "f32": torch.float32}
LINEAR_DECODE, LINEAR_GEMM = LinearDecode(), LinearGemm()
NORM_DECODE, NORM_GEMM = NormLinearDecode(), NormLinearGemm()


def template_for(rows: int, norm: bool) -> LinearTemplate:
    if rows <= 16:
        return NORM_DECODE if norm else LINEAR_DECODE
    return NORM_GEMM if norm else LINEAR_GEMM


@dataclass(frozen=True)
class Case:
    """A linear: rows, K, (width, epilogue, dtype) of each result, dtypes of x and w."""

    rows: int
    inner: int
    results: tuple[tuple[int, str, str], ...]
    act: str = "bf16"
    stored: str = "bf16"
    addend: bool = False
    norm: bool = False

    def tensors(self) -> list[torch.Tensor]:
        torch.manual_seed(self.rows + self.inner)
        total = sum(w * (2 if e == "situ" else 1) for w, e, _ in self.results)
        x = torch.randn(self.rows, self.inner).to(TORCH[self.act])
        norm = [1 + torch.randn(self.inner) / 8] if self.norm else []
        w = (torch.randn(total, self.inner) / self.inner**0.5).to(TORCH[self.stored])
        addend = torch.randn(self.rows, self.results[0][0]).to(TORCH[self.act])
        return [x, *norm, w, *([addend] if self.addend else [])]

    def node(self) -> Node:
        results = [(dtype, self.rows, width) for width, _, dtype in self.results]
        kinds = tuple(kind for _, kind, _ in self.results)
        op, more = ("norm_linear", {"eps": 1e-5}) if self.norm else ("linear", {})
        return node(
            op, self.tensors(), results, epilogues=kinds, beta=4.0, linear_beta=25.0, **more
        )

    def check(self, template: LinearTemplate, bound: float | None = None) -> list[torch.Tensor]:
        widths = [w for w, _, _ in self.results]
        dtypes = [d for _, _, d in self.results]
        return check(
            template, self.node(), self.tensors(), bound or BOUNDS[self.act],
            widths=widths, result_dtypes=dtypes,
        )  # fmt: skip


RAGGED = ((48, "none", "bf16"), (20, "situ", "bf16"), (33, "none", "f32"), (24, "none", "bf16"))
WHOLE = ((40, "none", "bf16"),)

# K3 on 16 ranks: KDA's projections, its output, the inputs of the MoE, the head.
REAL = {
    "kda_in": (7168, (*[(768, "none", "bf16")] * 4, (128, "none", "bf16"), (96, "none", "bf16"))),
    "kda_out": (768, ((7168, "none", "bf16"),)),
    "moe_in": (7168, ((896, "none", "f32"), (3584, "none", "bf16"), (384, "situ", "bf16"))),
    "head": (7168, ((10240, "none", "f32"),)),
}
