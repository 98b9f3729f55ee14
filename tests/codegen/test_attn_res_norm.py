import pytest
import torch

from k3c.codegen.templates.tvm.attn_res_norm import TEMPLATES
from k3c.ir.graph import LayerAttr
from k3c.targets.target import load_target
from tests.support.kernel_runner import check, node, run

(TEMPLATE,) = TEMPLATES
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# f32: sums of up to 7,168 in another order. bf16: the order of an f32 sum may decide how the
# mixture rounds, and the norm rounds once more: one unit in the last place.
BOUND = {"f32": 5e-6, "bf16": 2**-7}
BLOCKS = 4


def _operands(act, tokens, width):
    prefix, delta = (torch.randn(tokens, width).to(DTYPES[act]) for _ in range(2))
    bank = torch.randn(BLOCKS, tokens, width).to(DTYPES[act])
    res_norm, norm = (1 + 0.2 * torch.randn(width) for _ in range(2))
    res_proj = torch.randn(1, width) / width**0.5
    return [prefix, delta, bank, res_norm, res_proj, norm]


def _node(operands):
    prefix, bank = operands[0], operands[2]
    act = "bf16" if prefix.dtype == torch.bfloat16 else "f32"
    results = [(act, *prefix.shape), (act, *prefix.shape), (act, *bank.shape)]
    layer = {name: LayerAttr(name) for name in ("restart", "rows", "commit_row")}
    return node("attn_res_norm", operands, results, **layer, res_eps=1e-5, eps=1e-6)


def _check(operands, **layer):
    act = "bf16" if operands[0].dtype == torch.bfloat16 else "f32"
    return check(TEMPLATE, _node(operands), operands, BOUND[act], layer_attrs=layer)


@pytest.mark.parametrize("tokens", [1, 3, 63])
@pytest.mark.parametrize("width", [7168, 256, 51])
@pytest.mark.parametrize("act", DTYPES)
def test_mixture_and_norm_equal_the_reference(tokens, width, act):
    _check(_operands(act, tokens, width), rows=3, restart=0, commit_row=-1)


@pytest.mark.parametrize("act", DTYPES)
@pytest.mark.parametrize(("rows", "commit"), [(0, 0), (1, 1), (3, 3), (4, -1), (4, 2)])
def test_commit_follows_the_mixture(act, rows, commit):
    _check(_operands(act, 3, 96), rows=rows, restart=0, commit_row=commit)


@pytest.mark.parametrize("act", DTYPES)
def test_restart_never_reads_the_prefix(act):
    operands = _operands(act, 3, 96)
    operands[0][:] = torch.nan
    joined, _, _ = _check(operands, rows=1, restart=1, commit_row=-1)
    assert torch.equal(joined, operands[1])


def test_bank_rows_that_are_not_visible_are_never_read():
    operands = _operands("bf16", 3, 96)
    clean = _check(operands, rows=2, restart=0, commit_row=1)
    operands[2][2:] = torch.inf
    n = _node(operands)
    layer = {"rows": 2, "restart": 0, "commit_row": 1}
    joined, y, bank = run(TEMPLATE, n, operands, layer)
    assert torch.equal(joined, clean[0])
    assert torch.equal(y, clean[1])
    assert torch.equal(bank[:2], clean[2][:2])
    assert torch.equal(bank[2:], operands[2][2:])


def test_mixed_dtypes_are_refused():
    operands = _operands("f32", 3, 96)
    operands[2] = operands[2].bfloat16()
    refusal = TEMPLATE.accepts(_node(operands), load_target("cpu"))
    assert "one dtype" in str(refusal)
