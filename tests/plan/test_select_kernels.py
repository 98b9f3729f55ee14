"""Every node gets the first template that takes it; what none takes stops the compilation."""

from dataclasses import replace

import pytest

from k3c.errors import CodegenError, PassError
from k3c.ir.text import parse
from k3c.passes import select_kernels
from k3c.passes.weight_table import weight_table
from k3c.targets.catalogue import Catalogue
from tests.support.plan_modules import (
    TARGET,
    TEXT,
    FakeTemplate,
    bucket,
    catalogue,
    module,
    packed_bytes,
)


def select(name, templates=None, source=None):
    whole = source or module()
    return select_kernels.run(whole, bucket(name), templates or catalogue(), TARGET)


@pytest.mark.parametrize(
    ("name", "kept", "dropped"),
    [("decode.b1", "head", "score_head"), ("score.t64", "score_head", "head")],
)
def test_a_bucket_keeps_the_head_of_its_phase(name, kept, dropped):
    chosen = select(name).module
    names = {graph.name for graph in chosen.graphs}
    assert kept in names
    assert dropped not in names
    assert chosen.schedule[-1].graph == kept


def test_every_dimension_is_bound_everywhere():
    for graph in select("prefill.t16").module.graphs:
        values = [v for n in graph.nodes for v in (*n.operands, *n.results)]
        values += [i.value for i in graph.inputs] + [v for _, v in graph.outputs]
        assert all(isinstance(dim, int) for v in values for dim in v.type.shape)


@pytest.mark.parametrize(("name", "expected"), [("decode.b8", "gemv"), ("prefill.t16", "gemm")])
def test_the_first_template_that_accepts_is_chosen(name, expected):
    selected = select(name)
    assert selected.choices["kda_moe", "d"].name == expected


def test_refusals_of_preferred_templates_are_kept_with_their_value():
    found = {key: (name, str(why)) for key, name, why in select("decode.b2").refusals}
    assert found["kda_moe", "d"] == ("gemm", "too few rows (2)")


def test_a_node_that_no_template_takes_names_op_layer_kind_and_every_reason():
    refusing = FakeTemplate("kda", "kda_wide", refuses="head dim must be 128")
    others = tuple(t for t in catalogue().templates if t.op != "kda")
    with pytest.raises(CodegenError, match=r"kda\(.*kda_wide: head dim must be 128.*kda_dense"):
        select("decode.b1", Catalogue((refusing, *others)))
    with pytest.raises(CodegenError, match=r"kda\(.*no template implements this op.*kda_dense"):
        select("decode.b1", Catalogue(others))


def test_two_nodes_that_want_one_weight_in_two_layouts_are_refused():
    text = TEXT.replace("mla_absorb_v(%ol, %kv_v, %z)", "mla_absorb_v(%ol, %kv_k, %z)")
    packing = FakeTemplate("mla_absorb_q", "packing", layout="panel.v8")
    with pytest.raises(PassError, match=r"%kv_k: packing wants panel.v8, mla_absorb_v_any wants"):
        select("decode.b1", catalogue(packing), parse(text))


def test_buckets_that_want_other_layouts_are_refused():
    wide = FakeTemplate("linear", "wide", layout="panel.v16", min_rows=64)
    selections = [select(n, catalogue(wide)) for n in ("decode.b1", "prefill.t64")]
    with pytest.raises(PassError, match=r"panel.v8 in decode.b1.*panel.v16.* in prefill.t64"):
        weight_table(selections, packed_bytes)


def test_one_layout_of_an_earlier_pass_is_kept_and_another_refused():
    text = TEXT.replace("w_o: bf16[96, 96] from", "w_o: bf16[96, 96] as panel.v8 from")
    assert select("decode.b1", source=parse(text)).choices
    with pytest.raises(PassError, match=r"layout_mxfp4 wants panel.v9, gemv wants panel.v8"):
        select("decode.b1", source=parse(text.replace("panel.v8", "panel.v9")))


def test_weights_lie_at_the_same_bytes_whatever_the_buckets():
    one = weight_table([select("decode.b1"), select("score.t64")], packed_bytes)
    two = weight_table([select("decode.b8"), select("prefill.t16")], packed_bytes)
    assert one.entries == two.entries
    assert one.total_bytes == two.total_bytes
    # The score head reads the head's bytes: nothing is stored for it alone.
    assert one.places["score_head", "lm_head"] == one.places["head", "lm_head"]


def test_entries_are_aligned_ascending_and_disjoint():
    table = weight_table([select("decode.b1")], packed_bytes)
    end = 0
    for entry in table.entries:
        assert entry.offset % 64 == 0
        assert entry.offset >= end
        end = entry.offset + entry.nbytes
    assert end <= table.total_bytes < end + 64


def test_layers_of_one_kind_have_one_relative_layout():
    table = weight_table([select("decode.b1")], packed_bytes)
    for layer in (1, 3):
        base = table.bases["kda_moe", layer]
        for entry in (
            e for e in table.entries if e.name.startswith("kda_moe.") and e.layer == layer
        ):
            place = table.places["kda_moe", entry.name.partition(".")[2]]
            assert entry.offset == base + place.offset


def test_equal_tensors_of_one_call_are_stored_once():
    text = TEXT.replace('from "layers.*.m_norm"', 'from "layers.*.a_norm"')
    plain, tied = (
        weight_table([select("decode.b1", source=parse(t))], packed_bytes) for t in (TEXT, text)
    )
    assert tied.places["kda_moe", "m_norm"] == tied.places["kda_moe", "a_norm"]
    # 96 f32 values in each of 5 layers.
    assert plain.total_bytes - tied.total_bytes == 5 * 384


def test_padding_of_a_layout_is_recorded():
    table = weight_table([select("decode.b1")], packed_bytes)
    w_in = next(e for e in table.entries if e.name == "kda_moe.w_in")
    assert w_in.nbytes == -(-482 * 96 * 2 // 256) * 256
    assert w_in.padding_bytes == w_in.nbytes - 482 * 96 * 2


def test_a_module_before_level_kernel_is_our_own_fault():
    with pytest.raises(AssertionError, match="level model"):
        select("decode.b1", source=replace(module(), level="model"))
