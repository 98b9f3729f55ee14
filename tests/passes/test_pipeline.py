"""The whole pipeline on exported blocks, and the properties that every pass has."""

import dataclasses
from pathlib import Path

import pytest

from k3c.errors import PassError
from k3c.export.exporter import export_model
from k3c.ir.graph import LayerAttr, Module
from k3c.ir.rewrite import RewriteLog
from k3c.ir.text import parse, show
from k3c.ir.verify import verify
from k3c.model.config import load_config
from k3c.passes import fuse_attn_res, fuse_epilogue
from k3c.passes.context import PassContext, absent
from k3c.passes.pipeline import PIPELINE, run_pass, run_pipeline
from k3c.targets.catalogue import Catalogue
from tests.support.fake_layouts import TARGET, catalogue
from tests.support.meaning import assert_same_meaning
from tests.support.random_graph import RandomGraph

TINY = Path(__file__).parents[1] / "data" / "k3-tiny"
CONTEXT = PassContext(TARGET, catalogue("packed"))
# Matches of each rule of each pass, by graph of k3-tiny. A change here is a change of what fuses.
GOLDEN = {
    "prologue": {},
    "kda_dense": {
        "fuse_attn_res": {"attention_site": 1, "site": 1},
        "fuse_projections": {"same_input": 2},
        "fuse_kda": {"kda": 1},
        "fuse_epilogue": {"situ": 1},
        "layout_mxfp4": {"panel": 5},
    },
    "kda_moe": {
        "fuse_attn_res": {"attention_site": 1, "site": 1},
        "fuse_projections": {"same_experts": 1, "same_input": 2},
        "fuse_kda": {"kda": 1},
        "lower_moe": {"grouped_gemm": 2},
        "fuse_epilogue": {"add": 1, "combine_norm": 1, "situ": 2},
        "layout_mxfp4": {"mxfp4": 2, "panel": 6},
    },
    "mla_moe": {
        "fuse_attn_res": {"attention_site": 1, "site": 1},
        "fuse_projections": {"same_experts": 1, "same_input": 2},
        "lower_mla": {"absorbed": 1},
        "lower_moe": {"grouped_gemm": 2},
        "fuse_epilogue": {"add": 1, "combine_norm": 1, "output_gate": 1, "situ": 2},
        "layout_mxfp4": {"mxfp4": 2, "panel": 6},
    },
    "head": {"fuse_attn_res": {"site": 1}, "layout_mxfp4": {"panel": 1}},
    "score_head": {"fuse_attn_res": {"site": 1}, "layout_mxfp4": {"panel": 1}},
}


@pytest.fixture(scope="module", params=["bf16", "f32"])
def exported(request) -> Module:
    return export_model(load_config(TINY), request.param)


def only(module: Module, graph: str) -> Module:
    return dataclasses.replace(module, graphs=(module.graph(graph),), schedule=())


@pytest.mark.parametrize("graph", GOLDEN)
def test_every_block_kind_fuses_exactly_as_recorded(exported, graph):
    records = run_pipeline(only(exported, graph), CONTEXT).records
    assert {r.name: dict(r.matches) for r in records if r.matches} == GOLDEN[graph]
    assert not [r for record in records if record.name != "layout_mxfp4" for r in record.refusals]
    assert not any(record.dropped for record in records)


def test_a_fused_block_has_one_node_for_each_launch(exported):
    result = run_pipeline(exported, CONTEXT)
    sizes = {graph.name: len(graph.nodes) for graph in result.module.graphs}
    assert sizes == {"prologue": 1, "kda_dense": 8, "kda_moe": 14, "mla_moe": 18, "head": 4,
                     "score_head": 3}  # fmt: skip
    assert result.module.level == "kernel"


def test_the_ir_after_each_pass_is_kept_and_parses_back(exported):
    result = run_pipeline(exported, CONTEXT)
    names = list(result.texts)
    last = f"ir/{len(PIPELINE):02}-layout_mxfp4.k3"
    assert (names[0], names[-1]) == ("ir/01-canonicalize.k3", last)
    for text in result.texts.values():
        assert show(parse(text)) == text
    assert parse(result.texts[last]) == result.module


def test_two_runs_give_the_same_texts_and_facts(exported):
    first, second = (run_pipeline(exported, CONTEXT) for _ in range(2))
    assert first.texts == second.texts
    assert [r.facts() for r in first.records] == [r.facts() for r in second.records]


def test_every_pass_is_idempotent_on_the_exported_model(exported):
    module = exported
    for step in PIPELINE:
        module = step.run(module, dataclasses.replace(CONTEXT, log=RewriteLog()))
        again = step.run(module, dataclasses.replace(CONTEXT, log=RewriteLog()))
        assert show(again) == show(module), step.NAME


