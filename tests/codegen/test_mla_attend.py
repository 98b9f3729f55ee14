from dataclasses import replace

import pytest
import torch

from k3c.codegen.templates.tvm.mla_attend import TEMPLATES
from k3c.export.ops import REFERENCE
from k3c.targets.target import load_target
from tests.support.kernel_runner import check, compare, node, run
from tests.support.mla_steps import PAGE, paged_step

DECODE, ANY = TEMPLATES
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# The cache is widened exactly and all else is f32: sums of up to 576 products in another order, in
# scores of size up to 10, which the exponential takes as relative errors of the weights.
BOUND = 1e-5
STEPS = {
    "first": [(1, 0)],
    "three": [(3, 14)],
    "many": [(63, 0)],
    "long": [(5, 300)],
    "packed": [(1, 1), (17, 15), (0, 0), (3, 16), (2, 17), (40, 300)],
    "decode": [(1, 0), (1, 1), (0, 0), (1, 15), (1, 16), (1, 17), (1, 300), (1, 1000)],
}


def _operands(step, act, heads, latent, rope):
    q = 3 * torch.randn(step.rows, heads, latent + rope)
    cache = torch.randn(step.pages, PAGE, latent + rope).to(DTYPES[act])
    return [q, step.poison(cache), *step.segments]


def _node(operands, latent):
    q = operands[0]
    attrs = {"scale": q.shape[2] ** -0.5, "latent_dim": latent}
    return node("mla_attend", operands, [("f32", *q.shape[:2], latent)], **attrs)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("heads", [4, 6, 12])
@pytest.mark.parametrize("act", DTYPES)
def test_rows_attend_to_their_past_and_to_nothing_else(name, heads, act):
    torch.manual_seed(0)
    step = paged_step(STEPS[name])
    operands = _operands(step, act, heads, 64, 16)
    (got,) = check(ANY, _node(operands, 64), operands, BOUND)
    assert not got[-2:].any(), "padding rows must be zero"


@pytest.mark.parametrize("heads", [4, 6, 8])
@pytest.mark.parametrize("act", DTYPES)
def test_a_split_context_equals_the_reference(heads, act):
    torch.manual_seed(1)
    step = paged_step(STEPS["decode"], padding=1)
    operands = _operands(step, act, heads, 64, 16)
    (got,) = check(DECODE, _node(operands, 64), operands, BOUND)
    assert not got[-1].any(), "a padding row must be zero"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (128, 32), (20, 4), (24, 3)])
@pytest.mark.parametrize("lanes", [8, 16])
def test_any_width_works_with_any_vector(template, latent, rope, lanes):
    torch.manual_seed(2)
    step = paged_step([(1, 40), (1, 300), (1, 7)], padding=0)
    operands = _operands(step, "bf16", 8, latent, rope)
    n, target = _node(operands, latent), replace(load_target("cpu"), lanes=lanes)
    (got,) = run(template, n, operands, target=target)
    (want,) = _reference(n, operands)
    compare(template.name, got, want, BOUND)


def _reference(n, operands):
    result = REFERENCE["mla_attend"](*operands, **n.attrs)
    return result if isinstance(result, tuple) else (result,)


def test_a_request_decodes_to_the_same_bits_in_every_bucket():
    torch.manual_seed(3)
    step = paged_step([(1, 700), (1, 90), (1, 0), (1, 33)], padding=0)
    q, cache, start, tokens, context, table = _operands(step, "bf16", 8, 64, 16)
    four = [q, cache, start, tokens, context, table]
    one = [q[:1], cache, start[:1], tokens[:1], context[:1], table[:1]]
    (alone,) = run(DECODE, _node(one, 64), one)
    (together,) = run(DECODE, _node(four, 64), four)
    assert torch.equal(alone[0], together[0])


@pytest.mark.parametrize("template", TEMPLATES)
def test_scores_far_apart_do_not_overflow(template):
    torch.manual_seed(4)
    step = paged_step([(1, 500), (1, 100)], padding=0)
    operands = _operands(step, "f32", 4, 64, 16)
    operands[0] *= 100
    # Scores of size 1,000: their rounding errors alone are 1e-4 of the weights.
    check(template, _node(operands, 64), operands, 1e-3)


def test_another_cache_width_is_refused():
    operands = _operands(paged_step([(1, 0)]), "f32", 4, 64, 16)
    operands[1] = operands[1][..., :70].contiguous()
    assert "80 wide" in str(ANY.accepts(_node(operands, 64), load_target("cpu")))


def test_prefill_is_no_work_for_the_decode_kernel():
    operands = _operands(paged_step([(5, 0)], padding=0), "f32", 4, 64, 16)
    assert "1 segments" in str(DECODE.accepts(_node(operands, 64), load_target("cpu")))
