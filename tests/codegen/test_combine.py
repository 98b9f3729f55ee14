import pytest
import torch

from k3c.codegen.templates.tvm.combine import TEMPLATES
from k3c.codegen.templates.tvm.pointwise import TEMPLATES as POINTWISE
from k3c.ir.graph import LayerAttr
from tests.support.kernel_runner import check, node

COMBINE, COMBINE_NORM = TEMPLATES
BY_OP = {t.op: t for t in POINTWISE}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# f32: sums of up to 3,584 in another order. bf16: one unit in the last place, when the order of an
# f32 sum decides which way it rounds.
BOUND = {"f32": 3e-6, "bf16": 2**-7}


@pytest.mark.parametrize("rows", [1, 3, 63])
@pytest.mark.parametrize(("k", "width"), [(16, 3584), (4, 128), (5, 51)])
@pytest.mark.parametrize("act", DTYPES)
def test_combine_and_its_norm_equal_the_reference(rows, k, width, act):
    parts, weights = torch.randn(rows, k, width).to(DTYPES[act]), torch.rand(rows, k)
    norm = 1 + 0.25 * torch.randn(width)
    plain = node("combine", [parts, weights], [(act, rows, width)])
    check(COMBINE, plain, [parts, weights], BOUND[act])
    normed = node("combine_norm", [parts, weights, norm], [(act, rows, width)], eps=1e-5)
    check(COMBINE_NORM, normed, [parts, weights, norm], BOUND[act])


@pytest.mark.parametrize("act", DTYPES)
def test_rows_of_weight_zero_are_not_read(act):
    parts, weights = torch.randn(5, 4, 96).to(DTYPES[act]), torch.rand(5, 4)
    weights[:, 1] = weights[2] = 0.0
    parts[weights == 0] = torch.nan
    norm = torch.ones(96)
    plain = node("combine", [parts, weights], [(act, 5, 96)])
    check(COMBINE, plain, [parts, weights], BOUND[act])
    normed = node("combine_norm", [parts, weights, norm], [(act, 5, 96)], eps=1e-5)
    check(COMBINE_NORM, normed, [parts, weights, norm], BOUND[act])


@pytest.mark.parametrize("op", ["add", "sigmoid_mul"])
@pytest.mark.parametrize("width", [256, 51])
@pytest.mark.parametrize("act", DTYPES)
def test_elementwise_ops_equal_the_reference(op, width, act):
    a, b = (torch.randn(63, width).to(DTYPES[act]) for _ in range(2))
    check(BY_OP[op], node(op, [a, b], [(act, 63, width)]), [a, b], BOUND[act])


@pytest.mark.parametrize("linear_beta", [25.0, "none"])
@pytest.mark.parametrize("act", DTYPES)
def test_situ_caps_both_branches(linear_beta, act):
    gate, up = (30 * torch.randn(5, 96).to(DTYPES[act]) for _ in range(2))
    n = node("situ", [gate, up], [(act, 5, 96)], beta=4.0, linear_beta=linear_beta)
    check(BY_OP["situ"], n, [gate, up], BOUND[act])


@pytest.mark.parametrize("restart", [0, 1])
def test_residual_join_never_reads_the_prefix_at_a_restart(restart):
    prefix, delta = torch.randn(3, 96), torch.randn(3, 96)
    if restart:
        prefix[:] = torch.nan
    n = node("residual_join", [prefix, delta], [("f32", 3, 96)], restart=LayerAttr("restart"))
    template = BY_OP["residual_join"]
    check(template, n, [prefix, delta], 0.0, layer_attrs={"restart": restart})
