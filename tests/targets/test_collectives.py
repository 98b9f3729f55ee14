"""What is chosen for a collective: by size, links and group; error bars; degraded topologies."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3c.targets.collective_fit import models
from k3c.targets.collective_group import group_of
from k3c.targets.collectives import choose, options
from k3c.targets.topology import load_topology
from tests.support.topologies import ISLANDS, PCIE_ONLY, parse, rack, texts

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "dispatch", "combine")
TOKEN = 2 * 7168  # bytes of one row of K3 in bfloat16
HALF_DOWN = '[[degraded]]\nfabric = "nvlink"\nhosts = [7]\npaths_up = 4'


def named(kind, nbytes, ranks, topology):
    return {c.implementation: c for c in options(kind, nbytes, ranks, topology)}


def test_a_token_goes_in_one_shot_and_a_prefill_chunk_through_the_switches():
    hgx = load_topology("hgx-h200")
    assert choose("all_reduce", TOKEN, range(8), hgx).implementation == "one_shot"
    assert choose("all_reduce", 2048 * TOKEN, range(8), hgx).implementation == "nvls"
    # Without switches that add, the second shot of a large tensor saves more than it costs.
    amd = load_topology("mi355x-8")
    assert choose("all_reduce", TOKEN, range(8), amd).implementation == "one_shot"
    assert choose("all_reduce", 2048 * TOKEN, range(8), amd).implementation == "two_shot"


@pytest.mark.parametrize(
    ("name", "ranks", "nbytes", "us"),
    [("hgx-h200", 8, 16384, 4.2), ("hgx-h200", 4, 16384, 3.1), ("gb300-nvl72", 4, 16384, 4.2)],
)
def test_the_best_public_row_of_a_token_is_inside_the_error_bar(name, ranks, nbytes, us):
    chosen = choose("all_reduce", nbytes, range(ranks), load_topology(name))
    assert chosen.low_us <= us <= chosen.high_us
    assert chosen.us == pytest.approx(us, rel=0.10)
    assert "extrapolated" not in chosen.source


def test_beyond_what_was_measured_the_bar_is_wider_and_the_source_says_why():
    wide = load_topology("gb300-nvl72")
    spans = []
    for ranks in (4, 8, 16, 72):
        chosen = named("all_reduce", TOKEN, range(ranks), wide)["one_shot"]
        spans.append(chosen.high_us / chosen.low_us)
        beyond = f"{ranks} ranks where 4 were measured" in chosen.source
        assert beyond == (ranks > 4)
    assert spans == sorted(set(spans))
    twin = named("all_reduce", TOKEN, range(8), load_topology("hgx-b300"))["one_shot"]
    assert "b300 like others of its class" in twin.source


def test_no_way_across_trays_is_faster_than_what_was_measured_across_trays():
    rack, server = load_topology("gb300-nvl72"), load_topology("hgx-b300")
    # 10.9 us for one row and for eight on 8 GPUs of two trays (GB200, with a norm).
    for rows in (1, 8):
        chosen = choose("all_reduce", rows * TOKEN, range(8), rack)
        assert chosen.implementation == "nvls_one_shot"
        assert chosen.us == pytest.approx(10.9, rel=0.10)
        assert choose("all_reduce", rows * TOKEN, range(8), server).us < chosen.us
    floor = models()["nvls_one_shot"].latency_us["blackwell"]
    for kind in KINDS:
        assert all(c.us > floor for c in options(kind, TOKEN, range(8), rack))
    # Two ranks of one tray are near each other; of two trays they are not.
    near, far = (choose("all_reduce", TOKEN, ranks, rack).us for ranks in ((0, 1), (3, 4)))
    assert near < floor < far


def test_two_servers_exchange_by_messages_or_in_levels_and_never_by_direct_reads():
    pair = load_topology("hgx-h200-x2")
    for kind in KINDS:
        for nbytes in (TOKEN, 64 * TOKEN, 2048 * TOKEN):
            ways = named(kind, nbytes, range(16), pair)
            assert not {"one_shot", "two_shot", "nvls", "nvls_one_shot", "direct"} & set(ways)
            near = choose(kind, nbytes, range(8), pair)
            assert choose(kind, nbytes, range(16), pair).us > near.us


def test_two_bridged_islands_reduce_inside_each_and_meet_over_the_bridge():
    islands = parse(ISLANDS)
    small = choose("all_reduce", TOKEN, range(8), islands)
    assert small.implementation == "hierarchical_one_shot"
    large = choose("all_reduce", 64 * TOKEN, range(8), islands)
    assert large.implementation == "hierarchical"
    inside, between, outside = large.phases
    assert (inside.name, outside.name) == ("reduce_scatter.direct", "all_gather.direct")
    assert "over pcie" in between.source
    assert "pcie" not in inside.source + outside.source
    # Half of the ranks of an island take part as they would alone.
    alone = choose("all_reduce", TOKEN, range(4), islands)
    assert alone.implementation == "one_shot"
    assert "pcie" not in alone.source


def test_islands_take_what_arithmetic_gives_for_their_best_way():
    """Written out anew: 3 peers at 150 GB/s inside, one at 63 GB/s outside, for 64 rows."""
    nbytes, one, ring = 64 * TOKEN, models()["one_shot"], models()["ring"]
    latency, peer, share = one.latency_us["hopper"], one.per_peer_us, one.share["hopper"]
    half = latency + 3 * peer + 0.75 * nbytes / (share * 450e3)
    # A quarter crosses PCIe (83 % of its rate), whose hop is 0.4 us longer than NVLink's.
    bridge = latency + peer + 0.4 + nbytes / 4 / (0.83 * 63e3)
    steps = 2 * (1.0 + 6 * 0.6)
    around = ring.latency_us["hopper"] + steps + 1.75 * nbytes / (ring.share["hopper"] * 450e3)
    found = named("all_reduce", nbytes, range(8), parse(ISLANDS))
    assert found["hierarchical"].us == pytest.approx(2 * half + bridge)
    assert found["ring"].us == pytest.approx(around)
    chosen = choose("all_reduce", nbytes, range(8), parse(ISLANDS))
    assert chosen.us == pytest.approx(min(2 * half + bridge, around))


def test_without_nvlink_no_multicast_is_assumed_from_the_number_of_devices():
    for text in (PCIE_ONLY, ISLANDS):
        ways = named("all_reduce", 64 * TOKEN, range(8), parse(text))
        assert not {"nvls", "nvls_one_shot"} & set(ways)
    whole = choose("all_reduce", 64 * TOKEN, range(8), load_topology("hgx-h200"))
    assert choose("all_reduce", 64 * TOKEN, range(8), parse(PCIE_ONLY)).us > whole.us


def test_a_degraded_tray_loses_multicast_for_groups_that_hold_it_and_for_no_other():
    broken, whole = parse(rack(degraded=HALF_DOWN)), parse(rack())
    for ranks in (range(24, 32), range(72)):
        assert "nvls" in named("all_reduce", 64 * TOKEN, ranks, whole)
        assert "nvls" not in named("all_reduce", 64 * TOKEN, ranks, broken)
    assert "nvls" in named("all_reduce", 64 * TOKEN, range(16), broken)
    # The reduced domain that the warning offers is as fast as a whole one of its size.
    smaller = broken.reduced()
    assert choose("all_reduce", 64 * TOKEN, range(64), smaller).us == pytest.approx(
        choose("all_reduce", 64 * TOKEN, range(64), whole).us
    )


def test_few_rows_go_to_everybody_and_many_only_where_their_experts_are():
    wide = load_topology("gb300-nvl72")
    latent = 2 * 3584
    few = choose("dispatch", 72 * latent, range(72), wide)
    many = choose("dispatch", 72 * 256 * latent, range(72), wide)
    assert few.implementation == "all_gather_direct"
    assert many.implementation == "one_sided"
    # 16 of 896 experts are on 72 x (1 - (71/72)^16) = 14.44 ranks, 71 of 72 of them others.
    assert many.wire_bytes == pytest.approx(256 * latent * 14.44 * 71 / 72, rel=1e-3)
    back = choose("combine", 72 * 256 * latent, range(72), wide)
    assert (back.implementation, back.wire_bytes) == ("one_sided", many.wire_bytes)
    assert few.wire_bytes == 71 * latent


def test_a_stage_sends_faster_inside_its_server_than_to_another():
    pair = load_topology("hgx-h200-x2")
    near, far = (choose("send", 64 * TOKEN, (0, other), pair) for other in (1, 8))
    assert (near.implementation, far.implementation) == ("copy", "copy")
    assert near.wire_bytes == far.wire_bytes == 64 * TOKEN
    assert near.us < far.us
    # A long one is bound by the port: 93 % of 50 GB/s.
    long = choose("send", 10**9, (0, 8), pair)
    assert long.us == pytest.approx(10**9 / (0.93 * 50e3), rel=0.01)


def test_some_ranks_of_a_mesh_have_only_the_wires_between_them():
    # vLLM pull request 39080: peak (N - 1) x 76.8 GB/s, 230.4 on 4 and 537.6 on 8 MI355X.
    mesh = load_topology("mi355x-8")
    rates = [group_of(mesh, tuple(range(n))).rate_gbs for n in (2, 4, 8)]
    assert rates == pytest.approx([76.8, 230.4, 537.6])
    assert group_of(load_topology("hgx-h200"), (0, 1, 2)).rate_gbs == 450.0


def test_one_rank_has_nothing_to_wait_for():
    alone = choose("all_reduce", TOKEN, (3,), load_topology("hgx-h200"))
    assert (alone.implementation, alone.us, alone.high_us, alone.wire_bytes) == ("none", 0, 0, 0)


@settings(max_examples=40, deadline=None)
@given(texts(), st.sampled_from(KINDS), st.integers(0, 2**27))
def test_every_way_has_a_bar_around_it_and_the_first_is_the_fastest(text, kind, nbytes):
    topology = parse(text)
    ways = options(kind, nbytes, range(topology.ranks), topology)
    assert ways[0].us == min(c.us for c in ways)
    assert ways[0] == choose(kind, nbytes, range(topology.ranks), topology)
    for way in ways:
        assert way.low_us <= way.us <= way.high_us
        assert way.us == pytest.approx(sum(p.us for p in way.phases))
    bigger = options(kind, 2 * nbytes, range(topology.ranks), topology)
    assert bigger[0].us >= ways[0].us


@settings(max_examples=40, deadline=None)
@given(texts(), st.integers(1, 2**27))
def test_no_all_reduce_is_faster_than_the_weakest_cut_lets_its_bytes_pass(text, nbytes):
    topology = parse(text)
    chosen = choose("all_reduce", nbytes, range(topology.ranks), topology)
    if topology.ranks > 1:
        assert chosen.us * 1e3 >= nbytes / topology.bisection_gbs()


@settings(max_examples=10, deadline=None)
@given(
    st.sets(st.integers(0, 17), min_size=1, max_size=4), st.integers(0, 7), st.integers(1, 2**26)
)
def test_paths_that_are_down_never_make_a_collective_faster(hosts, paths_up, nbytes):
    degraded = f'[[degraded]]\nfabric = "nvlink"\nhosts = {sorted(hosts)}\npaths_up = {paths_up}'
    broken, whole = parse(rack(degraded=degraded)), parse(rack())
    for kind in KINDS:
        assert (
            choose(kind, nbytes, range(72), broken).us
            >= choose(kind, nbytes, range(72), whole).us * 0.999
        )
