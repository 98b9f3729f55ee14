"""A sharded model on simulated ranks computes what the whole model computes."""

import dataclasses
import json

import pytest
import torch

from k3c.errors import PassError
from k3c.export.exporter import export_model
from k3c.ir.rewrite import RewriteLog
from k3c.ir.text import parse, show
from k3c.ir.verify import verify
from k3c.model.checkpoint import Checkpoint
from k3c.model.config import load_config
from k3c.model.random_weights import write_random_model
from k3c.passes import shard
from k3c.passes.context import PassContext
from k3c.passes.pipeline import PIPELINE, run_pipeline
from k3c.targets.mesh import Mesh
from tests.support.fake_layouts import TARGET, catalogue
from tests.support.interp import checkpoint_weights, interpret
from tests.support.ranks import Group, Ranks, from_checkpoint
from tests.support.steps import error, new_state, step_inputs
from tests.support.tiny_checkpoint import four_heads_config_json

MESHES = {
    "tp2ep2": Mesh(2, 2),
    "tp4ep4": Mesh(4, 4),
    "tp2": Mesh(2, 1),
    "tp4": Mesh(4, 1),
    "tp2ep2-latent": Mesh(2, 2, latent="sharded"),
    "tp4-latent": Mesh(4, 1, latent="sharded"),
    "tp4ep4-whole-ends": Mesh(4, 4, shared="replicated", vocabulary="replicated"),
    "tp2-latent-shared": Mesh(2, 1, latent="sharded", shared="replicated"),
    "dep2": Mesh(1, 2, 2),
    "dep4": Mesh(1, 4, 4),
    "tp2dp2ep4": Mesh(2, 4, 2),
    "tp2dp2ep4-latent": Mesh(2, 4, 2, latent="sharded"),
    "dp2": Mesh(1, 1, 2),
    "dep3-uneven": Mesh(1, 3, 3),
}
# What these two hold is in dep2, dep3-uneven and tp2dp2ep4 as well.
SLOW = ("dep4", "tp2dp2ep4-latent")
MESH = pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, marks=[pytest.mark.slow] if name in SLOW else [], id=name)
        for name, mesh in MESHES.items()
    ],
)
# Ranks sum products in another order: some units of 2^-24 relative to the largest logit.
BOUND = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    source = folder / "source.json"
    source.write_text(json.dumps(four_heads_config_json()))
    write_random_model(folder, source, 3)
    config = load_config(folder)
    checkpoint = Checkpoint(folder, config)
    return export_model(config, "f32", checkpoint.dtype), checkpoint


def context(mesh: Mesh) -> PassContext:
    return PassContext(TARGET, catalogue("ranks"), mesh=mesh)


def steps_of(rank, config):
    """Two steps of a data-parallel rank: a prefill of two requests, then a token of each."""
    words = torch.Generator().manual_seed(rank)
    ids = [torch.randint(0, config.vocab_size, (n,), generator=words) for n in (5, 3, 1, 1)]
    return (ids[:2], [0, 0]), (ids[2:], [5, 3])


def run_whole(model, rank):
    module, checkpoint = model
    weights, state, logits = checkpoint_weights(checkpoint), new_state(module, 3, 3), []
    for chunks, context_tokens in steps_of(rank, checkpoint.config):
        run = interpret(module, step_inputs(chunks, context_tokens, 1), state, weights)
        state, logits = run.state, [*logits, run.outputs["logits"]]
    return torch.cat(logits)


def run_ranks(module, checkpoint, mesh, placement=None):
    """Return the logits of every rank."""
    ranks = Ranks(module, Group(mesh, from_checkpoint(checkpoint), placement))
    states, logits = ranks.states(3, 3), []
    for steps in zip(*(steps_of(dp, checkpoint.config) for dp in range(mesh.dp)), strict=True):
        runs = ranks.step([step_inputs(*step, 1) for step in steps], states)
        states = [run.state for run in runs]
        logits.append(torch.stack([run.outputs["logits"] for run in runs]))
    return torch.cat(logits, dim=1)


