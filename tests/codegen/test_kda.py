"""Both KDA kernels against the reference op, and what they must leave alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3c.codegen.templates.tvm import kda_decode, kda_prefill
from k3c.export.ops import REFERENCE
from tests.support.kda_case import CONV_STATE, KDA_STATE, KdaCase
from tests.support.kernel_runner import run

DECODE, PREFILL = kda_decode.TEMPLATES[0], kda_prefill.TEMPLATES[0]
# f32 throughout but another order of sums over up to 128 terms, and exp to 2e-7.
F32_BOUND = 2e-5
# One bf16 rounding (2^-9) of an output, twice where o and its norm round apart: an ulp either way.
BF16_BOUND = 1.2e-2


def wide(operands: list[Tensor]) -> list[Tensor]:
    """Operands with floats as float64: the reference then rounds nowhere."""
    return [t.double() if t.is_floating_point() else t for t in operands]


def error(got: Tensor, want: Tensor) -> float:
    """max|diff| / max|want|."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def check(template, case: KdaCase) -> list[Tensor]:
    """Run twice and compare live rows and slots with the reference, the rest with its bits."""
    operands = case.operands()
    exact = case.act == torch.float32
    results = run(template, case.node(operands), operands)
    again = run(template, case.node(operands), operands)
    want = REFERENCE["kda"](*(wide(operands) if exact else operands), **case.attrs)
    bound = F32_BOUND if exact else BF16_BOUND
    for got, twice in zip(results, again, strict=True):
        assert torch.equal(got.view(torch.int8), twice.view(torch.int8)), "differs from run to run"
    live = sum(case.tokens)
    assert not results[0][live:].any(), "a padding row is not zero"
    assert error(results[0][:live], want[0][:live]) <= bound
    used = [s for s, n in zip(case.slots, case.tokens, strict=True) if n]
    rest = [s for s in range(max(case.slots) + 2) if s not in used]
    for index, operand in ((1, CONV_STATE), (2, KDA_STATE)):
        # The state keeps f32 sums of bf16-rounded k and v: a rounding may fall the other way.
        limit = bound if index == 2 else 0.0
        assert error(results[index][used], want[index][used]) <= limit
        kept, before = results[index][rest], operands[operand][rest]
        assert torch.equal(kept.view(torch.int8), before.view(torch.int8)), "touched another slot"
    return results


DECODE_CASES = [
    KdaCase(8, 128, 128, 1, (1,), (7,)),
    KdaCase(6, 32, 32, 4, (1, 1, 1, 0), (3, 0, 9, 0)),
    KdaCase(12, 64, 64, 3, (1, 1, 1), (1, 2, 0), act=torch.float32),
    KdaCase(96, 16, 16, 2, (1, 0), (5, 0), act=torch.float32, lower_bound="none"),
    KdaCase(3, 20, 20, 8, (1,) * 7 + (0,), (1, 0, 2, 3, 4, 5, 6, 0), act=torch.float32),
    KdaCase(4, 64, 64, 2, (0, 0), (0, 0)),
]


@pytest.mark.parametrize("case", DECODE_CASES[:-1], ids=str)
def test_decode_equals_the_reference_and_touches_only_its_slots(case):
    check(DECODE, case)


def test_decode_of_padding_alone_writes_zeros_and_no_slot():
    case = DECODE_CASES[-1]
    operands = case.operands()
    out, history, state = run(DECODE, case.node(operands), operands)
    assert not out.any()
    assert torch.isnan(history).all()
    assert torch.isnan(state).all()


PREFILL_CASES = [
    KdaCase(2, 128, 128, 64, (33, 1, 0, 30), (7, 2, 0, 0)),
    KdaCase(6, 32, 32, 100, (63, 36), (0, 5), act=torch.float32),
    KdaCase(3, 64, 64, 20, (16, 3), (4, 0), act=torch.float32, lower_bound="none"),
    KdaCase(12, 20, 20, 17, (3, 0, 12, 1, 0), (0, 0, 2, 3, 0), act=torch.float32),
    KdaCase(96, 16, 16, 40, (0, 40), (0, 0)),
]


@pytest.mark.parametrize("case", PREFILL_CASES, ids=str)
def test_prefill_equals_the_reference_and_touches_only_its_slots(case):
    check(PREFILL, case)
