"""Bytes in closed form against the specification and the published rank slices."""

from pathlib import Path

import pytest

from k3c.model.config import load_config
from k3c.planner import quick
from k3c.planner.quick import Load, Part
from k3c.targets.mesh import Mesh

K3 = load_config(Path(__file__).parents[1] / "data/configs/kimi-k3-config.json")
GB = 1e9


def test_weights_are_the_parameters_of_the_specification():
    # k3_model 6.4, bytes on disk. Norms are bf16 there and f32 here; A_log is padded there.
    found = quick.weight_bytes(Part(K3, Mesh()))
    on_disk = {
        "embed": 2_348_810_240,
        "head": 2_348_810_240,
        "kda": 61_258_257_408,
        "mla": 11_145_412_608,
        "dense": 1_453_326_336,
        "router": 1_182_074_880,
        "latent": 9_454_620_672,
        "shared": 24_310_185_984,
        "experts": 1_446_456_066_048,
    }
    wider = {"mla": 24 * (1536 + 512), "latent": 92 * 3584}
    assert found == {
        **{kind: nbytes + 2 * wider.get(kind, 0) for kind, nbytes in on_disk.items()},
        "kda": on_disk["kda"] - 69 * (128 - 96) * 4,
        "norms": 2 * (2_680_832 + 5_361_664),
    }


# performance.md 2.2: kda, mla, router, latent, shared, experts, dense, embed, head; GB.
SLICES = {
    "TP8": (Mesh(tp=8), (7.85, 2.03, 1.18, 9.45, 3.04, 180.81, 0.18, 0.29, 0.29)),
    "TEP8": (Mesh(tp=8, ep=8), (7.85, 2.03, 1.18, 9.45, 3.04, 180.81, 0.18, 0.29, 0.29)),
    "TEP16": (Mesh(tp=16, ep=16), (4.03, 1.38, 1.18, 9.45, 1.52, 90.40, 0.09, 0.15, 0.15)),
    "TEP32": (Mesh(tp=32, ep=32), (2.13, 1.05, 1.18, 9.45, 0.76, 45.20, 0.05, 0.07, 0.07)),
    "DEP16": (Mesh(dp=16, ep=16), (61.23, 11.15, 1.18, 9.45, 24.31, 90.40, 1.45, 2.35, 2.35)),
    "DEP64": (Mesh(dp=64, ep=64), (61.23, 11.15, 1.18, 9.45, 24.31, 22.60, 1.45, 2.35, 2.35)),
    "TP8xDP2": (Mesh(tp=8, dp=2, ep=16), (7.85, 2.03, 1.18, 9.45, 3.04, 90.40, 0.18, 0.29, 0.29)),
    "TP4xDP4": (Mesh(tp=4, dp=4, ep=16), (15.47, 3.33, 1.18, 9.45, 6.08, 90.40, 0.36, 0.59, 0.59)),
}


@pytest.mark.parametrize("name", SLICES)
def test_a_rank_holds_the_published_slice(name):
    mesh, expected = SLICES[name]
    found = quick.weight_bytes(Part(K3, mesh))
    kinds = ("kda", "mla", "router", "latent", "shared", "experts", "dense", "embed", "head")
    # There every rank has beta of all heads; here its own.
    found["kda"] += 69 * 2 * 7168 * (96 - 96 // mesh.tp)
    assert [found[kind] / GB for kind in kinds] == pytest.approx(expected, abs=0.007, rel=1e-3)


def test_two_stages_have_47_and_46_layers():
    first, second = (Part(K3, Mesh(tp=8, pp=2), stage) for stage in range(2))
    assert [p.layers for p in (first, second)] == [range(47), range(47, 93)]
    # MLA is at 3, 7, ..., 91 and 92.
    assert (first.kda_layers, first.mla_layers, first.moe_layers) == (36, 11, 46)
    assert (second.kda_layers, second.mla_layers, second.moe_layers) == (33, 13, 46)


def test_stages_together_hold_the_whole_model_once():
    whole = quick.weight_bytes(Part(K3, Mesh(tp=8)))
    for stages in (2, 3, 4):
        parts = [quick.weight_bytes(Part(K3, Mesh(tp=8, pp=stages), s)) for s in range(stages)]
        assert {kind: sum(p[kind] for p in parts) for kind in whole} == whole


def test_expert_bytes_of_a_rank_fall_with_the_number_of_ranks():
    # Padding that grows with tp once kept them at 120 GB from 16 ranks on.
    for ep in (False, True):
        meshes = [Mesh(tp=n, ep=n if ep else 1) for n in (8, 16, 32)]
        found = [quick.weight_bytes(Part(K3, mesh))["experts"] for mesh in meshes]
        assert [found[0], found[0] / 2, found[0] / 4] == found


@pytest.mark.parametrize(
    ("ranks", "physical", "replicas"),
    [(72, 13, 40), (3, 299, 1), (7, 128, 0), (12, 75, 4), (64, 14, 0), (65, 14, 14)],
)
def test_every_rank_gets_as_many_physical_experts_as_any(ranks, physical, replicas):
    part = Part(K3, Mesh(dp=ranks, ep=ranks))
    assert part.physical_experts == physical
    assert physical * ranks - K3.num_experts == replicas


def test_a_request_keeps_the_state_of_the_specification():
    # k3_model 3.7 and k3_serving 4.1.
    assert quick.slot_bytes(Part(K3, Mesh()), 2) == 449_372_160
    assert quick.slot_bytes(Part(K3, Mesh(tp=8)), 2) / 2**20 == pytest.approx(53.6, abs=0.05)
    assert quick.slot_bytes(Part(K3, Mesh(tp=16)), 2) / 2**20 == pytest.approx(26.8, abs=0.05)


def test_a_million_tokens_cost_27_gib_on_every_rank_of_a_stage():
    for mesh in (Mesh(), Mesh(tp=16, ep=16), Mesh(dp=64, ep=64)):
        assert quick.token_bytes(Part(K3, mesh), 2) == 27_648
        assert quick.token_bytes(Part(K3, mesh), 2) * 2**20 == 27 * 2**30


def test_only_attention_layers_keep_tokens_and_only_kda_layers_keep_slots():
    # A simulator once gave a cache to every layer of a hybrid, and state to none.
    part = Part(K3, Mesh())
    assert part.kda_layers + part.mla_layers == K3.num_hidden_layers
    assert quick.token_bytes(part, 2) == 24 * 576 * 2
    assert quick.slot_bytes(part, 2) == 69 * 6_512_640


def test_page_0_and_slot_0_are_scratch():
    load = Load(3, 130, 64, 4, 64, snapshots=2)
    assert (load.request_pages, load.pages, load.slots) == (3, 10, 6)
