"""KDA prefill on GPUs: chunks, the scan over them, and the gated norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from k3c.codegen.templates.triton.kda_prefill import KdaPrefill
from k3c.export.ops import REFERENCE
from k3c.ir.graph import Node
from k3c.targets.target import load_target
from tests.support.kda_case import KdaCase
from tests.support.triton_runner import GPU_TARGETS, compiles, node, run, value

CONV_STATE, KDA_STATE = 13, 14
# f32 throughout, but decays are sums of up to 32 logs, and the sums run in another order.
F32_BOUND = 2e-5
# One bf16 rounding (2^-9) of an output, twice where o and its norm round apart: an ulp either way.
BF16_BOUND = 1.2e-2
# Dot operands are f16: 2^-12 each, of four factors that meet in the state; norms, not maxima: a
# bf16 rounding of the convolution that falls the other way moves single values by 2^-8.
STATE_NORM_BOUND = 1e-3


@dataclass(frozen=True)
class PrefillCase(KdaCase):
    """A step of `kda_fb`: the gate's input comes from f_a A[T, forget] and f_b.

    Attributes:
        forget: Width of f_a.
        decay: Mean and spread of dt_bias: -9 forgets nothing, 3 forgets all within a token.
        value_scale: Size of v and of the state.
    """

    forget: int = 32
    decay: tuple[float, float] = (-3.0, 2.5)
    value_scale: float = 1.0

    def operands(self) -> list[Tensor]:
        """Return the operands of kda_fb."""
        made = super().operands()
        gen = torch.Generator().manual_seed(self.seed + 1)
        low = torch.randn((self.rows, self.forget), generator=gen).to(self.act)
        low[sum(self.tokens) :] = torch.nan
        made[4] = low
        made[2], made[-5] = made[2] * self.value_scale, made[-5] * self.value_scale
        mean, spread = self.decay
        made[10] = mean + spread * torch.randn(made[10].shape, generator=gen)
        made[9] = made[9] * 0.5
        width = self.heads * self.key
        up = torch.randn((width, self.forget), generator=gen) * self.forget**-0.5
        return [*made[:12], up.to(self.act), *made[12:]]

    def node(self, operands: list[Tensor]) -> Node:
        """Return the node."""
        act = "bf16" if self.act == torch.bfloat16 else "f32"
        kept = "bf16" if operands[KDA_STATE].dtype == torch.bfloat16 else "f32"
        states = [(act, *operands[CONV_STATE].shape), (kept, *operands[KDA_STATE].shape)]
        return node("kda_fb", operands, [(act, *operands[2].shape), *states], **self.attrs)


def wide(operands: list[Tensor]) -> list[Tensor]:
    """Operands with floats as float64: the reference then rounds nowhere."""
    return [t.double() if t.is_floating_point() else t for t in operands]


def exact_state(case: PrefillCase, operands: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs and states in float64 from the rounded convolution and forget projection."""
    q, k, v, z, f_a, b, *weights = operands
    cq, ck, cv, a_log, dt_bias, o_norm, f_b, history, state, *where = weights
    q, k, v, _ = REFERENCE["short_conv"](q, k, v, cq, ck, cv, history, *where)
    (f,) = REFERENCE["linear"](f_a, f_b)
    q, k, v, z, f, b = wide([q, k, v, z, f, b])
    (q,) = REFERENCE["l2_norm"](q, case.heads, case.key**-0.5, 1e-6)
    (k,) = REFERENCE["l2_norm"](k, case.heads, 1.0, 1e-6)
    (g,) = REFERENCE["kda_gate"](f, a_log, dt_bias, case.lower_bound)
    o, after = REFERENCE["kda_recurrence"](q, k, v, g, b, state.double(), *where, 64)
    (o,) = REFERENCE["gated_rms_norm"](o, o_norm.double(), z, case.heads, 1e-5)
    return o, after


