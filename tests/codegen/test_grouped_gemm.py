"""grouped_gemm on MXFP4 experts, decode and prefill, against the reference op."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from k3c.codegen.template import pack
from k3c.codegen.templates.tvm.grouped_gemm import GROUPED_DECODE, GROUPED_PREFILL
from k3c.export.ops import dispatch
from k3c.ir.graph import Node
from k3c.targets.target import load_target
from tests.support.kernel_runner import Operand, check, node, prepare, run, with_layouts

# f32: up to 704 products in another order than torch's. bf16: one unit of 2^-8 where a sum near a
# rounding boundary rounds the other way; with SiTU gate and up each may.
BOUNDS = {"f32": 2e-5, "bf16": 2**-6}
TORCH = {"bf16": torch.bfloat16, "f32": torch.float32}
TARGET = load_target("cpu-avx2")
BOTH = [GROUPED_DECODE, GROUPED_PREFILL]


@dataclass(frozen=True)
class Case:
    """A grouped GEMM over random experts, `choices` of them a token."""

    tokens: int
    inner: int
    width: int
    experts: int = 13
    choices: int = 4
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

    def check(self, template: object, chosen: torch.Tensor | None = None) -> None:
        tensors = self.tensors(chosen)
        check(template, self.node(tensors), tensors, BOUNDS[self.act])


@pytest.mark.parametrize("act", ["f32", "bf16"])
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_decode_matches_the_reference(tokens: int, act: str) -> None:
    Case(tokens, 96, 40, situ=True, act=act).check(GROUPED_DECODE)
    Case(tokens, 256, 40, per_choice=True, act=act).check(GROUPED_DECODE)


@pytest.mark.parametrize("act", ["f32", "bf16"])
@pytest.mark.parametrize("tokens", [1, 3, 63, 100])
def test_prefill_matches_the_reference(tokens: int, act: str) -> None:
    Case(tokens, 96, 40, situ=True, act=act).check(GROUPED_PREFILL)
    Case(tokens, 256, 40, per_choice=True, act=act).check(GROUPED_PREFILL)


def test_experts_may_have_no_row_one_row_or_129_rows() -> None:
    chosen = torch.full((130, 1), 2, dtype=torch.int32)
    chosen[40] = 0
    Case(130, 96, 40, experts=4, choices=1).check(GROUPED_PREFILL, chosen)


def test_all_rows_of_a_decode_step_may_meet_one_expert() -> None:
    chosen = torch.full((8, 1), 3, dtype=torch.int32)
    Case(8, 96, 40, experts=4, choices=1).check(GROUPED_DECODE, chosen)


@pytest.mark.parametrize("template", BOTH)
def test_896_experts_with_the_winners_at_the_end(template: object) -> None:
    chosen = torch.arange(895, 879, -1).int().view(1, 16)
    Case(1, 32, 16, experts=896, choices=16).check(template, chosen)


@pytest.mark.parametrize("template", BOTH)
def test_inner_704_matches_the_reference(template: object) -> None:
    Case(2, 704, 24, experts=3, choices=2, per_choice=True).check(template)


@pytest.mark.parametrize("template", BOTH)
@pytest.mark.parametrize("poison", [0x7F, 0xFF])
def test_what_stands_in_the_padding_changes_nothing(template: object, poison: int) -> None:
    case = Case(3, 96, 20, situ=True)
    tensors = case.tensors()
    n = with_layouts(template, case.node(tensors), load_target("cpu"))
    type_ = n.operands[1].type
    pair = [t.numpy() for t in tensors[1]]
    ones = pack(type_, [np.full_like(a, 0xFF) for a in pair])
    padding = ones == 0
    assert padding.any(), "20 outputs must leave columns of the last panel empty"
    ready = prepare(template, n, tensors)
    ready.buffers[1].data[padding] = poison
    ready.launch()
    (want,) = run(template, n, tensors)
    got = torch.from_numpy(ready.outputs[0].data.copy()).view(torch.bfloat16)
    assert torch.equal(got.view(want.shape), want)


@pytest.mark.parametrize("template", BOTH)
@pytest.mark.parametrize(("scale", "x"), [(0, 2.0**100), (1, 2.0**100), (254, 2.0**-100)])
def test_extreme_scales_are_exact(template: object, scale: int, x: float) -> None:
    case = Case(6, 32, 16, experts=1, choices=1, act="f32")
    tensors = case.tensors(torch.zeros(6, 1).int())
    codes = torch.full((1, 16, 16), 0x21, dtype=torch.uint8)  # 0.5 and 1.0
    scales = torch.full((1, 16, 1), scale, dtype=torch.uint8)
    tensors[0] = torch.full((6, 32), x)
    tensors[1] = (codes, scales)
    (y,) = run(template, case.node(tensors), tensors)
    assert (y == 24.0 * x * 2.0 ** (scale - 127)).all()


@pytest.mark.parametrize("template", BOTH)
def test_scale_255_is_nan(template: object) -> None:
    case = Case(1, 32, 16, experts=1, choices=1, act="f32")
    tensors = case.tensors(torch.zeros(1, 1).int())
    _, scale = tensors[1]
    scale[0, 3] = 255
    (y,) = run(template, case.node(tensors), tensors)
    assert y.flatten().isnan().nonzero().flatten().tolist() == [3]


def test_every_code_decodes_to_its_value() -> None:
    case = Case(1, 32, 16, experts=1, choices=1, act="f32")
    tensors = case.tensors(torch.zeros(1, 1).int())
    packed = torch.zeros((1, 16, 16), dtype=torch.uint8)
    packed[0, :, 3] = torch.arange(16, dtype=torch.uint8) << 4  # code r at k = 7 of row r
    tensors[0] = torch.ones(1, 32)
    tensors[1] = (packed, torch.full((1, 16, 1), 127, dtype=torch.uint8))
    (y,) = run(GROUPED_DECODE, case.node(tensors), tensors)
    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert y.flatten().tolist() == half + [-v for v in half]


def test_one_prefill_kernel_serves_every_number_of_tokens() -> None:
    nodes = [(c := Case(t, 96, 40)).node(c.tensors()) for t in (16, 63)]
    few, many = (GROUPED_PREFILL.constants(n, TARGET) for n in nodes)
    assert few == many


def test_cost_reads_no_more_experts_than_rows_can_choose() -> None:
    case = Case(1, 96, 40, choices=4)
    cost = GROUPED_DECODE.cost(case.node(case.tensors()), TARGET)
    # 40 columns fill 3 panels of 16; 4.25 bits a weight; offsets, order and x beside them.
    weights = 4 * 3 * 16 * 96 * 17 // 32
    assert cost.read_bytes == weights + 96 * 2 + 14 * 4 + 4 * 4
    assert cost.write_bytes == 4 * 40 * 2
    assert cost.flops == 2 * 4 * 40 * 96


def test_what_it_cannot_do_is_refused_with_the_reason() -> None:
    case = Case(9, 96, 40)
    n = case.node(case.tensors())
    gelu = replace(n, attrs={**n.attrs, "epilogue": "gelu"})
    assert "epilogue must be none or situ (gelu)" in str(GROUPED_PREFILL.accepts(gelu, TARGET))
    assert "grouped_decode takes 8 tokens (9)" in str(GROUPED_DECODE.accepts(n, TARGET))
    situ = replace(n, attrs={**n.attrs, "epilogue": "situ"})
    assert "uses 80 rows an expert (40)" in str(GROUPED_PREFILL.accepts(situ, TARGET))


@pytest.mark.parametrize("template", BOTH)
def test_a_row_has_the_same_bits_however_many_rows_its_expert_has(template: object) -> None:
    bits = []
    for tokens in (1, 2, 4, 5, 8):
        case = Case(8, 96, 40, experts=3, choices=1, act="f32")
        x, weights, *_ = case.tensors()
        # Expert 0 has the first `tokens` tokens, expert 1 the others.
        chosen = (torch.arange(8) >= tokens).int()[:, None]
        tensors = [x, weights, *dispatch(chosen, num_experts=3)]
        bits.append(run(template, case.node(tensors), tensors)[0][0, 0])
    assert all(torch.equal(first, bits[0]) for first in bits)