def test_no_pass_changes_what_the_exported_model_means():
    # In float32 torch sums a GEMM in an order that depends on its width: a few units of 2^-24
    # relative to the largest value, times the depth of the block.
    module = export_model(load_config(TINY), "f32")
    start = module
    for step in PIPELINE:
        module = step.run(module, dataclasses.replace(CONTEXT, log=RewriteLog()))
        assert_same_meaning(start, module, bound=1e-5)


@pytest.mark.parametrize("seed", range(40))
def test_passes_keep_the_meaning_of_random_graphs(seed):
    start = module = RandomGraph(seed).build(14)
    verify(module)
    for step in PIPELINE[:-1]:
        module = step.run(module, dataclasses.replace(CONTEXT, log=RewriteLog()))
        verify(module)
        assert show(parse(show(module))) == show(module)
        again = step.run(module, dataclasses.replace(CONTEXT, log=RewriteLog()))
        assert show(again) == show(module), step.NAME
    # One bf16 rounding may fall the other way where a wider GEMM sums in another order.
    assert_same_meaning(start, module, bound=2.0**-6)


def test_a_dropped_required_fusion_stops_the_compile(exported):
    # FU03: the second site of a block reads its mixture twice, so the fusion must not fire there.
    block = only(exported, "kda_dense")
    graph = block.graphs[0]
    mixture = next(n.results[0] for n in graph.nodes if n.op == "attn_res")
    broken = dataclasses.replace(graph, outputs=(*graph.outputs, ("extra", mixture)))
    with pytest.raises(PassError, match=r"matched 1 of 2 sites.*has other uses \(%attn_res\)"):
        run_pipeline(dataclasses.replace(block, graphs=(broken,)), CONTEXT)


def test_an_attribute_with_a_new_default_does_not_stop_a_fusion(exported):
    # FU05: an explicit default, as an exporter might start to write, is the same op.
    block = only(exported, "kda_moe")
    graph = block.graphs[0]
    nodes = tuple(
        dataclasses.replace(n, attrs={**n.attrs, "epilogues": ("none",)}) if n.op == "linear" else n
        for n in graph.nodes
    )
    mutated = dataclasses.replace(block, graphs=(dataclasses.replace(graph, nodes=nodes),))
    plain, explicit = (run_pipeline(m, CONTEXT).records for m in (block, mutated))
    assert [r.matches for r in plain] == [r.matches for r in explicit]


def test_a_miss_without_a_reason_is_reported(exported):
    # A sum behind a norm that is not combine's: no pattern speaks of it, the report still does.
    text = """k3ir 1
level model
dim T in [1, 8]

graph @g(io %rows: bf16[T, 2, 32], io %p: f32[T, 2]) -> bf16[T, 32] {
  %c = combine(%rows, %p) : bf16[T, 32]
  return c=%c
}
"""
    _, record = run_pass(_step("fuse_epilogue"), parse(text), CONTEXT)
    assert record.dropped == 1
    assert [str(r.refusal) for r in record.refusals] == ["no pattern fits this combine"]


def test_a_pass_whose_precondition_fails_does_not_run(exported):
    with pytest.raises(PassError, match="fuse_projections requires no attn_res: left: 8 attn_res"):
        run_pass(_step("fuse_projections"), exported, CONTEXT)


def test_a_pass_that_breaks_its_promise_is_caught(exported):
    @dataclasses.dataclass(frozen=True)
    class Lazy:
        NAME = "lazy"
        REQUIRES = ()
        ENSURES = (absent("attn_res"),)
        RULES = ()
        REQUIRED = False
        ANCHORS = ()

        def expected(self, module):
            return None

        def run(self, module, ctx):
            return module

    with pytest.raises(PassError, match="pass lazy ensures no attn_res"):
        run_pass(Lazy(), exported, CONTEXT)


def test_layouts_without_templates_stop_the_compile(exported):
    with pytest.raises(PassError, match="no template implements grouped_gemm"):
        run_pipeline(exported, PassContext(TARGET, Catalogue(())))


def test_layer_attributes_survive_the_fusions(exported):
    block = run_pipeline(only(exported, "kda_moe"), CONTEXT).module.graphs[0]
    sites = [node.attrs for node in block.nodes if node.op == "attn_res_norm"]
    assert [site["commit_row"] for site in sites] == [LayerAttr("commit_row"), -1]
    assert [site["rows"] for site in sites] == [LayerAttr("attn_rows"), LayerAttr("ffn_rows")]


def test_every_pass_says_when_it_runs_and_what_it_saves():
    for step in PIPELINE:
        doc = step.__doc__ or ""
        parts = ("Before:", "After:", "Runs ", "aves ")
        assert [part for part in parts if part in doc] == [*parts], step.NAME
    assert fuse_attn_res.REQUIRED
    assert not fuse_epilogue.REQUIRED


def _step(name: str):
    return next(p for p in PIPELINE if name == p.NAME)
