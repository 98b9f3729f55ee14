"""Parts of tensors: what a rank reads is what a cut of the whole tensor holds."""

import json
from collections import Counter

import pytest
import torch

from k3c.artifact import WeightEntry
from k3c.artifact_ranks import weight_of_rank
from k3c.errors import CheckpointError
from k3c.export.exporter import export_model
from k3c.ir.graph import Shard
from k3c.model.checkpoint import Checkpoint
from k3c.model.config import load_config
from k3c.model.random_weights import write_random_model
from k3c.model.safetensors_file import Stored
from k3c.model.tensor_part import Part
from k3c.passes import shard
from k3c.passes.context import PassContext
from k3c.passes.weight_table import weight_range
from k3c.placement.placement import contiguous
from k3c.targets.mesh import Mesh
from k3c.weights import WeightPacker
from tests.support.fake_layouts import TARGET, catalogue
from tests.support.ranks import Group, cut, from_checkpoint, rank_weight
from tests.support.tiny_checkpoint import four_heads_config_json

EMBED = "language_model.model.embed_tokens.weight"
O_PROJ = "language_model.model.layers.0.self_attn.o_proj.weight"
W2 = "language_model.model.layers.*.block_sparse_moe.experts.*.w2"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    source = folder / "source.json"
    source.write_text(json.dumps(four_heads_config_json()))
    write_random_model(folder, source, 3)
    return Checkpoint(folder, load_config(folder))


@pytest.mark.parametrize("part", [Part(0, 0, 17), Part(0, 51, 68), Part(0, 68, 85), Part(1, 8, 24)])
def test_a_part_is_a_cut_and_zero_past_the_end(checkpoint, part):
    whole, size = checkpoint.load(EMBED), part.stop - part.start
    want = whole.narrow(part.dim, part.start, size) if part.dim else None
    want = cut(whole, Shard("tp", 0, size), {"tp": part.start // size}) if want is None else want
    assert torch.equal(checkpoint.load(EMBED, part), want)


@pytest.mark.parametrize("part", [Part(0, 2, 4), Part(1, 32, 64), Part(2, 64, 128)])
def test_a_part_of_the_experts_is_a_cut_of_codes_and_scales(checkpoint, part):
    packed, scale = checkpoint.load_experts(W2, 1)
    got = checkpoint.load_experts(W2, 1, part)
    for whole, half, block in ((packed, got[0], 2), (scale, got[1], 32)):
        factor = block if part.dim == 2 else 1
        start, stop = part.start // factor, part.stop // factor
        assert torch.equal(half, whole.narrow(part.dim, start, stop - start))


def test_only_the_bytes_of_a_part_are_read(checkpoint, monkeypatch):
    read, plain = Counter(), Stored.read_rows

    def counted(stored, out, start, stride):
        read[stored.name] += out.nbytes
        plain(stored, out, start, stride)

    monkeypatch.setattr(Stored, "read_rows", counted)
    checkpoint.load(EMBED, Part(0, 17, 34))
    checkpoint.load_experts(W2, 1, Part(0, 6, 8))
    assert read[EMBED] == 17 * 64 * 2
    assert len(read) == 1 + 2 * 2


def test_long_parts_of_rows_are_read_row_by_row(tmp_path):
    values = torch.arange(6 * 2048, dtype=torch.float32).reshape(6, 2048)
    file = tmp_path / "x.bin"
    file.write_bytes(b"head" + values.numpy().tobytes())
    stored = Stored("x", file, "F32", (6, 2048), 4, values.nbytes)
    from k3c.model.tensor_part import read_part

    assert torch.equal(read_part(stored, (6, 2048), Part(1, 512, 1024)), values[:, 512:1024])
    file.write_bytes(file.read_bytes()[:-6000])
    with pytest.raises(CheckpointError, match="bytes could be read"):
        read_part(stored, (6, 2048), Part(1, 1536, 2048))


@pytest.mark.parametrize(
    "mesh",
    [Mesh(4, 4), Mesh(4, 1), Mesh(2, 2, latent="sharded"), Mesh(2, 4, 2), Mesh(1, 3, 3)],
    ids=str,
)
def test_the_packer_reads_what_the_ranks_of_the_ir_hold(checkpoint, mesh):
    module = export_model(checkpoint.config, "bf16", checkpoint.dtype)
    sharded = shard.run(module, PassContext(TARGET, catalogue(""), mesh=mesh))
    axes, rank = dict(mesh.axes), mesh.ranks - 1
    placement = contiguous(checkpoint.config.num_experts, mesh.ep, [1, 2]) if mesh.ep > 1 else None
    packer = WeightPacker(checkpoint, axes, rank, lambda _: None, placement)
    group = Group(mesh, from_checkpoint(checkpoint), placement)
    for graph, layer in (("kda_dense", 0), ("kda_moe", 1), ("mla_moe", 2), ("head", -1)):
        for weight in sharded.graph(graph).weights:
            entry = WeightEntry(
                weight.value.name, layer, weight.sources, weight.value.type.dtype.name,
                weight.value.type.sizes, "row_major", 0, 0, 0,
                tuple(map(weight_range, weight.shards)),
            )  # fmt: skip
            entry = weight_of_rank(entry, axes, rank)
            want = rank_weight(group, weight, layer, rank)
            wants = want if isinstance(want, tuple) else (want,)
            for got, tensor in zip(packer.arrays(entry), wants, strict=True):
                bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
                assert torch.equal(torch.from_numpy(got), bits), weight.value.name
