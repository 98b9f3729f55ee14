"""kda_fb of decode buckets against the reference op, and what it must leave alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3c.codegen.templates.triton.kda_decode import TEMPLATES
from k3c.export.ops import REFERENCE
from k3c.targets.target import load_target
from tests.support.kda_fb_case import CONV_STATE, F_A, KDA_STATE, KdaFbCase
from tests.support.triton_runner import GPU_TARGETS, compiles, run

KDA = TEMPLATES[0]
# f32 throughout but another order of sums over up to 128 terms, and exp to 2e-7.
F32_BOUND = 2e-5
# One bf16 rounding (2^-9) of an output, twice where o and its norm round apart: an ulp either way.
BF16_BOUND = 1.2e-2
F32 = torch.float32


class Pinned(type(KDA)):
    """The template with one of its configurations."""

    def __init__(self, index: int) -> None:
        self.index = index

    def config(self, node, target):
        return self.configs(node, target)[self.index]


def wide(operands: list[Tensor]) -> list[Tensor]:
    """Operands with floats as float64: the reference then rounds nowhere."""
    return [t.double() if t.is_floating_point() else t for t in operands]


def error(got: Tensor, want: Tensor) -> float:
    """max|diff| / max|want|."""
    if not got.numel():
        return 0.0
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def check(case: KdaFbCase, template=KDA) -> list[Tensor]:
    """Run, and compare live rows and slots with the reference, the rest with its bits."""
    operands = case.operands()
    exact = case.act == F32
    results = run(template, case.node(operands), operands)
    want = REFERENCE["kda_fb"](*(wide(operands) if exact else operands), **case.attrs)
    bound = F32_BOUND if exact else BF16_BOUND
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


# Small: the interpreter takes a third of a second a block.
CASES = [
    KdaFbCase(1, 128, 128, 1, (1,), (7,), rank=128),
    KdaFbCase(2, 32, 32, 4, (1, 1, 1, 0), (3, 0, 9, 0)),
    KdaFbCase(1, 64, 64, 3, (1, 1, 1), (1, 2, 0), rank=64, act=F32),
    KdaFbCase(2, 16, 16, 2, (1, 0), (5, 0), act=F32, lower_bound="none"),
    KdaFbCase(1, 20, 20, 3, (1, 1, 0), (1, 0, 0), rank=20, act=F32),
    KdaFbCase(1, 32, 32, 2, (1, 1), (4, 0), state=torch.bfloat16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_the_reference_and_touches_only_its_slots(case):
    check(case)


@pytest.mark.parametrize("index", range(1, 5))
def test_every_configuration_gives_the_same(index):
    check(KdaFbCase(1, 64, 64, 1, (1,), (7,)), Pinned(index))


def test_padding_alone_writes_zeros_and_no_slot():
    case = KdaFbCase(1, 32, 32, 2, (0, 0), (0, 0))
    operands = case.operands()
    out, history, state = run(KDA, case.node(operands), operands)
    assert not out.any()
    assert torch.isnan(history).all()
    assert torch.isnan(state).all()


def test_a_row_past_an_idle_segment_is_not_taken_for_padding():
    """Segment 0 idles: row 0 belongs to segment 1, and row 1 to nobody."""
    check(KdaFbCase(1, 32, 32, 2, (0, 1), (0, 4), act=F32))


def test_slots_in_any_order():
    case = KdaFbCase(1, 32, 32, 3, (1, 1, 1), (3, 1, 9), act=F32)
    operands = case.operands()
    first = run(KDA, case.node(operands), operands)
    order = [2, 0, 1]
    moved = [t[order] if i < 6 else t for i, t in enumerate(operands)]
    moved[17] = operands[17][order]
    moved[18] = operands[18][order]
    again = run(KDA, case.node(moved), moved)
    assert torch.equal(again[0], first[0][order])
    for a, b in zip(again[1:], first[1:], strict=True):
        assert torch.equal(a.view(torch.int8), b.view(torch.int8))


def test_a_row_does_not_depend_on_the_rows_beside_it():
    alone, beside = (KdaFbCase(1, 32, 32, n, (1,) * n, (3,) * n) for n in (1, 3))
    small, large = alone.operands(), beside.operands()
    for i in range(6):
        large[i][:1] = small[i]
    large[6:CONV_STATE] = small[6:CONV_STATE]
    for i in (CONV_STATE, KDA_STATE):
        large[i][beside.slots[0]] = small[i][alone.slots[0]]
    one = run(KDA, alone.node(small), small)
    three = run(KDA, beside.node(large), large)
    assert torch.equal(one[0], three[0][:1])
    assert torch.equal(one[2][alone.slots[0]], three[2][beside.slots[0]])


def test_other_shapes_are_refused():
    h200 = load_target("h200")
    long = KdaFbCase(2, 32, 32, 4, (3, 1), (0, 0))
    assert "one row a segment" in str(KDA.accepts(long.node(long.operands()), h200))
    broad = KdaFbCase(2, 256, 256, 1, (1,), (1,))
    assert "width up to 128" in str(KDA.accepts(broad.node(broad.operands()), h200))


@pytest.mark.parametrize("name", GPU_TARGETS)
@pytest.mark.parametrize("segments", [1, 64])
def test_it_compiles_at_the_shapes_of_16_ranks(name, segments):
    case = KdaFbCase(6, 128, 128, segments, (1,) * segments, (1,) * segments, rank=128)
    compiles(KDA, case.node(case.operands()), load_target(name))


@pytest.mark.device
@pytest.mark.parametrize("heads", [4, 6, 12, 24, 48, 96])
@pytest.mark.parametrize("segments", [1, 8, 64])
def test_real_shapes(heads, segments):
    context = tuple(range(segments))
    check(KdaFbCase(heads, 128, 128, segments, (1,) * segments, context, rank=128))


STEPS = 4096


def steps(decay: bool) -> tuple[list[Tensor], list[Tensor], KdaFbCase]:
    """Operands of 64 independent requests, and the inputs of all their steps."""
    case = KdaFbCase(2, 128, 128, 64, (1,) * 64, (1,) * 64, rank=128, act=F32)
    operands = case.operands()
    gen = torch.Generator().manual_seed(5)
    rows = [torch.randn((STEPS // 64, *t.shape), generator=gen) for t in operands[:6]]
    if decay:
        # g = -8e-5: a decay of 0.99992. Nothing is written (beta = 0): the state only decays.
        rows[F_A].zero_()
        rows[5].fill_(-80.0)
        operands[9].zero_()
        operands[10].fill_(-11.043)
    return operands, rows, case


def run_steps(operands: list[Tensor], rows: list[Tensor], case: KdaFbCase, total: int) -> Tensor:
    """Feed `total` steps to one pool; return the state."""
    state = list(operands)
    for i in range(total):
        state[:6] = [t[i % len(t)] for t in rows]
        _, state[CONV_STATE], state[KDA_STATE] = run(KDA, case.node(state), state)
    return state[KDA_STATE]


@pytest.mark.device
def test_a_slow_channel_keeps_its_time_constant_over_4096_steps():
    operands, rows, case = steps(decay=True)
    state = run_steps(operands, rows, case, STEPS)
    g = -5.0 * torch.sigmoid(torch.tensor(-11.043, dtype=torch.float64))
    want = operands[KDA_STATE][case.slots].double() * torch.exp(STEPS * g)
    each = (state[case.slots].double() - want).abs() / want.abs()
    # 4,096 roundings of 6e-8 at random; a rounded decay would bend all by 4,096 * 3e-8 = 1.2e-4.
    assert float(each.max()) < 1e-5


@pytest.mark.device
def test_error_does_not_grow_over_4096_steps():
    operands, rows, case = steps(decay=False)
    errors = []
    state, exact = list(operands), wide(operands)
    for i in range(STEPS):
        state[:6] = [t[i % len(t)] for t in rows]
        exact[:6] = [t[i % len(t)].double() for t in rows]
        _, state[CONV_STATE], state[KDA_STATE] = run(KDA, case.node(state), state)
        _, exact[CONV_STATE], exact[KDA_STATE] = REFERENCE["kda_fb"](*exact, **case.attrs)
        errors.append(error(state[KDA_STATE][case.slots], exact[KDA_STATE][case.slots]))
    quarters = [max(errors[i : i + STEPS // 4]) for i in range(0, STEPS, STEPS // 4)]
    assert max(quarters) <= F32_BOUND
    # No drift: the last quarter errs like the first; a factor of 3 is the spread of maxima.
    assert quarters[-1] <= 3 * quarters[0]
