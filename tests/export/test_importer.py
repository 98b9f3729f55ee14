"""What the importer refuses, and what every refusal names."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from k3c.errors import ExportError
from k3c.export import exporter
from k3c.export.exporter import B, S, T, export_graph
from k3c.export.ops import library
from k3c.ir.graph import LayerAttr
from k3c.ir.types import F32, I32, TensorType
from tests.support.interp import interpret_graph

TYPES = {
    "prefix": TensorType(F32, (T, 8)),
    "pending": TensorType(F32, (T, 8)),
    "kda_state": TensorType(F32, (S, 4)),
    "slots": TensorType(I32, (B,)),
}


@torch.library.custom_op("k3ctoy::update", mutates_args={"state"})
def update(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    state.add_(1)
    return x.clone()


@update.register_fake
def _(x, state):
    return torch.empty_like(x)


# The same op with its mutation left undeclared.
@torch.library.custom_op("k3ctoy::silent_update", mutates_args=())
def silent_update(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    state.add_(1)
    return x.clone()


@silent_update.register_fake
def _(x, state):
    return torch.empty_like(x)


class Toy(nn.Module):
    OUTPUTS = ("prefix",)

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, prefix, pending):
        return (self.body(prefix, pending),)


class ToyState(Toy):
    OUTPUTS = ("prefix", "kda_state")

    def forward(self, prefix, kda_state):
        return self.body(prefix, kda_state), kda_state


def export(module):
    return export_graph(module, "kda_toy", TYPES, str)


def test_a_declared_mutation_is_refused_with_op_and_argument():
    with pytest.raises(ExportError, match=r"k3ctoy.update.*argument state in place") as caught:
        export(ToyState(torch.ops.k3ctoy.update))
    assert "kda_toy" in caught.value.where
    assert "test_importer.py:" in caught.value.where


def test_an_undeclared_mutation_is_refused_with_op_and_argument():
    with pytest.raises(ExportError, match=r"k3ctoy::silent_update\(Tensor x, Tensor state\)"):
        export(ToyState(torch.ops.k3ctoy.silent_update))


def test_a_state_that_comes_back_unchanged_is_refused():
    with pytest.raises(ExportError, match="state kda_state"):
        export(ToyState(lambda prefix, _: prefix + prefix))


def test_an_op_without_meaning_names_op_module_graph_and_line():
    class Rfft(nn.Module):
        def forward(self, x, _):
            return torch.fft.rfft(x).real.contiguous()

    with pytest.raises(ExportError, match="aten::fft_rfft") as caught:
        export(Toy(Rfft()))
    graph, module, line = caught.value.where.split(", ")
    assert (graph, module) == ("kda_toy", "body")
    assert line.startswith("tests/export/test_importer.py:")


def test_a_write_into_a_copy_says_why_it_is_refused():
    def body(prefix, _):
        g = prefix.to(torch.float32, copy=True)
        g.mul_(2)
        return g

    with pytest.raises(ExportError, match=r"aten.mul_.Tensor changes its argument self in place"):
        export(Toy(body))


def test_a_view_that_changes_the_shape_is_refused_and_one_that_does_not_vanishes():
    with pytest.raises(ExportError, match=r"f32\[T, 8\] to f32\[T, 2, 4\]"):
        export(Toy(lambda prefix, _: prefix.view(-1, 2, 4)))
    graph = export(Toy(lambda prefix, pending: (prefix.view(-1, 8) + pending).contiguous()))
    assert [n.op for n in graph.nodes] == ["add"]


def test_a_size_that_is_an_expression_is_refused_with_the_names_of_its_dimensions():
    with pytest.raises(ExportError, match=r"size 8\*T is no dimension"):
        export(Toy(lambda prefix, _: prefix.reshape(-1)))


def test_scaled_and_broadcast_additions_are_refused():
    with pytest.raises(ExportError, match=r"aten.add.Tensor"):
        export(Toy(lambda prefix, pending: torch.add(prefix, pending, alpha=2)))
    with pytest.raises(ExportError, match=r"aten.add.Tensor"):
        export(Toy(lambda prefix, _: prefix + 1))


def test_a_constant_inside_the_model_is_refused():
    with pytest.raises(ExportError, match="kda_toy"):
        export(Toy(lambda prefix, _: prefix + torch.ones(1, 8)))


@pytest.mark.parametrize(
    "body",
    [
        lambda prefix, _: prefix + 0 if prefix.shape[0] == 1009 else prefix,
        lambda prefix, _: prefix[:1009],
        lambda prefix, _: prefix + torch.zeros(1009, 8, device="meta"),
    ],
    ids=["branch on the example size", "slice of the example size", "constant of that size"],
)
def test_a_model_that_fixes_a_dimension_is_refused(body):
    with pytest.raises(ExportError, match="kda_toy"):
        export(Toy(body))


def test_a_branch_on_a_slot_count_leaves_no_hidden_guard():
    class Cache(ToyState):
        def forward(self, prefix, kda_state):
            grown = kda_state + kda_state
            return (prefix if kda_state.shape[0] == 4 else prefix + prefix), grown

    with pytest.raises(ExportError, match="S"):
        export(Cache(None))


@pytest.mark.parametrize("tokens", [811, 613], ids=["equal in the example", "different"])
def test_two_dimensions_are_never_compared(tokens, monkeypatch):
    # A decode step has T equal to B: one branch traced for all sizes would be the wrong one.
    monkeypatch.setitem(exporter._EXAMPLE, "T", tokens)

    class Tied(nn.Module):
        OUTPUTS = ("prefix",)

        def forward(self, prefix, slots):
            same = prefix.shape[0] == slots.shape[0]
            return (prefix + prefix if same else prefix + prefix + prefix,)

    with pytest.raises(ExportError, match="kda_toy"):
        export(Tied())


def test_an_input_that_is_no_named_tensor_is_refused():
    class Wrapped(nn.Module):
        OUTPUTS = ("prefix",)

        def forward(self, cache):
            return (cache,)

    with pytest.raises(ExportError, match="input cache"):
        export(Wrapped())


def test_embedding_and_linear_of_torch_become_the_ops_of_the_ir():
    class Plain(nn.Module):
        OUTPUTS = ("pending",)

        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(11, 8, device="meta")
            self.q_proj = nn.Linear(8, 3, bias=False, device="meta")

        def forward(self, slots):
            return (self.q_proj(self.table(slots)),)

    graph = export(Plain())
    assert [(n.op, [o.name for o in n.operands]) for n in graph.nodes] == [
        ("embed", ["slots", "w_table"]),
        ("linear", ["embed", "w_q_proj"]),
    ]
    assert graph.nodes[1].results[0].name == "q"
    weights = {"w_table": torch.randn(11, 8), "w_q_proj": torch.randn(3, 8)}
    ids = torch.tensor([4, 10, 0], dtype=torch.int32)
    out = interpret_graph(graph, {"slots": ids}, weights)["pending"]
    assert torch.equal(out, weights["w_table"][ids.long()] @ weights["w_q_proj"].T)


def test_a_layer_attribute_becomes_an_attribute_of_the_call():
    class Join(nn.Module):
        OUTPUTS = ("prefix",)

        # The attribute stands before a tensor: names come from positions, not from luck.
        def forward(self, attn_restart, prefix, pending):
            return (library.residual_join(prefix, pending, attn_restart),)

    graph = export(Join())
    (node,) = graph.nodes
    assert node.attrs == {"restart": LayerAttr("attn_restart")}
    assert [i.value.name for i in graph.inputs] == ["prefix", "pending"]
    prefix, pending = torch.full((5, 8), math.nan), torch.ones(5, 8)
    inputs = {"prefix": prefix, "pending": pending}
    assert torch.equal(interpret_graph(graph, inputs, {}, {"attn_restart": 1})["prefix"], pending)
    assert interpret_graph(graph, inputs, {}, {"attn_restart": 0})["prefix"].isnan().all()


def test_the_source_line_is_that_of_the_innermost_forward():
    def outer(module):
        return Toy(lambda prefix, pending: module(prefix, pending)[0])

    graph = export(outer(Toy(lambda prefix, pending: prefix + pending)))
    line = graph.nodes[0].loc.removeprefix("tests/export/test_importer.py:")
    text = Path(__file__).read_text().splitlines()[int(line) - 1]
    assert text.strip() == "return (self.body(prefix, pending),)"
