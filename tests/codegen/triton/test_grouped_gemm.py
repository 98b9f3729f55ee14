"""grouped_gemm on MXFP4 experts for GPUs, a few rows an expert and many, against the reference."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from k3c.codegen.template import pack
from k3c.codegen.templates.triton.grouped_gemm import GroupedGemmDecode, GroupedGemmPrefill
from k3c.export.ops import REFERENCE, dispatch
from k3c.ir.graph import Node
from k3c.targets.target import load_target
from tests.support import triton_runner
from tests.support.nodes import Operand, compare, value, with_layouts
from tests.support.triton_runner import GPU_TARGETS, check, compiles, node, run

# f32: up to 704 products in another order than torch's. bf16: one unit of 2^-8 where a sum near a
# rounding boundary rounds the other way; with SiTU gate and up each may.
BOUNDS = {"f32": 2e-5, "bf16": 2**-6}
TORCH = {"bf16": torch.bfloat16, "f32": torch.float32}
DECODE, PREFILL = GroupedGemmDecode(), GroupedGemmPrefill()
BOTH = [DECODE, PREFILL]
# Shape of a rank of the full-size model at ep=16, and of the experts of the demo model.
RANK, DEMO = (56, 16, 3584, 3072), (32, 4, 128, 96)


@dataclass(frozen=True)
class Case:
    """A grouped GEMM over random experts, `choices` of them a token."""

    tokens: int
    inner: int
    width: int
    experts: int = 5
    choices: int = 2
    situ: bool = False
    per_choice: bool = False
    act: str = "bf16"

    def chosen(self) -> torch.Tensor:
        torch.manual_seed(self.tokens)
        rows = [torch.randperm(self.experts)[: self.choices] for _ in range(self.tokens)]
        return torch.stack(rows).int()

    def tensors(self, chosen: torch.Tensor | None = None) -> list[Operand]:
        torch.manual_seed(self.inner)
        rows = self.width * (2 if self.situ else 1)
        packed = torch.randint(0, 256, (self.experts, rows, self.inner // 2), dtype=torch.uint8)
        scale = torch.randint(116, 124, (self.experts, rows, self.inner // 32), dtype=torch.uint8)
        lead = (self.tokens, self.choices) if self.per_choice else (self.tokens,)
        x = torch.randn(*lead, self.inner).to(TORCH[self.act])
        experts = self.chosen() if chosen is None else chosen
        return [x, (packed, scale), *dispatch(experts, num_experts=self.experts)]

    def node(self, tensors: list[Operand]) -> Node:
        epilogue = "situ" if self.situ else "none"
        result = (self.act, self.tokens, self.choices, self.width)
        return node(
            "grouped_gemm", tensors, [result], epilogue=epilogue, beta=4.0, linear_beta=25.0
        )

    def check(self, template: Any, chosen: torch.Tensor | None = None) -> None:
        tensors = self.tensors(chosen)
        check(template, self.node(tensors), tensors, BOUNDS[self.act])


@pytest.mark.parametrize("act", ["f32", "bf16"])
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 96, 40, situ=True),
        Case(3, 256, 40, experts=3, per_choice=True),
    ],
)
def test_decode_matches_the_reference(case: Case, act: str) -> None:
    replace(case, act=act).check(DECODE)


@pytest.mark.parametrize("act", ["f32", "bf16"])
@pytest.mark.parametrize(
    "case",
    [
        Case(63, 96, 40, experts=3, situ=True),
        Case(3, 256, 40, experts=3, choices=1, per_choice=True),
    ],
)
def test_prefill_matches_the_reference(case: Case, act: str) -> None:
    replace(case, act=act).check(PREFILL)


@pytest.mark.device
@pytest.mark.parametrize("tokens", [1, 8, 100, 512])
@pytest.mark.parametrize("situ", [True, False])
def test_decode_at_full_width_matches_the_reference(tokens: int, situ: bool) -> None:
    inner, width = (3584, 3072) if situ else (3072, 3584)
    case = Case(tokens, inner, width, experts=7, situ=situ, per_choice=not situ)
    case.check(DECODE)


@pytest.mark.device
@pytest.mark.parametrize("tokens", [100, 700])
@pytest.mark.parametrize("situ", [True, False])
def test_prefill_at_full_width_matches_the_reference(tokens: int, situ: bool) -> None:
    inner, width = (3584, 3072) if situ else (3072, 3584)
    case = Case(tokens, inner, width, experts=7, situ=situ, per_choice=not situ)
    case.check(PREFILL)


@pytest.mark.device
@pytest.mark.parametrize("scale", [200, 254, 255])
def test_one_large_scale_among_many_is_exact(scale: int) -> None:
    # Everything else decodes the fast way, this tile of weights the exact one.
    case = Case(9, 512, 160, experts=3, act="bf16")
    tensors = case.tensors()
    assert isinstance(tensors[1], tuple)
    tensors[1][1][1, 77, 5] = scale
    (y,) = run(DECODE, case.node(tensors), tensors)
    (want,) = REFERENCE["grouped_gemm"](*tensors, epilogue="none")
    assert torch.equal(y.isnan(), want.isnan())
    # The large scale decides its column alone: the others stay within the bound by themselves.
    others = torch.arange(160) != 77
    compare("the other columns", y[..., others], want[..., others], BOUNDS["bf16"])


def test_experts_may_have_no_row_one_row_or_129_rows() -> None:
    chosen = torch.full((130, 1), 2, dtype=torch.int32)
    chosen[40] = 0
    Case(130, 96, 40, experts=4, choices=1).check(PREFILL, chosen)


def test_all_rows_of_a_decode_step_may_meet_one_expert() -> None:
    chosen = torch.full((17, 1), 3, dtype=torch.int32)
    Case(17, 96, 40, experts=4, choices=1).check(DECODE, chosen)


@pytest.mark.parametrize("template", BOTH)
def test_896_experts_with_the_winners_at_the_end(template: Any) -> None:
    chosen = torch.arange(895, 889, -1).int().view(1, 6)
    Case(1, 32, 16, experts=896, choices=6).check(template, chosen)


@pytest.mark.parametrize("template", BOTH)
def test_inner_704_matches_the_reference(template: Any) -> None:
    Case(2, 704, 24, experts=3, choices=2, per_choice=True).check(template)


@pytest.mark.parametrize("template", BOTH)
def test_rows_of_other_ranks_are_not_written(template: Any) -> None:
    case = Case(4, 96, 40, experts=3, choices=2, per_choice=True)
    chosen = torch.tensor([[0, 7], [9, 8], [2, 1], [5, 0]], dtype=torch.int32)
    here = chosen < 3
    x, weights, *_ = case.tensors()
    assert isinstance(x, torch.Tensor)
    whole = [x, weights, *dispatch(chosen.clamp(max=2), num_experts=3)]
    (want,) = run(template, case.node(whole), whole)
    offsets, order = dispatch(chosen, num_experts=3)
    # What dispatch does not write is not read.
    order.view(-1)[int(offsets[-1]) :] = 2**30
    rank = [x.masked_fill(~here[..., None], torch.nan), weights, offsets, order]
    (y,) = run(template, case.node(rank), rank)
    assert (y[~here].view(torch.uint8) == 0xFF).all()
    assert torch.equal(y[here], want[here])


@pytest.mark.parametrize("template", BOTH)
@pytest.mark.parametrize("poison", [0x7F, 0xFF])
def test_what_stands_in_the_padding_changes_nothing(
    template: Any, poison: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(3, 96, 20, experts=2, choices=1, situ=True)
    tensors = case.tensors()
    (want,) = run(template, case.node(tensors), tensors)

    def poisoned(type_: Any, arrays: Any) -> np.ndarray[Any, Any]:
        data = pack(type_, arrays)
        if type_.dtype.name == "mxfp4":
            used = pack(type_, [np.full_like(a, 0xFF) for a in arrays])
            assert (used != 0xFF).any(), "20 outputs must leave rows of the last tile empty"
            data |= poison & ~used
        return data

    monkeypatch.setattr(triton_runner, "pack", poisoned)
    (got,) = run(template, case.node(tensors), tensors)
    assert torch.equal(got, want)


@pytest.mark.parametrize("act", ["f32", "bf16"])
@pytest.mark.parametrize(("scale", "x"), [(0, 2.0**100), (1, 2.0**100), (254, 2.0**-100)])
def test_extreme_scales_are_exact(act: str, scale: int, x: float) -> None:
    case = Case(6, 32, 16, experts=1, choices=1, act=act)
    tensors = case.tensors(torch.zeros(6, 1).int())
    codes = torch.full((1, 16, 16), 0x21, dtype=torch.uint8)  # 0.5 and 1.0
    scales = torch.full((1, 16, 1), scale, dtype=torch.uint8)
    tensors[0] = torch.full((6, 32), x, dtype=TORCH[act])
    tensors[1] = (codes, scales)
    (y,) = run(DECODE, case.node(tensors), tensors)
    assert (y.float() == 24.0 * x * 2.0 ** (scale - 127)).all()


@pytest.mark.parametrize("template", BOTH)
def test_scale_255_is_nan(template: Any) -> None:
    case = Case(1, 32, 16, experts=1, choices=1)
    tensors = case.tensors(torch.zeros(1, 1).int())
    tensors[1][1][0, 3] = 255
    (y,) = run(template, case.node(tensors), tensors)
    assert y.flatten().isnan().nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("act", ["f32", "bf16"])
def test_every_code_decodes_to_its_value(act: str) -> None:
    case = Case(1, 32, 16, experts=1, choices=1, act=act)
    tensors = case.tensors(torch.zeros(1, 1).int())
    packed = torch.zeros((1, 16, 16), dtype=torch.uint8)
    packed[0, :, 3] = torch.arange(16, dtype=torch.uint8) << 4  # code r at k = 7 of row r
    tensors[0] = torch.ones(1, 32, dtype=TORCH[act])
    tensors[1] = (packed, torch.full((1, 16, 1), 127, dtype=torch.uint8))
    (y,) = run(DECODE, case.node(tensors), tensors)
    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert y.flatten().tolist() == half + [-v for v in half]


@pytest.mark.parametrize("template", BOTH)
def test_a_row_has_the_same_bits_however_many_rows_its_expert_has(template: Any) -> None:
    bits = []
    for tokens in (1, 9, 20):
        case = Case(20, 96, 16, experts=2, choices=1)
        x, weights, *_ = case.tensors()
        # Expert 0 has the first `tokens` tokens, expert 1 the others.
        chosen = (torch.arange(20) >= tokens).int()[:, None]
        tensors = [x, weights, *dispatch(chosen, num_experts=2)]
        bits.append(run(template, case.node(tensors), tensors)[0][0, 0])
    assert all(torch.equal(first, bits[0]) for first in bits)


@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize("product", ["w13", "w2"])
def test_the_product_of_a_full_size_rank_compiles(product: str, target: str) -> None:
    few, many = (shapes(product, tokens, RANK) for tokens in (1, 8192))
    compiles(DECODE, few, load_target(target))
    compiles(PREFILL, many, load_target(target))


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_the_product_of_the_demo_in_f32_compiles(target: str) -> None:
    for template, tokens in ((DECODE, 8), (PREFILL, 600)):
        compiles(template, shapes("w13", tokens, DEMO, "f32"), load_target(target))


@pytest.mark.parametrize("tokens", [1, 8, 64, 128, 512])
def test_no_configuration_starts_many_blocks_without_work(tokens: int) -> None:
    (stage,) = DECODE.stages(shapes("w13", tokens, RANK), load_target("h200"))
    assert stage.grid[0] <= 8 * load_target("h200").cores


def test_all_configurations_read_one_layout() -> None:
    target = load_target("h200")
    names = {
        template.layouts(shapes("w13", tokens, RANK), target)[1]
        for template in BOTH
        for tokens in (1, 64, 512)
    }
    assert names == {"mxfp4_gpu.16x128.3072s"}


def test_cost_reads_no_more_experts_than_rows_can_choose() -> None:
    target = load_target("h200")
    cost = DECODE.cost(with_layouts(DECODE, shapes("w2", 1, RANK), target), target)
    matrices = 16 * 3584 * 3072 * 17 // 32
    assert cost.read_bytes == matrices + 16 * 3072 * 2 + 57 * 4 + 16 * 4
    assert cost.write_bytes == 16 * 3584 * 2
    assert cost.flops == 2 * 16 * 3584 * 3072


def test_what_it_cannot_do_is_refused_with_the_reason() -> None:
    target = load_target("h200")
    n = shapes("w2", 513, RANK)
    gelu = replace(n, attrs={**n.attrs, "epilogue": "gelu"})
    assert "epilogue must be none or situ (gelu)" in str(PREFILL.accepts(gelu, target))
    assert "grouped_gemm_decode takes 512 tokens (513)" in str(DECODE.accepts(n, target))
    situ = replace(n, attrs={**n.attrs, "epilogue": "situ"})
    assert "uses 7168 rows an expert (3584)" in str(PREFILL.accepts(situ, target))


def shapes(product: str, tokens: int, model: tuple[int, int, int, int], act: str = "bf16") -> Node:
    """Return a node of a model: experts, choices, latent and inner width."""
    experts, choices, latent, inner = model
    x, rows, k, width = (
        (value("x", act, tokens, latent), 2 * inner, latent, inner)
        if product == "w13"
        else (value("x", act, tokens, choices, inner), latent, inner, latent)
    )
    operands = (
        x,
        value("w", "mxfp4", experts, rows, k),
        value("offsets", "i32", experts + 1),
        value("order", "i32", tokens, choices),
    )
    epilogue = "situ" if product == "w13" else "none"
    attrs = {"epilogue": epilogue, "beta": 4.0, "linear_beta": 25.0}
    return Node("grouped_gemm", operands, (value("y", act, tokens, choices, width),), attrs)
