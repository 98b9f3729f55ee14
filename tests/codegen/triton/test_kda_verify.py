"""kda_verify and kda_fold against their references, and the pair against decoding."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from k3c.codegen.templates.triton.kda_verify import TEMPLATES
from k3c.export.ops import REFERENCE
from k3c.ir.graph import Node
from k3c.targets.target import load_target
from tests.support.closeness import relative_error
from tests.support.kda_fb_case import CONV_STATE, KDA_STATE, KdaFbCase
from tests.support.nodes import NAMES, node
from tests.support.triton_runner import GPU_TARGETS, compiles, run

VERIFY, FOLD = TEMPLATES
WIDTH, SEG_START = 8, 15
F32 = torch.float32
# f32 sums of up to 128 terms in another order, over up to 8 tokens; exp to 2e-7.
F32_BOUND = 2e-5
# One bf16 rounding (2^-9) of an output, twice where o and its norm round apart: an ulp either way.
BF16_BOUND = 1.2e-2


@dataclass(frozen=True)
class VerifyCase(KdaFbCase):
    """A verify step: records that must not be read hold NaN."""

    def operands(self) -> list[Tensor]:
        base = super().operands()
        slots = base[KDA_STATE].shape[0]
        kept = (slots, WIDTH, self.heads, self.key)
        records = [torch.full(kept, torch.nan) for _ in range(3)]
        channels = base[CONV_STATE].shape[2]
        records.append(torch.full((slots, WIDTH, channels), torch.nan).to(self.act))
        return [*base[:SEG_START], *records, *base[SEG_START:]]

    def node(self, operands: list[Tensor]) -> Node:
        results = [operands[i] for i in (2, *range(SEG_START, SEG_START + 4))]
        types = [(NAMES[t.dtype], *t.shape) for t in results]
        return node("kda_verify", operands, types, width=WIDTH, **self.attrs)


def fold_node(operands: list[Tensor]) -> Node:
    return node("kda_fold", operands, [(NAMES[t.dtype], *t.shape) for t in operands[:2]])


def wide(operands: list[Tensor]) -> list[Tensor]:
    return [t.double() if t.is_floating_point() else t for t in operands]


def same(got: Tensor, want: Tensor, bound: float) -> None:
    """Compare where `want` is finite; elsewhere the bits of infinities and NaN must agree."""
    finite = torch.isfinite(want)
    assert torch.equal(torch.isfinite(got), finite)
    assert torch.equal(torch.isneginf(got), torch.isneginf(want))
    if finite.any():
        assert relative_error(got[finite], want[finite]) <= bound


CASES = [
    VerifyCase(1, 32, 32, 8, (3, 0, 2), (4, 0, 0)),
    VerifyCase(1, 64, 64, 5, (4, 1), (2, 3), rank=64, act=F32),
    VerifyCase(2, 16, 16, 2, (2,), (0,), act=F32, lower_bound="none"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_verify_equals_the_reference_and_writes_no_state(case):
    operands = case.operands()
    exact = case.act == F32
    results = run(VERIFY, case.node(operands), operands)
    want = REFERENCE["kda_verify"](*(wide(operands) if exact else operands), **case.attrs)
    live, bound = sum(case.tokens), F32_BOUND if exact else BF16_BOUND
    assert not results[0][live:].any(), "a padding row is not zero"
    same(results[0][:live], want[0][:live], bound)
    for got, wanted in zip(results[1:4], want[1:4], strict=True):
        same(got, wanted, F32_BOUND)
    assert torch.equal(results[4].isnan(), want[4].isnan())
    assert torch.equal(results[4].nan_to_num(), want[4].to(case.act).nan_to_num())


@pytest.mark.parametrize("accepted", [(3, 0, 1), (0, 0, 0), (1, 0, 2), (2, 0, 0)], ids=str)
def test_fold_equals_decoding_the_accepted_tokens(accepted):
    """Segment 1 is padding; segment 2 starts from nothing: its slot's bytes must not count."""
    case = VerifyCase(1, 32, 32, 8, (3, 0, 2), (4, 0, 0), act=F32)
    operands = case.operands()
    records = REFERENCE["kda_verify"](*operands, **case.attrs)[1:]
    pools = operands[CONV_STATE : KDA_STATE + 1]
    slots, counts = operands[SEG_START + 6], torch.tensor(accepted, dtype=torch.int32)
    given = [*pools, *records, slots, counts]
    history, state = run(FOLD, fold_node(given), given)
    _, want_history, want_state = REFERENCE["kda_fb"](
        *wide(operands[:SEG_START]), operands[SEG_START + 4], counts, *operands[-2:], **case.attrs
    )
    kept = [s for s in range(len(state)) if s not in slots[counts > 0]]
    used = [int(s) for s in slots[counts > 0]]
    assert torch.equal(history[used], want_history[used].to(case.act))
    assert not used or relative_error(state[used], want_state[used]) <= F32_BOUND
    for after, before in ((history, pools[0]), (state, pools[1])):
        assert torch.equal(after[kept].view(torch.int8), before[kept].view(torch.int8))


def test_fold_equals_its_reference_in_bf16():
    case = VerifyCase(2, 16, 16, 6, (3, 3), (4, 9), state=torch.bfloat16)
    operands = case.operands()
    records = REFERENCE["kda_verify"](*operands, **case.attrs)[1:]
    counts = torch.tensor((3, 1), dtype=torch.int32)
    given = [*operands[CONV_STATE : KDA_STATE + 1], *records, operands[-2], counts]
    got, want = run(FOLD, fold_node(given), given), REFERENCE["kda_fold"](*given)
    used = operands[-2].tolist()
    assert torch.equal(got[0][used], want[0][used])
    # One rounding of the state to bf16 that may fall the other way.
    same(got[1][used], want[1][used], 2**-7)


def test_a_segment_of_eight_tokens_fills_its_records():
    case = VerifyCase(1, 16, 16, 8, (8,), (3,), act=F32)
    operands = case.operands()
    results = run(VERIFY, case.node(operands), operands)
    slot = case.slots[0]
    assert all(torch.isfinite(r[slot]).all() for r in results[1:])
    assert all(torch.isnan(r[0]).all() for r in results[1:])


@pytest.mark.parametrize("name", GPU_TARGETS)
def test_both_compile_at_the_shapes_of_16_ranks(name):
    target = load_target(name)
    case = VerifyCase(6, 128, 128, 64, (8,) * 8, (1,) * 8, rank=128)
    operands = case.operands()
    compiles(VERIFY, case.node(operands), target)
    given = [*operands[CONV_STATE : SEG_START + 4], operands[-2], operands[-1]]
    compiles(FOLD, fold_node(given), target)


@pytest.mark.device
@pytest.mark.parametrize("heads", [4, 6, 12, 96])
@pytest.mark.parametrize("segments", [1, 8])
def test_real_shapes(heads, segments):
    tokens = tuple(1 + i % 8 for i in range(segments))
    context = tuple(range(segments))
    case = VerifyCase(heads, 128, 128, 8 * segments, tokens, context, rank=128)
    operands = case.operands()
    results = run(VERIFY, case.node(operands), operands)
    want = REFERENCE["kda_verify"](*operands, **case.attrs)
    live = sum(tokens)
    assert not results[0][live:].any()
    same(results[0][:live], want[0][:live], BF16_BOUND)
    for got, wanted in zip(results[1:4], want[1:4], strict=True):
        same(got, wanted, BF16_BOUND)
