"""attn_res_norm on GPUs against the reference op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3c.codegen.templates.triton.attn_res_norm import TEMPLATES
from k3c.ir.graph import LayerAttr, Node
from k3c.targets.target import load_target
from tests.support.triton_runner import GPU_TARGETS, check, compiles, node, run

SITE = TEMPLATES[0]


class Twice(type(SITE)):
    """The template with the configuration for many tokens."""

    def config(self, node, target):
        return next(c for c in self.configs(node, target) if c["twice"])


KINDS = pytest.mark.parametrize("template", [SITE, Twice()], ids=["few", "many"])
# Scores are sums of up to 7168 terms in another order, and the softmax raises their error to a
# factor on the mixture: 7168 ** 0.5 * 6e-8 = 5e-6 at worst.
F32_BOUND = 5e-6
# The mixture and the result are rounded to bf16 apart: one ulp each may fall the other way.
BF16_BOUND = 2 * 2**-7
BOUNDS = {torch.float32: F32_BOUND, torch.bfloat16: BF16_BOUND}
ATTRS = {
    "restart": LayerAttr("restart"),
    "rows": LayerAttr("rows"),
    "commit_row": LayerAttr("commit_row"),
    "res_eps": 1e-5,
    "eps": 1e-5,
}


def case(
    tokens: int, width: int, blocks: int, act: torch.dtype = torch.bfloat16
) -> tuple[Node, list[Tensor]]:
    gen = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen)

    tensors = [random(tokens, width).to(act), random(tokens, width).to(act)]
    tensors.append(random(blocks, tokens, width).to(act))
    tensors += [1 + 0.2 * random(width), 3 * random(1, width) / width**0.5, 1 + 0.2 * random(width)]
    name = {torch.float32: "f32", torch.bfloat16: "bf16"}[act]
    results = [(name, tokens, width), (name, tokens, width), (name, blocks, tokens, width)]
    return node("attn_res_norm", tensors, results, **ATTRS), tensors


def attrs(rows: int, restart: int = 0, commit_row: int = -1) -> dict[str, int]:
    return {"rows": rows, "restart": restart, "commit_row": commit_row}


@pytest.mark.parametrize("act", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "width", "blocks", "rows"),
    [(1, 1792, 8, 8), (1, 896, 8, 4), (3, 256, 8, 3), (5, 104, 3, 2), (2, 256, 1, 0)],
)
@KINDS
def test_it_equals_the_reference(template, tokens, width, blocks, rows, act):
    n, tensors = case(tokens, width, blocks, act)
    # Blocks that do not stand yet hold whatever memory held.
    bank = torch.zeros_like(tensors[2])
    bank[:rows] = tensors[2][:rows]
    tensors[2] = bank
    check(template, n, tensors, BOUNDS[act], attrs(rows))


@KINDS
def test_blocks_that_do_not_stand_yet_are_not_read(template):
    n, tensors = case(3, 256, 8)
    clean = check(template, n, tensors, BF16_BOUND, attrs(3))
    tensors[2][3:] = torch.nan
    dirty = run(template, n, tensors, attrs(3))
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])


@KINDS
def test_a_restart_does_not_read_the_prefix_and_the_commit_keeps_it(template):
    n, tensors = case(3, 256, 4)
    tensors[0].fill_(torch.nan)
    prefix, y, bank = run(template, n, tensors, attrs(1, restart=1, commit_row=1))
    assert torch.equal(prefix, tensors[1])
    assert torch.isfinite(y).all()
    assert torch.equal(bank[1], prefix)
    assert torch.equal(bank[[0, 2, 3]], tensors[2][[0, 2, 3]])


def test_a_single_source_is_its_own_mixture():
    n, tensors = case(2, 256, 4, torch.float32)
    _, y, _ = run(SITE, n, tensors, attrs(0, restart=1))
    want = torch.nn.functional.rms_norm(tensors[1], (256,), tensors[5], 1e-5)
    assert float((y - want).abs().max() / want.abs().max()) <= F32_BOUND


def test_a_token_does_not_depend_on_the_tokens_beside_it():
    few, many = case(2, 256, 8), case(3, 256, 8)
    for i in (0, 1):
        many[1][i][:2] = few[1][i]
    many[1][2][:, :2] = few[1][2]
    many[1][3:] = few[1][3:]
    a, b = (check(SITE, *c, BF16_BOUND, attrs(5)) for c in (few, many))
    assert torch.equal(a[1], b[1][:2])


def test_other_shapes_are_refused():
    h200 = load_target("h200")
    assert "8192" in str(SITE.accepts(case(1, 9000, 2)[0], h200))
    assert "at most 8" in str(SITE.accepts(case(1, 64, 9)[0], h200))


@pytest.mark.parametrize("name", GPU_TARGETS)
@pytest.mark.parametrize("tokens", [1, 512])
def test_it_compiles_at_the_width_of_the_model(name, tokens):
    compiles(SITE, case(tokens, 7168, 8)[0], load_target(name))


@pytest.mark.device
@pytest.mark.parametrize("rows", [0, 1, 4, 5, 8])
@pytest.mark.parametrize("tokens", [1, 63, 512])
@KINDS
def test_real_shapes(template, tokens, rows):
    n, tensors = case(tokens, 7168, 8)
    check(template, n, tensors, BF16_BOUND, attrs(rows, commit_row=rows if rows < 8 else -1))
