"""The full-size model over the meshes of a rack: kernels, and plans that pass every check."""

from pathlib import Path

import pytest

from k3c.artifact import Bucket
from k3c.codegen.template import packed_nbytes
from k3c.export_cache import exported
from k3c.kernels import catalogue_of
from k3c.model.config import load_config
from k3c.passes import schedule, select_kernels
from k3c.passes.build_plan import run as build_plan
from k3c.passes.context import PassContext
from k3c.passes.pipeline import run_pipeline
from k3c.passes.weight_table import weight_table
from k3c.targets.mesh import parse_mesh
from k3c.targets.target import load_target

K3 = Path(__file__).parents[1] / "data/configs/kimi-k3-config.json"
REQUESTS = 16
# Physical experts of a rank, and the rows of its largest step.
MESHES = {
    "TEP16": (56, 16384),
    "DEP16": (56, 16384),
    "DEP64": (14, 4096),
    "TP8xDP2": (56, 16384),
    "TP8xDP9": (13, 16384),
    "DEP72": (13, 3640),
}


@pytest.fixture(scope="module")
def module():
    return exported(load_config(K3))


def context(name):
    target = load_target("gb300")
    return PassContext(target, catalogue_of(target), mesh=parse_mesh(name))


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_of_a_rack_has_kernels_and_a_checked_plan(module, name):
    ctx, (slots, most) = context(name), MESHES[name]
    lowered = run_pipeline(module, ctx).module
    assert next(dim.hi for dim in lowered.dims if dim.name == "T") == most
    dims = {"T": REQUESTS, "B": REQUESTS, "M": 64, "S": REQUESTS + 1, "P": REQUESTS * 64 + 1}
    bucket = Bucket(f"decode.b{REQUESTS}", "decode", dims)
    selected = select_kernels.run(lowered, bucket, ctx.catalogue, ctx.target)
    graph = selected.module.graph("kda_moe")
    gemm = next(node for node in graph.nodes if node.op == "grouped_gemm")
    assert gemm.operands[1].type.sizes[0] == slots
    assert gemm.operands[3].type.sizes[0] == REQUESTS * ctx.mesh.dp
    routed = next(node for node in graph.nodes if node.op in ("route_topk", "route_dispatch"))
    assert routed.operands[0].type.sizes[0] == REQUESTS
    table = weight_table([selected], packed_nbytes)
    plan = build_plan(schedule.run(selected), table, lambda t, s, _: f"{t.name}.{s.name}")
    exchanges = [c.kernel for c in plan.commands["kda_moe"] if c.kind == "collective"]
    around = ["dispatch_tokens"] * 3 + ["combine_tokens"] if ctx.mesh.dp > 1 else []
    assert [name for name in exchanges if name != "all_reduce"] == around
