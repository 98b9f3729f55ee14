import pytest
import torch

from k3c.codegen.templates.triton.mla_append import TEMPLATES
from k3c.targets.target import load_target
from tests.support.mla_steps import paged_step
from tests.support.triton_runner import GPU_TARGETS, check, compiles, node, run

(TEMPLATE,) = TEMPLATES
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f8e4m3": torch.float8_e4m3fn}
# f32: a sum of up to 512 squares in another order. bf16: it may decide how a value rounds. float8:
# as bf16, and where a value rounds to another bf16 it may round to another float8, 2^-3 away.
BOUND = {"f32": 3e-6, "bf16": 2**-7, "f8e4m3": 2**-3}
STEPS = {
    "one": [(1, 0)],
    "decode": [(1, 63), (1, 64), (0, 0), (1, 65), (1, 200)],
    "prefill": [(1, 31), (7, 60), (0, 0), (5, 128)],
}


def _operands(step, act, cached, latent, rope):
    kv = torch.randn(step.rows, latent + rope).to(DTYPES[act])
    cache = torch.randn(step.pages, step.page, latent + rope).to(DTYPES[cached])
    return [kv, 1 + 0.2 * torch.randn(latent), cache, *step.segments]


def _node(operands, cached):
    return node("mla_append", operands, [(cached, *operands[2].shape)], eps=1e-6)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (64, 16), (20, 3)])
@pytest.mark.parametrize(("act", "cached"), [("f32", "f32"), ("bf16", "bf16"), ("bf16", "f8e4m3")])
def test_rows_land_in_their_pages_and_nothing_else_changes(name, latent, rope, act, cached):
    torch.manual_seed(0)
    step = paged_step(STEPS[name], page=64)
    operands = _operands(step, act, cached, latent, rope)
    before = operands[2].float()
    (cache,) = check(TEMPLATE, _node(operands, cached), operands, BOUND[cached])
    others = torch.ones(step.pages, dtype=torch.bool)
    others[step.owned] = False
    after = cache.float()
    assert torch.equal(after[others], before[others])
    assert int((after != before).any(-1).sum()) == int(step.segments[1].sum())


def test_a_float8_cache_saturates_and_keeps_nan():
    step = paged_step([(3, 0)], padding=0, page=64)
    operands = _operands(step, "bf16", "f8e4m3", 64, 16)
    operands[0][:, 64:] = torch.tensor([[1e4], [-1e4], [torch.nan]], dtype=torch.bfloat16)
    n = _node(operands, "f8e4m3")
    (cache,) = run(TEMPLATE, n, operands)
    rope = cache[step.owned[0], :3, 64:].float()
    assert (rope[0] == 448).all()
    assert (rope[1] == -448).all()
    assert rope[2].isnan().all()


def test_another_cache_width_is_refused():
    operands = _operands(paged_step([(1, 0)]), "f32", "f32", 64, 16)
    operands[2] = operands[2][..., :70].contiguous()
    assert "80 wide" in str(TEMPLATE.accepts(_node(operands, "f32"), load_target("h200")))


def test_mixed_dtypes_are_refused():
    operands = _operands(paged_step([(1, 0)]), "f32", "bf16", 64, 16)
    assert "one dtype" in str(TEMPLATE.accepts(_node(operands, "bf16"), load_target("h200")))


@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize("cached", ["bf16", "f8e4m3"])
def test_k3_shapes_compile_and_fit(cached, target):
    operands = _operands(paged_step([(1, 0)] * 8, page=64), "bf16", cached, 512, 64)
    assert compiles(TEMPLATE, _node(operands, cached), load_target(target))
