"""The exported module: its shape, its cost, and that it means what the model means."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from k3c.export.exporter import export_model
from k3c.ir.types import BF16, F32, MXFP4, SymDim
from k3c.model.checkpoint import Checkpoint
from k3c.model.config import load_config
from tests.support.interp import checkpoint_weights, interpret
from tests.support.steps import error, new_state, step_inputs

DATA = Path(__file__).parents[1] / "data"
TINY = DATA / "k3-tiny"


@pytest.fixture(scope="module")
def config():
    return load_config(TINY)


@pytest.fixture(scope="module")
def checkpoint(config):
    return Checkpoint(TINY, config)


@pytest.fixture(scope="module")
def module(config, checkpoint):
    return export_model(config, "f32", checkpoint.dtype)


@pytest.fixture(scope="module")
def weights(checkpoint):
    return checkpoint_weights(checkpoint)


def test_every_kind_is_one_graph_and_every_layer_one_call(module):
    assert [g.name for g in module.graphs] == [
        "prologue", "kda_dense", "kda_moe", "mla_moe", "head", "score_head",
    ]  # fmt: skip
    assert [(c.graph, c.layer) for c in module.schedule] == [
        ("prologue", -1), ("kda_dense", 0), ("kda_moe", 1), ("kda_moe", 2), ("mla_moe", 3),
        ("kda_moe", 4), ("kda_moe", 5), ("kda_moe", 6), ("mla_moe", 7), ("mla_moe", 8),
        ("head", -1),
    ]  # fmt: skip


def test_every_node_names_its_model_line(module):
    for graph in module.graphs:
        for node in graph.nodes:
            assert node.loc.startswith("k3c/model/"), f"{graph.name}: {node.op} at {node.loc!r}"


def test_dimensions_keep_their_names_and_no_example_size(module):
    names = {d.name for d in module.dims}
    for graph in module.graphs:
        values = [i.value for i in graph.inputs] + [r for n in graph.nodes for r in n.results]
        symbols = [d for v in values for d in v.type.shape if isinstance(d, SymDim)]
        assert {d.name for d in symbols} <= names
        sizes = {d for v in values for d in v.type.shape if isinstance(d, int)}
        assert not sizes & {1009, 811, 613, 419, 211}


def test_expert_pairs_become_one_mxfp4_weight(module):
    graph = module.graph("kda_moe")
    found = {w.sources[0]: str(w.value.type) for w in graph.weights if w.value.type.dtype == MXFP4}
    stem = "language_model.model.layers.*.block_sparse_moe.experts.*."
    assert found == {stem + w: "mxfp4[32, 128, 128]" for w in ("w1", "w2", "w3")}


def test_weights_name_every_tensor_of_the_checkpoint_once_per_layer(module, checkpoint):
    named = set()
    for call in module.schedule:
        for weight in module.graph(call.graph).weights:
            (source,) = weight.sources
            name = source.replace("*", str(call.layer), 1)
            pairs = weight.value.type.dtype == MXFP4
            named |= {
                name.replace("*", str(e)) + part
                for e in range(32 if pairs else 1)
                for part in ((".weight_packed", ".weight_scale") if pairs else ("",))
            }
    assert named == set(checkpoint.names)


def test_linear_weights_keep_the_stored_type_and_vectors_are_f32(config):
    def stored(name):
        return F32 if name.endswith("q_proj.weight") else BF16

    graph = export_model(config, "bf16", stored).graph("kda_dense")
    types = {w.value.name: w.value.type.dtype for w in graph.weights}
    assert types["w_q_proj"] == F32
    assert types["w_k_proj"] == BF16
    assert types["w_o_norm"] == F32
    assert graph.nodes[-1].results[0].type.dtype == BF16


def test_softplus_gate_and_uncapped_up_are_written_as_none(config):
    changed = replace(config, gate_lower_bound=None, activation_situ_linear_beta=None)
    nodes = export_model(changed, "bf16").graph("kda_dense").nodes
    attrs = {n.op: n.attrs for n in nodes}
    assert attrs["kda_gate"]["lower_bound"] == "none"
    assert attrs["situ"]["linear_beta"] == "none"


@pytest.fixture(scope="module")
def golden():
    return load_file(TINY / "golden.safetensors")


def test_module_reproduces_the_golden_logits(module, weights, golden):
    ids = golden["input_ids"]
    inputs = step_inputs([ids], [0], pages_each=9)
    # The head alone sees one sampled row for every token.
    per_row = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    inputs |= {name: inputs[name].repeat(len(ids)) for name in per_row}
    inputs["sample_rows"] = torch.arange(len(ids), dtype=torch.int32)
    run = interpret(module, inputs, new_state(module, 2, 10), weights)
    # Two correct f32 implementations differ by about 1e-5 here (specification 10.3).
    assert error(run.outputs["logits"], golden["logits"]) <= 1e-4
    assert run.outputs["tokens"].tolist() == golden["logits"].argmax(-1).tolist()
    for layer in (0, 6):
        assert error(run.state[layer]["kda_state"][1], golden[f"state.{layer}.S"]) <= 1e-4
    rows = run.state[8]["kv_cache"][1:].flatten(0, 1)[: len(ids)]
    assert error(rows, golden["state.8.kv"]) <= 1e-4


def test_score_head_gives_the_log_probability_of_every_target(module, weights, golden):
    ids = golden["input_ids"][:40]
    inputs = step_inputs([ids], [0], pages_each=3)
    inputs["targets"] = torch.cat([ids[1:], torch.tensor([-1])]).to(torch.int32)
    run = interpret(module, inputs, new_state(module, 2, 4), weights, head="score_head")
    table = torch.log_softmax(golden["logits"][:39], -1)
    want = table.gather(1, ids[1:, None])[:, 0]
    assert error(run.outputs["logprobs"][:39], want) <= 1e-4
    assert run.outputs["logprobs"][39] == 0


@pytest.mark.parametrize("requests", [1, 7])
def test_sizes_that_no_example_had_run_and_agree(module, weights, golden, requests):
    ids = golden["input_ids"]
    chunks = [ids[: n + 1] for n in range(requests)]
    inputs = step_inputs(chunks, [0] * requests, pages_each=1)
    run = interpret(module, inputs, new_state(module, 1 + requests, 1 + requests), weights)
    assert error(run.outputs["logits"], golden["logits"][:requests]) <= 1e-4


def test_a_sequence_cut_at_odd_places_gives_the_same_logits(module, weights, golden):
    ids, state, seen = golden["input_ids"], new_state(module, 2, 5), 0
    for size in (3, 1, 31):
        inputs = step_inputs([ids[seen : seen + size]], [seen], pages_each=4)
        run = interpret(module, inputs, state, weights)
        state, seen = run.state, seen + size
        assert error(run.outputs["logits"][0], golden["logits"][seen - 1]) <= 1e-4


_MEASURE = """
import json, resource, sys, time
from k3c.model.config import load_config
from k3c.export.exporter import export_model
start = time.perf_counter()
module = export_model(load_config(sys.argv[1]))
seconds = time.perf_counter() - start
peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": seconds, "peak_kib": peak_kib, "calls": len(module.schedule)}))
"""


def test_full_size_k3_exports_without_weights_within_its_budget(record_property):
    config = DATA / "configs" / "kimi-k3-config.json"
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(config)], capture_output=True, text=True, check=True
    )
    measured = json.loads(done.stdout)
    record_property("export", measured)
    assert measured["calls"] == 95
    assert measured["peak_kib"] < 2 * 2**20
    # The budget is one minute; it takes about six seconds on two idle cores.
    assert measured["seconds"] < 60