def error(got: Tensor, want: Tensor) -> float:
    """max|diff| / max|want|."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def norm_error(got: Tensor, want: Tensor) -> float:
    """|diff| / |want| in the Euclidean norm."""
    return float((got.double() - want.double()).norm() / want.double().norm())


class Narrowed(KdaPrefill):
    """The template with one configuration instead of the measured one."""

    def __init__(self, width: int) -> None:
        self.width = width

    def config(self, node: Any, target: Any) -> Any:
        """Return the configuration."""
        found = [c for c in self.configs(node, target) if c["width"] == self.width]
        assert found, f"no configuration of width {self.width}"
        return found[0]


def check(case: PrefillCase, template: KdaPrefill | None = None) -> list[Tensor]:
    """Compare live rows and slots with the reference, the rest with its bits."""
    operands = case.operands()
    results = run(template or KdaPrefill(), case.node(operands), operands)
    live = sum(case.tokens)
    assert not results[0][live:].any(), "a padding row is not zero"
    used = [s for s, n in zip(case.slots, case.tokens, strict=True) if n]
    rest = [s for s in range(max(case.slots) + 2) if s not in used]
    if case.act == torch.float32:
        out, _, state = REFERENCE["kda_fb"](*wide(operands), **case.attrs)
        assert error(results[2][used], state[used]) <= F32_BOUND
        assert error(results[0][:live], out[:live]) <= F32_BOUND
    else:
        out, state = exact_state(case, operands)
        assert norm_error(results[2][used], state[used]) <= STATE_NORM_BOUND
        assert error(results[0][:live], out[:live]) <= BF16_BOUND
    kept = REFERENCE["short_conv"](*operands[:3], *operands[6:9], operands[13], *operands[15:])[3]
    assert torch.equal(results[1][used], kept[used])
    for index, operand in ((1, CONV_STATE), (2, KDA_STATE)):
        after, before = results[index][rest], operands[operand][rest]
        assert torch.equal(after.view(torch.int8), before.view(torch.int8)), "touched another slot"
    return results


F32 = torch.float32
SMALL = [
    PrefillCase(1, 32, 32, 150, (130, 1, 0, 2), (3, 0, 0, 2), act=F32),
    PrefillCase(2, 32, 32, 70, (63,), (5,)),
    PrefillCase(1, 32, 32, 100, (33, 64, 0), (0, 9, 0), lower_bound="none", decay=(2.0, 2.0)),
    PrefillCase(1, 64, 64, 70, (3, 66), (0, 2), value_scale=1e-4, decay=(3.0, 1.0)),
    PrefillCase(1, 128, 128, 65, (65,), (0,), decay=(-9.0, 1.0), forget=128),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_prefill_equals_the_reference_and_touches_only_its_slots(case: PrefillCase) -> None:
    check(case)


def test_blocks_that_share_a_head_leave_its_norm_to_a_third_launch() -> None:
    case = PrefillCase(2, 32, 32, 100, (20, 70), (4, 0))
    assert len(Narrowed(16).stages(case.node(case.operands()), load_target("h200"))) == 3
    check(case, Narrowed(16))


def bound_node(
    heads: int, rows: int = 8192, width: int = 128, act: str = "bf16", segments: int = 8,
    kept: str = "f32",
) -> Node:  # fmt: skip
    """A node of K3's shapes without tensors."""
    keys = heads * width
    shapes: list[tuple[Any, ...]] = [(act, rows, keys)] * 4 + [(act, rows, 128), (act, rows, heads)]
    shapes += [("f32", keys, 4)] * 3 + [("f32", heads), ("f32", keys), ("f32", width)]
    shapes += [("bf16", keys, 128), (act, 65, 3, 3 * keys), (kept, 65, heads, width, width)]
    shapes += [("i32", segments)] * 4
    operands = tuple(value(f"x{i}", *shape) for i, shape in enumerate(shapes))
    results = [value("y0", act, rows, keys), value("y1", *shapes[13]), value("y2", *shapes[14])]
    attrs = {"heads": heads, "lower_bound": -5.0, "scale": width**-0.5, "l2_eps": 1e-6, "eps": 1e-5}
    return Node("kda_fb", operands, tuple(results), {**attrs, "chunk": 64})


@pytest.mark.slow
@pytest.mark.parametrize("target", GPU_TARGETS)
def test_every_target_has_the_kernels(target: str) -> None:
    assert len(compiles(KdaPrefill(), bound_node(12), load_target(target))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("heads", [6, 96])
def test_other_shards_have_the_kernels(heads: int) -> None:
    compiles(KdaPrefill(), bound_node(heads), load_target("h200"))


def test_the_workspace_of_all_heads_stays_below_3_gib() -> None:
    target = load_target("h200")
    narrow, wide_ = bound_node(96), bound_node(96, act="f32")
    assert KdaPrefill().workspace_bytes(narrow, target) == 135 * 96 * (72 * 1024 + 512 + 64)
    assert KdaPrefill().workspace_bytes(wide_, target) < 3 * 2**30


def test_refusals_say_why() -> None:
    target = load_target("h200")
    few = bound_node(6, rows=8)
    assert "8 rows in 8 segments" in str(KdaPrefill().accepts(few, target))
    odd = bound_node(6, width=16)
    assert "head dims of 32, 64 or 128" in str(KdaPrefill().accepts(odd, target))
    assert KdaPrefill().accepts(bound_node(6), target) is None


@pytest.mark.parametrize("heads", [4, 6, 12, 24, 48, 96])
@pytest.mark.parametrize("target", GPU_TARGETS)
def test_the_first_configuration_fits_and_grids_are_within_limits(heads: int, target: str) -> None:
    n, device = bound_node(heads, segments=64), load_target(target)
    for config in KdaPrefill().configs(n, device):
        assert config["width"] in (16, 32, 64, 128)
    for stage in KdaPrefill().stages(n, device):
        assert stage.grid[1:] == (1, 1)
