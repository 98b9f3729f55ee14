"""What of the product's model goes over a mesh, said before anything is read."""

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from k3c.codegen.templates.triton.mxfp4_gpu_layout import CHUNK, TILE_ROWS, Mxfp4GpuLayout
from k3c.errors import ConfigError
from k3c.mesh_limits import (
    EXPERT_TILE,
    check_mesh,
    expert_bytes,
    legal_meshes,
    physical_experts,
    problems,
    warnings,
)
from k3c.model.config import load_config
from k3c.passes.sharding_rules import slots_of
from k3c.targets.mesh import Mesh

PATH = Path(__file__).parents[1] / "data/configs/kimi-k3-config.json"
K3 = load_config(PATH)


@pytest.mark.parametrize("gpus", [6, 12])
def test_six_and_twelve_devices_have_meshes_without_padded_heads(gpus):
    # Fault QL14: padded heads gave columns that no kernel took.
    found = legal_meshes(K3, gpus)
    assert found[:2] == (Mesh(tp=gpus, ep=gpus), Mesh(tp=gpus))
    assert all(K3.num_attention_heads % mesh.tp == 0 for mesh in found)


@pytest.mark.parametrize(
    ("ranks", "slots", "replicas"),
    [(72, 13, 40), (3, 299, 1), (7, 128, 0), (12, 75, 4), (64, 14, 0), (65, 14, 14)],
)
def test_experts_that_do_not_divide_get_replicas(ranks, slots, replicas):
    # Fault EP01.
    mesh = Mesh(dp=ranks, ep=ranks)
    assert problems(K3, mesh) == []
    assert physical_experts(K3, mesh) == slots == slots_of(896, mesh).count
    assert slots * ranks - 896 == replicas


def test_a_redundancy_of_1152_slots_on_896_experts_works_and_warns():
    # Fault EP06: a limit of 1023 that nobody stated.
    mesh = Mesh(dp=72, ep=72)
    assert problems(K3, mesh, spare_slots=3) == []
    assert slots_of(896, mesh, 16).count * 72 == 1152
    assert slots_of(896, mesh, 16).most_replicas == 72
    (warning,) = warnings(K3, mesh, spare_slots=3)
    assert "1.29 of their bytes" in warning
    assert "256 replicas of 896 experts" in warning
    assert "896 experts into 1013 slots" in problems(K3, mesh, spare_slots=1000)[0]


def test_72_ranks_that_share_heads_are_refused_with_legal_meshes_of_72():
    with pytest.raises(ConfigError) as error:
        check_mesh(K3, Mesh(tp=72, ep=72))
    text = str(error.value)
    assert "96 KDA heads by tp=72" in text
    assert "tp=48,ep=48 or tp=96,ep=96" in text
    assert "tp=8,ep=72,dp=9" in text
    assert "tp=1,ep=72,dp=72" in text
    for mesh in legal_meshes(K3, 72)[:6:2]:
        assert str(mesh) in text
        assert mesh.ranks == 72
    assert Mesh(dp=72, ep=72) in legal_meshes(K3, 72)
    assert Mesh(tp=8, dp=9, ep=72) in legal_meshes(K3, 72)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (Mesh(tp=5), "96 MXFP4 blocks of an expert's columns by tp=5"),
        (Mesh(tp=12, latent="sharded"), "3584 latent columns by tp=12"),
        (Mesh(tp=9, ep=9), "6144 columns of the shared experts by tp=9"),
        (Mesh(pp=94), "93 layers by pp=94"),
        (Mesh(dp=2048), "2048 ranks, at most 1024"),
    ],
)
def test_each_limit_is_named_with_both_numbers(mesh, words):
    assert words in problems(K3, mesh)


def test_shared_experts_limit_a_mesh_only_where_they_are_shared():
    odd = replace(K3, num_shared_experts=1, moe_intermediate_size=3072 + 32)
    whole = Mesh(tp=3, ep=3, shared="replicated")
    assert problems(odd, whole) == []
    assert "3104 columns of the shared experts by tp=3" in problems(
        odd, replace(whole, shared="sharded")
    )


def test_a_rank_without_any_row_of_the_vocabulary_is_refused():
    tiny = replace(K3, vocab_size=10)
    assert problems(tiny, Mesh(tp=8, ep=8)) == ["10 tokens of the vocabulary by tp=8"]
    assert problems(tiny, Mesh(tp=8, ep=8, vocabulary="replicated")) == []


@pytest.mark.parametrize("way", ["tp", "tep", "dep"])
def test_expert_bytes_of_a_rank_fall_with_every_rank(way):
    # Fault QL08: per-device expert memory that stayed where it was for 16 ranks and more.
    sizes = [
        {"tp": Mesh(tp=n), "tep": Mesh(tp=n, ep=n), "dep": Mesh(dp=n, ep=n)}[way]
        for n in (8, 16, 32)
    ]
    found = [expert_bytes(K3, mesh) for mesh in sizes]
    assert [f.real / found[0].real for f in found] == [1, 0.5, 0.25]
    assert all(b.stored < 0.6 * a.stored for a, b in itertools.pairwise(found))


def test_columns_that_fill_no_tile_are_warned_of():
    assert warnings(K3, Mesh(tp=8)) == ()
    assert warnings(K3, Mesh(tp=16, ep=16)) == ()
    assert warnings(K3, Mesh(dp=72, ep=72)) == ()
    (warning,) = warnings(K3, Mesh(tp=16))
    assert "1.11 of their bytes" in warning
    assert "192 columns of an expert are stored as 256" in warning


@pytest.mark.parametrize("mesh", [Mesh(tp=16), Mesh(tp=24), Mesh(tp=16, ep=16)], ids=str)
def test_stored_bytes_are_those_of_the_kernels_layout(mesh):
    assert EXPERT_TILE == (TILE_ROWS, CHUNK)
    columns = 3072 // mesh.tp if mesh.ep == 1 else 3072
    slots = physical_experts(K3, mesh)
    stored = Mxfp4GpuLayout(columns, True).nbytes(slots, 3584)
    stored += Mxfp4GpuLayout(3584, False).nbytes(slots, columns)
    assert expert_bytes(K3, mesh).stored == stored


def test_meshes_of_a_machine_are_legal_all_of_its_ranks_and_each_there_once():
    for ranks in (2, 8, 16, 64, 72):
        found = legal_meshes(K3, ranks, (1, 2))
        assert len(set(found)) == len(found)
        assert all(m.ranks == ranks and not problems(K3, m) for m in found)
        assert Mesh(dp=ranks, ep=ranks) in found


def test_limits_need_no_torch():
    code = (
        "import sys; from k3c.model.config import load_config; from k3c import mesh_limits;"
        f"mesh_limits.legal_meshes(load_config({str(PATH)!r}), 72); print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