def assert_as_whole(model, module, mesh, placement=None):
    """Check that every rank has the logits of its own requests, and return all ranks'."""
    got = run_ranks(module, model[1], mesh, placement)
    want = [run_whole(model, dp) for dp in range(mesh.dp)]
    for rank in range(mesh.ranks):
        assert error(got[rank], want[mesh.coordinates(rank)["dp"]]) <= BOUND, f"rank {rank}"
    return got


@MESH
def test_ranks_together_compute_the_logits_of_the_whole_model(model, mesh):
    sharded = shard.run(model[0], context(mesh))
    verify(sharded)
    assert_as_whole(model, sharded, mesh)


@MESH
def test_every_fusion_keeps_what_the_ranks_compute(model, mesh):
    module = model[0]
    fused = run_pipeline(module, context(mesh)).module
    got = assert_as_whole(model, fused, mesh)
    # All ranks of a request sample from the same bits.
    for rank in range(mesh.ranks):
        first = mesh.group(rank, "tp")[0]
        assert torch.equal(got[first], got[rank]), f"ranks {first} and {rank}"


@MESH
def test_the_score_head_gathers_what_it_scores(model, mesh):
    module, checkpoint = model
    ids = torch.arange(8)
    inputs = step_inputs([ids], [0], 1) | {"targets": torch.arange(57, 65, dtype=torch.int32)}
    state, weights = new_state(module, 2, 2), checkpoint_weights(checkpoint)
    want = interpret(module, inputs, state, weights, head="score_head").outputs["logprobs"]
    ranks = Ranks(shard.run(module, context(mesh)), Group(mesh, from_checkpoint(checkpoint)))
    for run in ranks.step([inputs] * mesh.dp, ranks.states(2, 2), "score_head"):
        assert error(run.outputs["logprobs"], want) <= BOUND


@MESH
def test_text_of_a_sharded_model_parses_back_and_passes_are_idempotent(model, mesh):
    module = model[0]
    for step in PIPELINE:
        module = step.run(module, dataclasses.replace(context(mesh), log=RewriteLog()))
        assert parse(show(module)) == module
        again = step.run(module, dataclasses.replace(context(mesh), log=RewriteLog()))
        assert show(again) == show(module), step.NAME


def test_one_rank_leaves_the_module_as_it_is(model):
    module = model[0]
    assert shard.run(module, PassContext(TARGET, catalogue("ranks"))) is module


def test_ranks_differ_in_nothing_but_the_coordinate(model):
    sharded = shard.run(model[0], context(Mesh(4, 4)))
    call = next(c for c in sharded.schedule if c.graph == "kda_moe")
    assert call.rank_attrs == {"first_expert": ("ep", 2)}
    assert [call.at({"ep": rank})["first_expert"] for rank in range(4)] == [0, 2, 4, 6]


LAUNCHES = {
    "tp2ep2": {"kda_moe": (12, 2), "mla_moe": (16, 2), "kda_dense": (7, 2)},
    "tp4": {"kda_moe": (12, 2), "mla_moe": (16, 2), "kda_dense": (7, 2)},
    "tp2ep2-latent": {"kda_moe": (14, 4), "mla_moe": (18, 4), "kda_dense": (7, 2)},
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_layer_has_the_recorded_launches_and_messages(model, name):
    fused = run_pipeline(model[0], context(MESHES[name])).module
    for graph, (launches, messages) in LAUNCHES[name].items():
        ops = [node.op for node in fused.graph(graph).nodes]
        collectives = sum(op in ("all_reduce", "all_gather") for op in ops)
        assert (len(ops) - collectives, collectives) == (launches, messages), ops


def test_a_mesh_that_does_not_divide_is_refused(model):
    with pytest.raises(PassError, match="does not divide by tp=3"):
        shard.run(model[0], context(Mesh(3, 3)))
