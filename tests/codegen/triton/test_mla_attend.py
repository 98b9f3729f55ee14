from dataclasses import replace

import pytest
import torch

from k3c.codegen.templates.triton.mla_attend import MlaAttend
from k3c.targets.target import load_target
from tests.support.mla_steps import paged_step
from tests.support.triton_runner import GPU_TARGETS, check, compiles, node, run, value

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f8e4m3": torch.float8_e4m3fn}
# f32: sums of up to 576 products in another order, in scores of size up to 10, which the
# exponential takes as relative errors of the weights. bf16: queries and weights are rounded to
# bf16 (2^-9 each) before the products, and a score of size 10 has many such errors.
BOUND = {"f32": 1e-5, "bf16": 2**-7, "f8e4m3": 2**-7}
# Around a page and a block of 64 positions.
DECODE = [(1, 62), (1, 63), (0, 0), (1, 64), (1, 0), (1, 200)]
VERIFY = [(8, 60), (0, 0), (3, 70)]
PACKED = [(5, 63), (0, 0), (1, 64), (4, 130)]


class Few(MlaAttend):
    """The template for a device with few processors: fewer programs to interpret."""

    def stages(self, node, target):
        return super().stages(node, replace(target, cores=2))

    def workspace_bytes(self, node, target):
        return super().workspace_bytes(node, replace(target, cores=2))


class Pinned(Few):
    """The template with one configuration of its own."""

    def __init__(self, config=None):
        self.pinned = config

    def config(self, node, target):
        return self.pinned


class Chosen(MlaAttend):
    """The template for the real device with one of its configurations."""

    def __init__(self, config=None):
        self.pinned = config

    def config(self, node, target):
        return self.pinned


FEW = Few()
REAL = MlaAttend()


def _config(rows, keys, keys_first, **other):
    fixed = {"BM": rows, "BN": keys, "KEYS_FIRST": keys_first, "warps": 4, "stages": 2}
    return {**fixed, "per_core": 1, "share": 1, "spread": 4, **other}


def _operands(step, act, heads, latent=64, rope=16):
    q = 3 * torch.randn(step.rows, heads, latent + rope)
    cache = torch.randn(step.pages, step.page, latent + rope)
    return [q, _poisoned(step, cache, act), *step.segments]


def _poisoned(step, cache, act):
    # float8 has a NaN as well, which the conversion keeps.
    return step.poison(cache).to(DTYPES[act])


def _node(operands, latent=64):
    q = operands[0]
    attrs = {"scale": q.shape[2] ** -0.5, "latent_dim": latent}
    return node("mla_attend", operands, [("f32", *q.shape[:2], latent)], **attrs)


@pytest.mark.parametrize(
    ("spans", "act"),
    [(DECODE, "f32"), (DECODE, "bf16"), (DECODE, "f8e4m3"), (VERIFY, "bf16"), (PACKED, "f32")],
    ids=["decode-f32", "decode-bf16", "decode-f8", "verify", "packed"],
)
def test_rows_attend_to_their_past_and_to_nothing_else(spans, act):
    torch.manual_seed(0)
    step = paged_step(spans, page=64)
    operands = _operands(step, act, 4)
    (got,) = check(FEW, _node(operands), operands, BOUND[act])
    assert not got[-2:].any(), "padding rows must be zero"


@pytest.mark.parametrize("heads", [6, 24, 96])
def test_any_number_of_heads_decodes(heads):
    torch.manual_seed(1)
    step = paged_step([(1, 100)], padding=0, page=64)
    operands = _operands(step, "bf16", heads)
    check(FEW, _node(operands), operands, BOUND["bf16"])


@pytest.mark.parametrize(
    "config",
    [
        _config(8, 64, 1),
        _config(16, 32, 0, per_core=2),
        _config(32, 64, 1),
        _config(64, 64, 0),
        _config(16, 16, 0, share=2),
    ],
    ids=lambda c: f"{c['BM']}x{c['BN']}",
)
def test_every_shape_of_tile_computes_the_same(config):
    torch.manual_seed(2)
    step = paged_step([(1, 140), (5, 64), (0, 0)], padding=1, page=64)
    operands = _operands(step, "bf16", 3)
    check(Pinned(config), _node(operands), operands, BOUND["bf16"])


@pytest.mark.parametrize("keys_first", [0, 1])
@pytest.mark.parametrize(("page", "latent", "rope"), [(16, 128, 32), (48, 20, 4), (128, 24, 3)])
def test_any_page_and_width_works(page, latent, rope, keys_first):
    torch.manual_seed(3)
    step = paged_step([(1, 40), (2, 150)], padding=0, page=page)
    operands = _operands(step, "bf16", 3, latent, rope)
    template = Pinned(_config(8, 64, keys_first))
    check(template, _node(operands, latent), operands, BOUND["bf16"])


