import pytest
import torch

from k3c.codegen.templates.tvm.mla_append import TEMPLATES
from k3c.targets.target import load_target
from tests.support.kernel_runner import check, node
from tests.support.mla_steps import PAGE, paged_step

(TEMPLATE,) = TEMPLATES
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# f32: a sum of up to 512 squares in another order. bf16: it may decide how a value rounds.
BOUND = {"f32": 3e-6, "bf16": 2**-7}
STEPS = {
    "one": [(1, 0)],
    "decode": [(1, 15), (1, 16), (0, 0), (1, 200)],
    "prefill": [(1, 31), (17, 0), (0, 0), (40, 9)],
}


def _operands(step, act, latent, rope):
    kv = torch.randn(step.rows, latent + rope).to(DTYPES[act])
    cache = torch.randn(step.pages, PAGE, latent + rope).to(DTYPES[act])
    return [kv, 1 + 0.2 * torch.randn(latent), cache, *step.segments]


def _node(operands):
    cache = operands[2]
    act = "bf16" if cache.dtype == torch.bfloat16 else "f32"
    return node("mla_append", operands, [(act, *cache.shape)], eps=1e-6)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (64, 16), (128, 3), (20, 4)])
@pytest.mark.parametrize("act", DTYPES)
def test_rows_land_in_their_pages_and_nothing_else_changes(name, latent, rope, act):
    step = paged_step(STEPS[name])
    operands = _operands(step, act, latent, rope)
    before = operands[2].clone()
    (cache,) = check(TEMPLATE, _node(operands), operands, BOUND[act])
    others = torch.ones(step.pages, dtype=torch.bool)
    others[step.owned] = False
    assert torch.equal(cache[others], before[others])
    changed = (cache != before).any(-1).sum()
    assert int(changed) == int(step.segments[1].sum())


def test_another_cache_width_is_refused():
    operands = _operands(paged_step([(1, 0)]), "f32", 64, 16)
    operands[2] = operands[2][..., :70].contiguous()
    assert "80 wide" in str(TEMPLATE.accepts(_node(operands), load_target("cpu")))


def test_mixed_dtypes_are_refused():
    operands = _operands(paged_step([(1, 0)]), "f32", 64, 16)
    operands[2] = operands[2].bfloat16()
    assert "one dtype" in str(TEMPLATE.accepts(_node(operands), load_target("cpu")))
