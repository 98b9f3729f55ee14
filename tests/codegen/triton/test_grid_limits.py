"""Grids at the limits of the launch: 65,535 blocks along y and z, 2^31 - 1 along x."""

from functools import cache

import pytest

from k3c.artifact import Bucket
from k3c.codegen.triton_template import GRID_X_LIMIT, GRID_YZ_LIMIT
from k3c.ir.ops import COLLECTIVES
from k3c.model.config import load_config
from k3c.passes.select_kernels import run as select_kernels
from k3c.planner.exact import make_planner
from k3c.targets.mesh import Mesh
from k3c.targets.target import load_target
from tests.support.compiled import ROOT

CONFIG = ROOT / "tests/data/configs/kimi-k3-config.json"
PAGES = {"S": 1025, "P": 4096, "M": 4}


@cache
def planner():
    return make_planner(load_config(CONFIG), load_target("gb300"), "bfloat16")


def grids(bucket):
    """Every stage's grid of one rank with all 96 heads, by op."""
    made = planner()
    (module,) = made.lowered(Mesh())
    selected = select_kernels(module, bucket, made.catalogue, made.target)
    return [
        (node.op, stage.grid)
        for graph in selected.module.graphs
        for node in graph.nodes
        if node.op not in COLLECTIVES
        for stage in selected.template(graph, node).stages(node, made.target)
    ]


def check(found):
    assert found
    for op, (x, y, z) in found:
        assert 0 < x <= GRID_X_LIMIT, op
        assert 0 < y <= GRID_YZ_LIMIT, op
        assert 0 < z <= GRID_YZ_LIMIT, op


@pytest.mark.parametrize("requests", [682, 683, 1024])
def test_decode_of_96_heads_launches_at_every_batch(requests):
    # 682 * 96 = 65,472 blocks fit the y axis, 683 * 96 = 65,568 do not.
    bucket = Bucket(f"decode.b{requests}", "decode", {"T": requests, "B": requests, **PAGES})
    found = grids(bucket)
    check(found)
    assert {op for op, _ in found} >= {"kda_fb", "mla_attend", "norm_linear"}


@pytest.mark.parametrize("tokens", [65_535, 65_536, 131_072])
def test_prefill_of_65536_tokens_launches(tokens):
    bucket = Bucket(f"prefill.t{tokens}", "prefill", {"T": tokens, "B": 8, **PAGES})
    found = grids(bucket)
    check(found)
    blocks = {op: max(x * y * z for o, (x, y, z) in found if o == op) for op, _ in found}
    # AttnRes with its norm takes a block for each pair of tokens at least.
    assert blocks["attn_res_norm"] >= tokens // 2
    assert max(y for _, (_, y, _) in found) <= GRID_YZ_LIMIT