@pytest.mark.parametrize("keys_first", [0, 1])
def test_tiles_that_fill_the_device_are_not_split(keys_first):
    torch.manual_seed(4)
    step = paged_step(PACKED, page=64)
    operands = _operands(step, "bf16", 4)
    template, n = Pinned(_config(8, 64, keys_first)), _node(operands)
    assert [s.name for s in template.stages(n, load_target("h200"))] == ["", "clear"]
    (got,) = check(template, n, operands, BOUND["bf16"])
    assert not got[-2:].any(), "padding rows must be zero"


def test_a_row_has_the_same_bits_whoever_is_beside_it():
    torch.manual_seed(5)
    step = paged_step([(1, 200), (1, 90), (1, 0), (1, 33)], padding=0, page=64)
    q, cache, start, tokens, context, table = _operands(step, "bf16", 6)
    beside = [q, cache, start, tokens, context, table]
    (together,) = run(FEW, _node(beside), beside)
    tokens = torch.tensor([1, 0, 0, 0], dtype=torch.int32)
    alone = [q, cache, start * tokens, tokens, context * tokens, table]
    (single,) = run(FEW, _node(alone), alone)
    assert torch.equal(single[0], together[0])
    assert not single[1:].any()


def test_a_row_has_the_same_bits_in_a_shorter_chunk():
    torch.manual_seed(6)
    step = paged_step([(20, 70)], padding=0, page=64)
    q, cache, start, tokens, context, table = _operands(step, "bf16", 6)
    template = Pinned(_config(16, 16, 0))
    whole = [q, cache, start, tokens, context, table]
    part = [q, cache, start, tokens - 13, context, table]
    (long,) = run(template, _node(whole), whole)
    (short,) = run(template, _node(part), part)
    assert torch.equal(long[:7], short[:7])


def test_scores_far_apart_do_not_overflow():
    torch.manual_seed(7)
    step = paged_step([(1, 150), (1, 70)], padding=0, page=64)
    operands = _operands(step, "f32", 4)
    operands[0] *= 100
    # Scores of size 1,000: their rounding errors alone are 1e-4 of the weights.
    check(FEW, _node(operands), operands, 1e-3)


def test_another_cache_width_is_refused():
    operands = _operands(paged_step([(1, 0)]), "f32", 4)
    operands[1] = operands[1][..., :70].contiguous()
    assert "80 wide" in str(FEW.accepts(_node(operands), load_target("h200")))


def _k3_node(rows, segments, heads, table=2048, cache="bf16"):
    operands = [
        value("q", "f32", rows, heads, 576),
        value("cache", cache, 1 + segments * table, 64, 576),
        *(value(name, "i32", segments) for name in ("start", "tokens", "context")),
        value("table", "i32", segments, table),
    ]
    result = value("o", "f32", rows, heads, 512)
    attrs = {"scale": 192**-0.5, "latent_dim": 512}
    return replace(node("mla_attend", [], [], **attrs), operands=tuple(operands), results=(result,))


@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize(("rows", "segments", "heads"), [(8, 8, 6), (64, 8, 6), (8192, 8, 6)])
def test_k3_shapes_compile_and_fit(rows, segments, heads, target):
    assert compiles(REAL, _k3_node(rows, segments, heads), load_target(target))


@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize("heads", [4, 6, 12, 24, 48, 96])
@pytest.mark.parametrize(("rows", "segments"), [(1, 1), (512, 512), (64, 8), (8192, 8)])
def test_every_k3_bucket_has_a_plan(rows, segments, heads, target):
    n, target = _k3_node(rows, segments, heads, table=16384), load_target(target)
    for config in REAL.configs(n, target):
        template = Chosen(config)
        walk, finish = template.stages(n, target)
        split = walk.constants["SPLITS"] > 1
        assert finish.name == ("merge" if split else "clear")
        assert (template.workspace_bytes(n, target) > 0) == split
        assert template.workspace_bytes(n, target) <= 64 << 20


@pytest.mark.device
@pytest.mark.parametrize("heads", [6, 12, 24, 96])
@pytest.mark.parametrize("act", ["bf16", "f8e4m3"])
@pytest.mark.parametrize(
    "spans",
    [
        [(1, 8191)],
        [(1, 8191), (1, 40000), (1, 0), (1, 63), (1, 64), (1, 65), (0, 0), (1, 12345)],
        [(8, 5000), (5, 63), (1, 0), (0, 0)],
        [(300, 0), (1, 17), (130, 1000)],
    ],
    ids=["one", "decode", "verify", "prefill"],
)
def test_k3_widths_on_a_device(spans, act, heads):
    torch.manual_seed(8)
    step = paged_step(spans, padding=0 if len(spans) == 1 else 3, page=64)
    operands = _operands(step, act, heads, 512, 64)
    operands[0] *= 0.3
    check(REAL, _node(operands, 512), operands, BOUND[act])
