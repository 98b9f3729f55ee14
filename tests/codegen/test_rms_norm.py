import pytest
import torch

from k3c.codegen.templates.tvm.rms_norm import TEMPLATES
from k3c.targets.target import load_target
from tests.support.kernel_runner import check, node

(TEMPLATE,) = TEMPLATES
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# f32: a sum of up to 7,168 squares in another order. bf16: it may decide how a value rounds.
BOUND = {"f32": 3e-6, "bf16": 2**-7}


def _node(x, weight):
    act = "bf16" if x.dtype == torch.bfloat16 else "f32"
    return node("rms_norm", [x, weight], [(act, *x.shape)], eps=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 63])
@pytest.mark.parametrize("width", [7168, 128, 51])
@pytest.mark.parametrize("act", DTYPES)
def test_norm_equals_the_reference(rows, width, act):
    x, weight = torch.randn(rows, width).to(DTYPES[act]), 1 + 0.2 * torch.randn(width)
    check(TEMPLATE, _node(x, weight), [x, weight], BOUND[act])


def test_a_row_of_zeros_stays_zero():
    x, weight = torch.zeros(3, 64), torch.ones(64)
    check(TEMPLATE, _node(x, weight), [x, weight], 0.0)


def test_weights_in_bf16_are_refused():
    x, weight = torch.randn(3, 64), torch.ones(64).bfloat16()
    assert "must be f32" in str(TEMPLATE.accepts(_node(x, weight), load_target("cpu")))
