"""The comparison with peers, without a device: what makes a row, what it is held against."""

import zipfile

import pytest

from k3c.artifact import Command
from k3c.runtime.binding import Bound
from perf.peers.fetch import take
from perf.peers.ours import TABLE, Nodes, chosen, layers_of
from perf.peers.run import best_of, compared


def bound(label, graph, layer):
    command = Command("launch", "k", (), (), (), label)
    return Bound(command, None, (), (), (), f"decode.b1, {graph} layer {layer}, {label}")


def test_a_row_is_the_launches_of_its_nodes_in_its_kind_of_layer():
    launches = [
        bound("linear -> %o_part", "kda_moe", 1),
        bound("linear -> %o_part", "kda_moe", 1),
        bound("linear -> %o_part", "mla_moe", 3),
        bound("linear -> %q", "kda_moe", 2),
        bound("linear -> %o_part", "kda_moe", 2),
    ]
    found = chosen(launches, Nodes("decode.b1", ("linear -> %o_part",), ()))
    assert found == [launches[0], launches[1], launches[4]]
    # A node may take two launches; per layer they are one call.
    assert layers_of(found) == 2


def row(op, shape, peer, us, **more):
    return {"op": op, "shape": shape, "peer": peer, "median_us": us, **more}


def test_a_fused_row_is_held_against_the_sum_of_the_best_peer_of_each_call():
    theirs = [
        row("gemm", "router m1 896x7168", "cuBLAS", 8.0),
        row("gemm", "latent_down m1 3584x7168", "cuBLAS", 17.0),
        row("gemm", "latent_down m1 3584x7168", "vLLM", 16.0),
        {"op": "gemm", "shape": "router m1 896x7168", "peer": "vLLM", "error": "unsupported"},
    ]
    wanted = (("gemm", "router m1 896x7168"), ("gemm", "latent_down m1 3584x7168"))
    ours = [row("gemm", "gate", "k3c", us, floor_us=10.0, sum_of=wanted) for us in (12.0, 13.0)]
    (line,) = compared(ours, theirs)
    assert (line.ours_us, line.peer_us, line.peer) == (13.0, 24.0, "cuBLAS + vLLM")


def test_a_row_with_a_part_that_no_peer_does_has_no_ratio():
    theirs = [row("gemm", "router", "cuBLAS", 8.0)]
    wanted = (("gemm", "router"), ("kda_decode", "H6 b1"))
    (line,) = compared([row("gemm", "x", "k3c", 9.0, floor_us=1.0, sum_of=wanted)], theirs)
    assert line.peer_us is None
    assert best_of(theirs) == {("gemm", "router"): ("cuBLAS", 8.0)}


@pytest.mark.parametrize("workload", sorted(TABLE))
def test_every_row_names_peers_and_a_bucket_of_its_workload(workload):
    for nodes in TABLE[workload]:
        assert nodes.peers
        assert nodes.labels
        assert nodes.bucket.startswith("prefill.t" if workload == "W2" else "decode.b")


def test_only_what_is_measured_is_taken_of_a_wheel_and_what_lacks_is_named(tmp_path):
    wheel = tmp_path / "vllm-1.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/_C_stable_libtorch.abi3.so", b"library")
        archive.writestr("vllm/third_party/triton_kernels/swiglu.py", b"text")
        archive.writestr("vllm/other.py", b"")
    members = (
        ("vllm/_C_stable_libtorch", "so/_C_stable_libtorch"),
        ("vllm/third_party/triton_kernels/", "py/triton_kernels/"),
    )
    take(wheel, members, tmp_path / "peers")
    made = {str(p.relative_to(tmp_path / "peers")) for p in (tmp_path / "peers").rglob("*.*")}
    assert made == {"so/_C_stable_libtorch.so", "py/triton_kernels/swiglu.py"}
    with pytest.raises(SystemExit, match="has no vllm/_gone"):
        take(wheel, (("vllm/_gone", "so/_gone"),), tmp_path / "peers")
