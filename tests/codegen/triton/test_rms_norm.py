"""rms_norm on GPUs against the reference op."""

from __future__ import annotations

import pytest
import torch

from k3c.codegen.templates.triton.rms_norm import TEMPLATES
from k3c.targets.target import load_target
from tests.support.triton_runner import GPU_TARGETS, check, compiles, node

NORM = TEMPLATES[0]
# One sum in another order, then a reciprocal root to 2 ulp.
F32_BOUND = 2e-6
# One rounding to bf16 that may fall the other way: one ulp.
BF16_BOUND = 2**-7
BOUNDS = {torch.float32: F32_BOUND, torch.bfloat16: BF16_BOUND}


def case(rows: int, width: int, act: torch.dtype):
    gen = torch.Generator().manual_seed(rows)
    x = (torch.randn((rows, width), generator=gen) * 3).to(act)
    weight = 1 + 0.25 * torch.randn(width, generator=gen)
    name = {torch.float32: "f32", torch.bfloat16: "bf16"}[act]
    tensors = [x, weight]
    return node("rms_norm", tensors, [(name, rows, width)], eps=1e-5), tensors


@pytest.mark.parametrize("act", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 7168), (3, 1536), (63, 64), (100, 96)])
def test_it_equals_the_reference(rows, width, act):
    n, tensors = case(rows, width, act)
    check(NORM, n, tensors, BOUNDS[act])


def test_a_row_does_not_depend_on_the_rows_beside_it():
    few, many = (case(rows, 256, torch.bfloat16) for rows in (32, 33))
    many[1][0][:32] = few[1][0]
    many[1][1][:] = few[1][1]
    a, b = (check(NORM, *c, BF16_BOUND)[0] for c in (few, many))
    assert torch.equal(a, b[:32])


@pytest.mark.parametrize("name", GPU_TARGETS)
def test_it_compiles_at_the_width_of_the_model(name):
    for width in (512, 1536, 3584, 7168):
        compiles(NORM, case(64, width, torch.bfloat16)[0], load_target(name))


@pytest.mark.device
@pytest.mark.parametrize("rows", [1, 512, 8192])
@pytest.mark.parametrize("width", [512, 1536, 3584, 7168])
def test_real_shapes(rows, width):
    check(NORM, *case(rows, width, torch.bfloat16), BF16_BOUND)
