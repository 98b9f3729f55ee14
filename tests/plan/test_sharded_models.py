"""One rank of the full-size K3 on 16 GPUs: planned from its config, without a weight."""

from collections import Counter
from pathlib import Path

import pytest

from k3c.artifact import Bucket
from k3c.artifact_ranks import plan_of_rank, weight_of_rank
from k3c.codegen.template import packed_nbytes
from k3c.codegen.templates.triton import GPU_TEMPLATES
from k3c.export.exporter import export_model
from k3c.mesh_limits import resident_bytes
from k3c.model.config import load_config
from k3c.passes import build_plan, schedule, select_kernels
from k3c.passes.context import PassContext
from k3c.passes.pipeline import run_pipeline
from k3c.passes.weight_table import weight_table
from k3c.plan_check import check_together
from k3c.targets.catalogue import Catalogue
from k3c.targets.mesh import Mesh
from k3c.targets.target import load_target
from tests.support.plan_modules import kernel_symbol

K3 = Path(__file__).resolve().parents[1] / "data/configs/kimi-k3-config.json"
STATE = {"S": 9, "P": 1025, "M": 128}
BUCKETS = (
    Bucket("decode.b1", "decode", {"T": 1, "B": 1, **STATE}),
    Bucket("prefill.t2048", "prefill", {"T": 2048, "B": 8, **STATE}),
)
RANK = 3
GIB = 2**30


@pytest.fixture(scope="module")
def planned():
    target, templates = load_target("h200"), Catalogue(GPU_TEMPLATES)
    module = export_model(load_config(K3), "bf16", None, 64)
    kernels = run_pipeline(module, PassContext(target, templates, mesh=Mesh(16, 16))).module
    selections = [select_kernels.run(kernels, b, templates, target) for b in BUCKETS]
    weights = weight_table(selections, packed_nbytes)
    plans = [build_plan.run(schedule.run(s), weights, kernel_symbol) for s in selections]
    return kernels, weights, plans


def test_a_rank_holds_a_sixteenth_of_the_experts_and_fits_an_h200(planned):
    module, weights, plans = planned
    assert 100.0 * GIB < weights.total_bytes < 101.5 * GIB
    # kv_b is packed twice, one half for each of its kernels; layouts pad a little.
    assert weights.total_bytes == pytest.approx(resident_bytes(module, {"S": 0, "P": 0}), rel=0.01)
    assert check_together(plans) == []
    assert sum(max(p.space_bytes[s] for p in plans) for s in plans[0].space_bytes) < 138 * GIB


def test_a_decode_step_has_the_recorded_launches_and_messages(planned):
    plan = planned[2][0]
    kinds = Counter((call.graph, c.kind) for call in plan.calls for c in plan.commands[call.graph])
    layers = Counter(call.graph for call in plan.calls)
    # A message of two operands is two commands: 1 after attention, 2 after the experts.
    each = {name: kinds[name, "collective"] // n for name, n in layers.items()}
    assert each == {"prologue": 1, "kda_dense": 2, "kda_moe": 3, "mla_moe": 3, "decode_head": 1}
    assert not kinds["kda_moe", "copy"]


def test_experts_vocabulary_and_heads_start_where_the_rank_does(planned):
    module, weights, plans = planned
    mesh = dict(module.mesh)
    calls = plan_of_rank(plans[0], mesh, RANK).calls
    prologue, layer = calls[0], calls[5]
    assert prologue.attrs["first_row"] == RANK * 163840 // 16
    assert layer.attrs["first_expert"] == RANK * 56
    ranges = {
        source.rpartition("layers.*.")[2]: (r.dim, r.start, r.stop)
        for entry in (weight_of_rank(e, mesh, RANK) for e in weights.entries)
        for source, r in zip(entry.sources, entry.ranges, strict=False)
    }
    assert ranges["self_attn.q_proj.weight"] == (0, 3 * 768, 4 * 768)
    assert ranges["self_attn.o_proj.weight"] == (1, 3 * 768, 4 * 768)
    assert ranges["self_attn.f_a_proj.weight"] == (-1, 0, 0)
    assert ranges["self_attn.A_log"] == (0, 18, 24)
    assert ranges["self_attn.kv_b_proj.weight"] == (0, 3 * 1536, 4 * 1536)
    assert ranges["block_sparse_moe.experts.*.w1"] == (0, 168, 224)


def test_a_decode_step_makes_the_input_of_the_next_one_in_place(planned):
    decode, prefill = planned[2]
    (advance,) = [c for c in decode.commands["decode_head"] if c.label.startswith("advance")]
    assert set(advance.writes) == {"ids", "context", "position"} < set(advance.reads)
    assert all(f.direction == "in" for f in decode.io if f.name in advance.writes)
    assert "decode_head" not in prefill.commands
    assert "head" not in decode.commands


def test_the_estimate_counts_the_experts_that_a_rank_meets_on_average(planned):
    # One of 16 chosen experts lies here: 17.5 MB of its matrices in each of 92 layers, and every
    # other weight but the embedding once. The MLA estimate reads the whole cache: under 2 GB.
    estimates = planned[2][0].estimates
    assert 10e9 < estimates["read_bytes"] < 24e9
