"""The product's model over every mesh of the field: bytes of a rank, and a plan for 72 ranks."""

from dataclasses import replace
from pathlib import Path

import pytest

from k3c.artifact import Bucket
from k3c.codegen.template import packed_nbytes
from k3c.codegen.templates.triton import GPU_TEMPLATES
from k3c.export_cache import exported
from k3c.mesh_limits import resident_bytes
from k3c.model.config import load_config
from k3c.passes import build_plan, canonicalize, schedule, select_kernels, shard
from k3c.passes.context import PassContext
from k3c.passes.pipeline import run_pipeline
from k3c.passes.weight_table import weight_table
from k3c.targets.catalogue import Catalogue
from k3c.targets.mesh import parse_mesh
from k3c.targets.target import load_target

K3 = Path(__file__).parents[1] / "data/configs/kimi-k3-config.json"
# Decimal gigabytes of a rank: performance.md 2.2. It keeps the projection of beta whole on every
# rank, 69 * 7168 * 96 * 2 bytes = 0.095 GB, which shard divides, and leaves out float32 vectors.
SLICES = {
    "TP8": 205.13,
    "TEP8": 205.13,
    "TP16": 108.36,
    "TEP16": 108.36,
    "TEP32": 59.97,
    "DEP16": 203.88,
    "DEP32": 158.68,
    "DEP64": 136.08,
    "TP8xDP2xEP16": 114.72,
    "TP4xDP4xEP16": 127.46,
}


@pytest.fixture(scope="module")
def ctx():
    return PassContext(load_target("h200"), Catalogue(GPU_TEMPLATES))


@pytest.fixture(scope="module")
def module():
    return exported(load_config(K3), "bf16", 64, None)


def test_a_rank_holds_what_the_published_slices_hold(module, ctx):
    whole = canonicalize.run(module, ctx)
    for name, gigabytes in SLICES.items():
        local = shard.run(whole, replace(ctx, mesh=parse_mesh(name)))
        found = resident_bytes(local, {"S": 0, "P": 0}) / 1e9
        assert found == pytest.approx(gigabytes, abs=0.1), name


@pytest.fixture(scope="module")
def rack(module, ctx):
    """The kernels, weights and one plan of 72 ranks: 9 groups that share heads, 13 experts each."""
    mesh = parse_mesh("TP8xDP9xEP72")
    kernels = run_pipeline(module, replace(ctx, mesh=mesh)).module
    bucket = Bucket("decode.b4", "decode", {"T": 4, "B": 4, "S": 9, "P": 1025, "M": 128})
    selected = select_kernels.run(kernels, bucket, ctx.catalogue, ctx.target)
    weights = weight_table([selected], packed_nbytes)
    plan = build_plan.run(
        schedule.run(selected), weights, lambda t, s, target: f"{t.name}.{s.name}.{target.arch}"
    )
    return kernels, weights, plan


def test_a_rank_of_72_has_13_experts_of_a_layer_and_a_map_of_896(rack):
    weights = rack[1]
    experts = [e for e in weights.entries if e.dtype == "mxfp4"]
    assert {e.shape[0] for e in experts} == {13}
    assert all(r.placed and r.axis == "ep" for e in experts for r in e.ranges)
    # 40 replicas: an expert may have all of them.
    maps = [e for e in weights.entries if e.sources == ("placement.*.expert_map",)]
    assert {e.shape for e in maps} == {(896, 1 + 41)}
    assert len(maps) == 92


def test_a_layer_sends_tokens_to_the_experts_and_back_once(rack):
    plan = rack[2]
    for graph in ("kda_moe", "mla_moe"):
        sent = [c for c in plan.commands[graph] if c.kind == "collective"]
        kinds = [c.kernel for c in sent]
        # Latent rows, weights and choices go as one message; tp sums attention, then both experts.
        assert kinds.count("dispatch_tokens") == 3
        assert kinds.count("combine_tokens") == 1
        assert kinds.count("all_reduce") == 3
        latent = next(c for c in sent if c.label.startswith("dispatch_tokens"))
        back = next(c for c in sent if c.kernel == "combine_tokens")
        for command in (latent, back):
            nbytes, ranks, place = command.args[2:]
            assert (nbytes.value, ranks.value, place.layer_attr) == (4 * 3584 * 2, 9, "dp_place")
