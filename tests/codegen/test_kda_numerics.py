"""KDA kernels over long runs and extreme decays, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from k3c.codegen.templates.tvm import kda_decode, kda_prefill
from k3c.export.ops import REFERENCE
from tests.support.closeness import relative_error
from tests.support.kda_case import CONV_STATE, KDA_STATE, KdaCase
from tests.support.kernel_runner import run

DECODE, PREFILL = kda_decode.TEMPLATES[0], kda_prefill.TEMPLATES[0]
F, B, A_LOG, DT_BIAS, SEG_START = 4, 5, 9, 10, 14
STEPS = 4096
# f32 sums of up to 128 terms in another order than float64's; exp and sigmoid to 5e-7.
BOUND = 2e-5


def one(rows: int, tokens: int, context: int, **options) -> KdaCase:
    """One request of `tokens` tokens in a step of `rows` rows, float32 throughout."""
    return KdaCase(2, 32, 32, rows, (tokens,), (context,), act=torch.float32, **options)


def steady(case: KdaCase, gate: float) -> list[Tensor]:
    """Operands whose gate input is the same everywhere: g = bound * sigmoid(gate)."""
    operands = case.operands()
    operands[F][: sum(case.tokens)] = gate
    operands[A_LOG].zero_()
    operands[DT_BIAS].zero_()
    return operands


def reference(case: KdaCase, operands: list[Tensor]) -> tuple[Tensor, ...]:
    """The reference op in float64, in chunks: token by token it takes ten times as long."""
    wide = [t.double() if t.is_floating_point() else t for t in operands]
    return REFERENCE["kda"](*wide, **{**case.attrs, "chunk": 64})


def decode_all(case: KdaCase, operands: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Feed a one-request step's rows to the decode kernel: outputs and final state.

    The kernel takes a segment's tokens one by one, through the state in memory, so one launch is as
    many decode steps; the other segments, which make the step one row a segment, are padded ones.
    """
    tokens, padding = case.tokens[0], (0,) * (case.rows - 1)
    many = dataclasses.replace(case, tokens=(tokens, *padding), context=(case.context[0], *padding))
    step = [*operands[:SEG_START], *many.operands()[SEG_START:]]
    out, _, state = run(DECODE, many.node(step), step)
    return out, state


@pytest.mark.parametrize("gate", [6.0, 30.0, -11.043, -40.0, 0.0])
@pytest.mark.parametrize("template", [DECODE, PREFILL], ids=lambda t: t.name)
def test_100_tokens_at_one_decay_stay_close_to_float64(template, gate):
    case = one(100, 100, 3)
    operands = steady(case, gate)
    if template is DECODE:
        out, state = decode_all(case, operands)
    else:
        out, _, state = run(template, case.node(operands), operands)
    want, _, want_state = reference(case, operands)
    assert relative_error(out, want) <= BOUND
    assert relative_error(state[1], want_state[1]) <= BOUND


def test_an_unbounded_gate_that_forgets_everything_stays_finite():
    case = one(40, 40, 3, lower_bound="none")
    operands = steady(case, 300.0)
    out, _, state = run(PREFILL, case.node(operands), operands)
    want, _, want_state = reference(case, operands)
    assert relative_error(out, want) <= BOUND
    assert relative_error(state[1], want_state[1]) <= BOUND


def test_error_does_not_grow_over_4096_decode_steps():
    case = one(STEPS, STEPS, 3)
    operands = case.operands()
    out, state = decode_all(case, operands)
    want, _, want_state = reference(case, operands)
    quarters = [relative_error(a, b) for a, b in zip(out.chunk(4), want.chunk(4), strict=True)]
    assert max(quarters) <= BOUND
    # No drift: the last quarter errs like the first; a factor of 3 is the spread of maxima.
    assert quarters[-1] <= 3 * quarters[0]
    assert relative_error(state[1], want_state[1]) <= BOUND


@pytest.mark.parametrize("template", [DECODE, PREFILL], ids=lambda t: t.name)
def test_a_slow_channel_keeps_its_time_constant_over_4096_steps(template):
    case = one(STEPS, STEPS, 3)
    # g = -8e-5: a decay of 0.99992. Nothing is written (beta = 0): the state only decays.
    operands = steady(case, -11.043)
    operands[B].fill_(-80.0)
    if template is DECODE:
        _, state = decode_all(case, operands)
    else:
        _, _, state = run(template, case.node(operands), operands)
    g = -5.0 * torch.sigmoid(operands[F][0, 0].double())
    want = operands[KDA_STATE][1].double() * torch.exp(STEPS * g)
    each = (state[1].double() - want).abs() / want.abs()
    # 4,096 roundings of 6e-8 at random; a rounded decay would bend all by 4,096 * 3e-8 = 1.2e-4.
    assert float(each.max()) < 1e-5


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 40])
def test_results_do_not_depend_on_where_a_prompt_is_cut(cut):
    tokens = 45
    whole = one(tokens, tokens, 0)
    operands = whole.operands()
    out, history, state = run(PREFILL, whole.node(operands), operands)
    parts, pools = [], [operands[CONV_STATE], operands[KDA_STATE]]
    for first, last in ((0, cut), (cut, tokens)):
        # One row of padding, so that a cut of one token is a prefill step too.
        case = one(last - first + 1, last - first, first)
        step = [torch.cat([t[first:last], t[:1]]) for t in operands[:6]]
        step += [*operands[6:CONV_STATE], *pools, *case.operands()[SEG_START:]]
        part, *pools = run(PREFILL, case.node(step), step)
        parts.append(part[:-1])
    assert relative_error(torch.cat(parts), out) <= BOUND
    assert torch.equal(pools[0][1], history[1])
    assert relative_error(pools[1][1], state[1]) <= BOUND


@pytest.mark.parametrize("rows", [46, 63, 100])
def test_padding_rows_change_no_bit(rows):
    first, more = (KdaCase(6, 32, 32, n, (29, 16), (0, 4)) for n in (45, rows))
    small, large = first.operands(), more.operands()
    for i in range(6):
        large[i][:45] = small[i]
    large[6:] = small[6:]
    want = run(PREFILL, first.node(small), small)
    got = run(PREFILL, more.node(large), large)
    assert torch.equal(got[0][:45], want[0])
    assert not got[0][45:].any()
    for a, b in zip(got[1:], want[1:], strict=True):
        assert torch.equal(a.view(torch.int8), b.view(torch.int8))
