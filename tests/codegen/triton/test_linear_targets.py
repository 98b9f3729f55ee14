"""Every GPU target has kernels of linear and norm_linear, ahead of time."""

from __future__ import annotations

import pytest

from k3c.targets.target import load_target
from tests.support.linear_case import REAL, WHOLE, Case, template_for
from tests.support.triton_runner import GPU_TARGETS, compiles


@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize("rows", [1, 8, 64, 8192])
def test_every_target_has_a_kernel_for_the_real_shapes(target: str, rows: int) -> None:
    inner, results = REAL["moe_in" if rows < 8192 else "kda_out"]
    compiles(template_for(rows, False), Case(rows, inner, results).node(), load_target(target))


@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize("rows", [8, 64])
def test_every_target_normalises(target: str, rows: int) -> None:
    case = Case(rows, 1536, WHOLE, norm=True)
    compiles(template_for(rows, True), case.node(), load_target(target))


@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize("rows", [8, 64])
def test_every_target_has_a_float32_kernel(target: str, rows: int) -> None:
    case = Case(rows, 7168, ((896, "none", "f32"),), "f32", "f32")
    compiles(template_for(rows, False), case.node(), load_target(target))
