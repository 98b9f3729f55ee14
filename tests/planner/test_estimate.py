"""Estimates of steps: by hand where possible, and against measured launches."""

from dataclasses import dataclass, replace

import pytest

from k3c.artifact import Bucket
from k3c.ir.graph import Call, Graph, Module, Node, Value
from k3c.ir.types import DTYPES, TensorType
from k3c.passes.select_kernels import Selected
from k3c.planner.efficiency import Efficiency
from k3c.planner.estimate import estimate_step, group
from k3c.planner.measured import measured_steps
from k3c.planner.public import lookup, series, transfer
from k3c.planner.routing import Routing
from k3c.planner.work import Conditions, Work, work_of
from k3c.targets.catalogue import Cost
from k3c.targets.collectives import choose
from k3c.targets.mesh import Mesh
from k3c.targets.target import load_target
from k3c.targets.topology import load_topology

H200 = load_target("h200")
BUCKET = Bucket("decode.b1", "decode", {"T": 1, "B": 1, "M": 4, "P": 5})


@dataclass(frozen=True)
class Template:
    """A kernel of a name with a given cost."""

    name: str
    nbytes: int
    flops: int = 0

    def cost(self, node, target):
        return Cost(self.nbytes, 0, self.flops)

    def tuning_key(self, node):
        return "not in the table"


def value(name, dtype, *shape):
    return Value(name, TensorType(DTYPES[dtype], shape))


def selected(nodes, templates, calls=1, mesh=(), target="h200"):
    graph = Graph("block", (), (), tuple(nodes), ())
    module = Module("kernel", (), (graph,), tuple(Call("block", i) for i in range(calls)), mesh)
    choices = {("block", n.results[0].name): t for n, t in zip(nodes, templates, strict=True) if t}
    return Selected(module, BUCKET, load_target(target), choices, {}, ())


LINEAR = Node("linear", (value("x", "bf16", 1, 8),), (value("y", "bf16", 1, 8),))
REDUCE = Node(
    "all_reduce", (value("y", "bf16", 1, 7168),), (value("z", "bf16", 1, 7168),), {"axis": "tp"}
)


def test_a_step_is_the_sum_of_its_kinds_and_they_of_their_calls():
    one = selected([LINEAR, REDUCE], [Template("linear_decode", 43_000_000), None], 3, (("tp", 8),))
    machine = load_topology("hgx-h200")
    found = estimate_step(one, Mesh(tp=8), machine)
    kinds = {kind.kind: kind for kind in found.kinds}
    assert kinds["linear"].launches == kinds["all_reduce"].launches == 3
    # 43 MB at 4.3 TB/s are 10 us.
    assert kinds["linear"].floor_us == pytest.approx(30.0)
    assert kinds["linear"].us > 30.0
    message = choose("all_reduce", 14336, range(8), machine)
    assert kinds["all_reduce"].us == pytest.approx(3 * message.us)
    assert kinds["all_reduce"].floor_us == 0
    for field in ("us", "low_us", "high_us"):
        parts = sum(getattr(kind, field) for kind in found.kinds)
        assert getattr(found, field) == pytest.approx(parts)
    assert found.low_us < found.us < found.high_us


def test_a_launch_like_a_measured_one_takes_as_long():
    # W1 b = 1: the KDA input projection, 46.1 MB: 17.97 us with events of about 3.5.
    time = Efficiency(H200).time(Work("linear", "linear_decode", "decode", True, 46.1e6, 0, 1))
    assert time.us == pytest.approx(17.97 - 3.5, rel=0.1)
    assert time.source == "measured on h200"


def test_more_bytes_or_operations_never_take_less_time():
    families = {(s.work.family, s.work.phase) for m in measured_steps("h200") for s in m.samples}
    for target in ("h200", "gb300", "mi355x", "cpu-avx2"):
        efficiency = Efficiency(load_target(target))
        for family, phase in sorted(families):
            for tuned in (True, False):
                work = Work("op", family, phase, tuned, 1e5, 1e6, 1)
                times = [efficiency.time(replace(work, nbytes=10.0**n)) for n in range(4, 11)]
                times += [efficiency.time(replace(work, nbytes=1e10, flops=10.0**14))]
                assert [t.us for t in times] == sorted(t.us for t in times), (family, target)
                assert all(0 < t.low_us <= t.us <= t.high_us for t in times), (family, target)


def test_a_kernel_that_nobody_measured_is_estimated_by_all_of_its_phase():
    time = Efficiency(H200).time(Work("new", "new_kernel", "decode", True, 43e6, 0, 1))
    assert time.us > 10.0
    assert "any decode kernel" in time.detail


