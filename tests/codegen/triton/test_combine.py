"""combine and combine_norm on GPUs."""

import pytest
import torch

from k3c.codegen.templates.triton.combine import Combine, CombineNorm
from k3c.ir.graph import Node
from k3c.targets.target import load_target
from tests.support.triton_runner import GPU_TARGETS, check, compiles, node, value

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# f32: sums of up to 3,584 in another order. bf16: one unit in the last place, when the order of an
# f32 sum decides which way it rounds.
BOUND = {"f32": 3e-6, "bf16": 2**-7}
ACTS = pytest.mark.parametrize("act", DTYPES)


def check_both(parts, weights, act):
    rows, _, width = parts.shape
    plain = node("combine", [parts, weights], [(act, rows, width)])
    check(Combine(), plain, [parts, weights], BOUND[act])
    norm = 1 + 0.25 * torch.randn(width)
    normed = node("combine_norm", [parts, weights, norm], [(act, rows, width)], eps=1e-5)
    check(CombineNorm(), normed, [parts, weights, norm], BOUND[act])


@ACTS
@pytest.mark.parametrize(
    ("rows", "k", "width"), [(1, 16, 3584), (3, 16, 3584), (21, 4, 128), (5, 5, 51)]
)
def test_combine_and_its_norm_equal_the_reference(rows, k, width, act):
    torch.manual_seed(rows)
    check_both(torch.randn(rows, k, width).to(DTYPES[act]), torch.rand(rows, k), act)


@ACTS
def test_rows_of_weight_zero_are_not_read(act):
    torch.manual_seed(0)
    parts, weights = torch.randn(5, 4, 96).to(DTYPES[act]), torch.rand(5, 4)
    # A whole token may have no expert on this rank.
    weights[:, 1] = weights[2] = 0.0
    parts[weights == 0] = torch.nan
    check_both(parts, weights, act)


@pytest.mark.device
@pytest.mark.parametrize("rows", [1, 64, 100, 8192])
def test_real_shapes(rows):
    torch.manual_seed(rows)
    parts, weights = torch.randn(rows, 16, 3584).bfloat16(), torch.rand(rows, 16)
    weights[torch.rand(rows, 16) > 0.2] = 0.0
    parts[weights == 0] = torch.nan
    check_both(parts, weights, "bf16")


def test_rows_too_wide_for_a_block_are_refused():
    kinds = value("p", "bf16", 1, 2, 20000), value("w", "f32", 1, 2), value("n", "f32", 20000)
    n = Node("combine_norm", kinds, (value("y", "bf16", 1, 20000),), {"eps": 1e-5})
    assert "at most 16384" in str(CombineNorm().accepts(n, load_target("h200")))


@ACTS
@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize("rows", [1, 8192])
def test_every_target_has_the_kernels(target, rows, act):
    device, out = load_target(target), (value("y", act, rows, 3584),)
    operands = value("p", act, rows, 16, 3584), value("w", "f32", rows, 16)
    compiles(Combine(), Node("combine", operands, out, {}), device)
    operands = *operands, value("n", "f32", 3584)
    compiles(CombineNorm(), Node("combine_norm", operands, out, {"eps": 1e-5}), device)
