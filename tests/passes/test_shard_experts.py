"""Experts on ranks: tokens of data-parallel ranks, experts that do not divide, placed experts."""

import json
from collections.abc import Sequence

import pytest
import torch

from k3c.errors import PassError
from k3c.export.exporter import export_model
from k3c.ir.text import parse, show
from k3c.ir.verify import verify
from k3c.model.checkpoint import Checkpoint
from k3c.model.config import load_config
from k3c.model.random_weights import write_random_model
from k3c.passes import shard
from k3c.passes.context import PassContext
from k3c.passes.pipeline import run_pipeline
from k3c.passes.place_experts import moe_layers, place_experts
from k3c.placement.placement import Placement, contiguous
from k3c.targets.mesh import Mesh
from tests.support.fake_layouts import TARGET, catalogue
from tests.support.interp import checkpoint_weights, interpret
from tests.support.ranks import Group, Ranks, from_checkpoint
from tests.support.steps import error, new_state, step_inputs
from tests.support.tiny_checkpoint import four_heads_config_json

# Ranks sum products in another order: some units of 2^-24 relative to the largest logit.
BOUND = 1e-5


@pytest.fixture(scope="module", params=[7, pytest.param(8, marks=pytest.mark.slow), 12])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    source = folder / "source.json"
    config = four_heads_config_json()
    config["text_config"]["num_experts"] = request.param
    source.write_text(json.dumps(config))
    write_random_model(folder, source, request.param)
    checkpoint = Checkpoint(folder, load_config(folder))
    return export_model(checkpoint.config, "f32", checkpoint.dtype), checkpoint


def swapped(placement: Placement) -> Placement:
    """The placement with the ranks' slots in another order, and ranks exchanged in every layer."""
    layers = {
        layer: tuple(tuple(reversed(held)) for held in (*ranks[1:], ranks[0]))
        for layer, ranks in placement.layers.items()
    }
    numbers = placement.num_experts, placement.num_ranks, placement.slots_per_rank
    return Placement(*numbers, layers)


def chosen(module, mesh: Mesh, way: str) -> Placement | None:
    """The placement of a case: by number, with a spare slot a rank, or with ranks exchanged."""
    layers = moe_layers(module)
    experts = next(iter(layers.values()))
    if way == "swapped":
        return place_experts(module, mesh, swapped(contiguous(experts, mesh.ep, layers)))
    return place_experts(module, mesh, spare=int(way == "spare"))


CASES = {
    7: [(Mesh(dp=3, ep=3), "number"), (Mesh(2, 2), "number"), (Mesh(2, 2), "swapped")],
    8: [(Mesh(tp=2, dp=2, ep=4), "spare"), (Mesh(tp=2, dp=2, ep=4), "swapped"),
        (Mesh(dp=4, ep=4), "number")],
    12: [(Mesh(dp=5, ep=5), "number")],
}  # fmt: skip


def requests(group: int) -> tuple[tuple[list[torch.Tensor], list[int]], ...]:
    """Two steps of the requests of one data-parallel rank: other tokens, other lengths."""
    generator = torch.Generator().manual_seed(group)
    ids = torch.randint(0, 66, (10,), generator=generator)
    cut = 2 + group
    return (
        ([ids[:cut], ids[cut:8]], [0, 0]),
        ([ids[8:9], ids[9:]], [cut, 8 - cut]),
    )


def run_whole(model, group: int) -> torch.Tensor:
    module, checkpoint = model
    weights, state, logits = checkpoint_weights(checkpoint), new_state(module, 3, 9), []
    for chunks, context in requests(group):
        run = interpret(module, step_inputs(chunks, context, 4), state, weights)
        state, logits = run.state, [*logits, run.outputs["logits"]]
    return torch.cat(logits)


def run_ranks(module, group: Group) -> Sequence[torch.Tensor]:
    ranks = Ranks(module, group)
    states, found = ranks.states(3, 9), [[] for _ in range(ranks.count)]
    for steps in zip(*(requests(dp) for dp in range(group.mesh.dp)), strict=True):
        runs = ranks.step([step_inputs(*step, 4) for step in steps], states)
        states = [run.state for run in runs]
        for logits, run in zip(found, runs, strict=True):
            logits.append(run.outputs["logits"])
    return [torch.cat(logits) for logits in found]


def check_ranks(model, module, mesh, placement):
    got = run_ranks(module, Group(mesh, from_checkpoint(model[1]), placement))
    want = [run_whole(model, group) for group in range(mesh.dp)]
    for rank, logits in enumerate(got):
        assert error(logits, want[mesh.coordinates(rank)["dp"]]) <= BOUND, rank


def test_every_rank_computes_the_logits_of_its_own_requests(model):
    module, checkpoint = model
    for mesh, way in CASES[checkpoint.config.num_experts]:
        placement = chosen(module, mesh, way)
        ctx = PassContext(TARGET, catalogue("ranks"), mesh=mesh, placement=placement)
        sharded = shard.run(module, ctx)
        verify(sharded)
        assert parse(show(sharded)) == sharded
        check_ranks(model, sharded, mesh, placement)
        check_ranks(model, run_pipeline(module, ctx).module, mesh, placement)


def test_only_a_placement_that_is_not_by_number_needs_a_map(model):
    module, checkpoint = model
    for mesh, way in CASES[checkpoint.config.num_experts]:
        ctx = PassContext(
            TARGET, catalogue("ranks"), mesh=mesh, placement=chosen(module, mesh, way)
        )
        graph = run_pipeline(module, ctx).module.graph("kda_moe")
        ops = {node.op for node in graph.nodes}
        mapped = any(weight.value.name == "expert_map" for weight in graph.weights)
        assert mapped == (way != "number" or checkpoint.config.num_experts % mesh.ep > 0)
        want = {"map_experts", "dispatch"} if mesh.dp > 1 else {"route_dispatch"}
        assert want <= ops
        assert {"dispatch_tokens", "combine_tokens"} <= ops or mesh.dp == 1


def test_another_placement_of_as_many_slots_gives_the_same_module(model):
    module, checkpoint = model
    mesh, experts = Mesh(dp=3, ep=3), checkpoint.config.num_experts
    first = contiguous(experts, 3, moe_layers(module), 1)
    texts = {
        show(shard.run(module, PassContext(TARGET, catalogue("ranks"), mesh=mesh, placement=p)))
        for p in (first, swapped(first))
    }
    assert len(texts) == 1


def test_fewer_slots_than_experts_are_refused(model):
    module, checkpoint = model
    experts = checkpoint.config.num_experts
    few = Placement(4, 2, 2, {1: ((1, 0), (3, 2))})
    ctx = PassContext(TARGET, catalogue("ranks"), mesh=Mesh(2, 2), placement=few)
    with pytest.raises(PassError, match=f"2 physical experts on each of 2 ranks hold {experts}"):
        shard.run(module, ctx)