def test_another_device_changes_as_public_kernels_do_and_says_so():
    work = Work("linear", "linear_decode", "decode", True, 80e6, 0, 1)
    time = Efficiency(load_target("gb300")).time(work)
    assert time.source == "modelled: measured on h200, moved to gb300"
    # Ten microseconds at 8 TB/s; public GEMMs reach 0.84 of the share that they do on an H200.
    assert 10.0 < time.us < 10.0 / 0.6
    assert "aiconfigurator" in time.detail
    same = Efficiency(load_target("mi355x")).time(work)
    assert "no public kernel ran on" in same.detail
    assert same.high_us / same.us > time.high_us / time.us


def test_a_source_that_is_left_out_is_not_used():
    sources = frozenset(s.source for s in series())
    assert transfer("h200", "gb300", "linear_decode", "decode", frozenset()).share < 1
    with pytest.raises(AssertionError, match="no public kernel ran on two devices"):
        transfer("h200", "gb300", "linear_decode", "decode", sources)


def test_a_public_kernel_is_looked_up_as_it_was_measured():
    keys = {"n": 6144, "k": 7168}
    assert lookup("gb300", "gemm", "cublas", keys, 1)[0] == 17.3
    between, _, _ = lookup("gb300", "gemm", "cublas", keys, 180)
    assert 21.9 < between < 27.5
    wider, spread, source = lookup("gb300", "gemm", "cublas", {"n": 6400, "k": 7168}, 1)
    assert 17.3 < wider < 19.5
    assert spread > 0
    assert source.startswith("fitted to")


def routed(local, total):
    weights = value("w", "mxfp4", local, 64, 64)
    operands = (value("x", "bf16", 1, 64), weights, value("s", "f32", 1), value("e", "i32", 1, 2))
    return Node("grouped_gemm", operands, (value("y", "bf16", 1, 2, 64),), {"total_experts": total})


def test_experts_are_counted_as_the_router_chooses_them():
    # One token with 2 of 4 experts. On one rank both are read: 2 x 64 x 64 x 4.25 / 8 bytes.
    expert_bytes = 64 * 64 * 4.25 / 8
    node = routed(4, 4)
    one = selected([node], [Template("grouped_gemm_decode", 1000 + round(2 * expert_bytes))])
    (work,), _ = work_of(one, Conditions())
    assert work.nbytes == pytest.approx(1000 + 2 * expert_bytes)
    assert work.flops == 2 * 2 * 64 * 64
    # Of two ranks with 2 experts each, one is counted by the kernel's own cost; the busiest of a
    # uniform router has 1.44 (chances 1/2 each: 1 - 1/16 + 1 - 9/16).
    half = selected([routed(2, 4)], [Template("grouped_gemm_decode", 1000 + round(expert_bytes))])
    (busiest,), _ = work_of(half, Conditions())
    assert busiest.nbytes == pytest.approx(1000 + (15 / 16 + 7 / 16) * expert_bytes)
    (mean,), _ = work_of(half, Conditions(routing=Routing(busiest=False)))
    assert mean.nbytes == pytest.approx(1000 + expert_bytes)


def test_attention_reads_the_context_that_there_is():
    cache = value("cache", "bf16", 5, 64, 576)
    node = Node("mla_attend", (value("q", "bf16", 1, 6, 576), cache), (value("o", "bf16", 1, 6),))
    one = selected([node], [Template("mla_attend", 256_000)])
    (full,), _ = work_of(one, Conditions())
    assert full.nbytes == 256_000
    # Four pages of 64 positions: 64 tokens are a quarter.
    (quarter,), _ = work_of(one, Conditions(context_tokens=64))
    assert quarter.nbytes == pytest.approx(64_000)
    times = [
        estimate_step(one, None, load_topology("h200"), context_tokens=t).us for t in (1, 64, 256)
    ]
    assert times == sorted(times)


def test_a_message_has_the_bytes_of_the_whole_tensor():
    # Two data ranks: a row of each goes to all, and comes back.
    one, both = value("x", "bf16", 1, 3584), value("y", "bf16", 2, 3584)
    gather = Node("all_gather", (one,), (both,), {"axis": "tp"})
    _, (message,) = work_of(selected([gather], [None]), Conditions())
    assert (message.kind, message.nbytes, message.count) == ("all_gather", 2 * 3584 * 2, 1)


def test_collectives_run_over_the_ranks_of_their_axis():
    mesh = Mesh(tp=2, ep=4, dp=2, pp=2)
    # Rank 5 is the second of its group of heads, in the first data rank of the second stage.
    assert group(mesh, "tp", 5) == (4, 5)
    assert group(mesh, "ep", 5) == (4, 5, 6, 7)
    assert group(mesh, "dp", 5) == (5, 7)
    assert group(mesh, "pp", 5) == (1, 5)
