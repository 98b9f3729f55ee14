"""Topologies: rates from arithmetic, islands, the weakest cut, what is said of broken ones."""

import subprocess
import sys
from itertools import combinations

import networkx as nx
import pytest
from hypothesis import given, settings

from k3c.errors import ConfigError
from k3c.targets.target import known_targets
from k3c.targets.topology import FOLDER, TIERS, known_topologies, load_topology
from tests.support.topologies import ISLANDS, PCIE_ONLY, parse, rack, texts

# name: ranks, hosts, GB/s of a pair on one host, GB/s of a pair on two, GB/s of the bisection.
SHIPPED = {
    "h200-x2": (2, 1, 450.0, None, 450.0),
    "hgx-h200": (8, 1, 450.0, None, 4 * 450.0),
    "hgx-h200-x2": (16, 2, 450.0, 50.0, 8 * 50.0),
    "hgx-b300": (8, 1, 900.0, None, 4 * 900.0),
    "gb200-nvl72": (72, 18, 900.0, 900.0, 36 * 900.0),
    "gb300-nvl72": (72, 18, 900.0, 900.0, 36 * 900.0),
    # 7 links of 153.6 GB/s both ways: 76.8 to each peer; 4 x 4 wires cross a cut.
    "mi355x-8": (8, 1, 76.8, None, 16 * 76.8),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_topology_has_the_rates_of_its_datasheet(name):
    ranks, hosts, near, far, bisection = SHIPPED[name]
    topology = load_topology(name)
    assert (topology.name, topology.ranks, len(topology.hosts)) == (name, ranks, hosts)
    assert topology.bandwidth_gbs(0, 1) == pytest.approx(near)
    if far is not None:
        assert topology.bandwidth_gbs(0, ranks - 1) == far
    assert topology.bisection_gbs() == pytest.approx(bisection)
    assert topology.warnings == ()
    assert all(fabric.source for fabric in topology.fabrics)


def test_every_shipped_file_is_tested_and_every_device_is_a_topology_of_one():
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(SHIPPED)
    assert set(known_topologies()) == set(SHIPPED) | set(known_targets())
    one = load_topology("gb200")
    assert (one.ranks, one.hosts, one.fabrics, one.islands()) == (1, ((0,),), (), ((0,),))
    assert (one.target.name, one.bisection_gbs(), one.warnings) == ("gb200", 0.0, ())


def test_a_rack_is_one_island_of_trays_and_two_servers_are_two():
    assert load_topology("gb300-nvl72").islands() == (tuple(range(72)),)
    pair = load_topology("hgx-h200-x2")
    assert pair.islands() == (tuple(range(8)), tuple(range(8, 16)))
    assert [pair.host_of(rank) for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]
    assert pair.link(0, 8).kind == "infiniband"
    assert pair.link(8, 15).kind == "nvlink"


def test_a_tray_with_4_of_8_paths_down_is_named_and_a_domain_without_it_offered():
    broken = parse(rack(degraded='[[degraded]]\nfabric = "nvlink"\nhosts = [7]\npaths_up = 4'))
    assert broken.bandwidth_gbs(28, 0) == 450.0
    assert broken.bandwidth_gbs(27, 0) == 900.0
    # The weakest half holds the four slow ranks and 32 whole ones.
    assert broken.bisection_gbs() == 4 * 450.0 + 32 * 900.0
    first, second = broken.warnings
    assert "host 7 (ranks 28..31): 4 of 8 nvlink paths are up, 450 of 900 GB/s" in first
    assert "68 of 72 ranks at full rate: add 7 to missing_hosts and set ranks = 68" in second
    smaller = broken.reduced()
    assert (smaller.ranks, len(smaller.hosts), smaller.degraded()) == (68, 17, ())
    assert smaller.bisection_gbs() == 34 * 900.0


def test_the_domain_that_a_warning_offers_loads_from_a_file_and_is_the_same():
    degraded = '[[degraded]]\nfabric = "nvlink"\nhosts = [7]\npaths_up = 4'
    smaller = parse(rack(degraded=degraded)).reduced()
    edited = parse(rack(degraded=degraded, missing="missing_hosts = [7]", ranks=68))
    assert (edited.hosts, edited.fabrics) == (smaller.hosts, smaller.fabrics)
    assert edited.warnings == ("host 7 missing: 68 ranks are left",)
    assert edited.host_ids == tuple(i for i in range(18) if i != 7)


def test_a_rank_without_any_nvlink_falls_back_to_the_next_fabric_and_is_an_island():
    broken = parse(ISLANDS + '\n[[degraded]]\nfabric = "bridge"\nranks = [2]\npaths_up = 0\n')
    assert broken.link(2, 3).kind == "pcie"
    assert broken.islands() == ((0, 1, 3), (2,), (4, 5, 6, 7))


def test_two_bridged_islands_are_two_islands_of_one_host_and_a_warning_says_so():
    islands = parse(ISLANDS)
    assert islands.islands() == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert islands.bandwidth_gbs(0, 3) == 150.0
    assert islands.bandwidth_gbs(0, 4) == 63.0
    # Four wires of PCIe cross the cut between the islands.
    assert islands.bisection_gbs() == 4 * 63.0
    (line,) = islands.warnings
    assert "2 islands of 4 ranks: pcie at 63 GB/s between them, nvlink at 150 GB/s inside" in line


def test_a_server_without_nvlink_is_one_island_and_a_warning_names_its_rate():
    plain = parse(PCIE_ONLY)
    assert plain.islands() == (tuple(range(8)),)
    assert plain.warnings == ("no NVLink or xGMI: ranks of a host talk over pcie at 63 GB/s",)
    assert plain.bisection_gbs() == 4 * 63.0


def test_a_missing_tray_leaves_a_rack_of_17_with_ranks_counted_on():
    rest = parse(rack(missing="missing_hosts = [0]", ranks=68))
    assert (rest.ranks, rest.hosts[0], rest.host_ids[0], rest.rank_ids[0]) == (
        68,
        (0, 1, 2, 3),
        1,
        4,
    )
    assert rest.bisection_gbs() == 34 * 900.0


def test_a_shipped_topology_loads_without_the_libraries_of_graphs_and_schemas():
    code = (
        "import sys; from k3c.targets.topology import load_topology;"
        "t = load_topology('hgx-h200-x2'); t.warnings, t.islands(), t.bisection_gbs();"
        "print(*sorted({m.split('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"networkx", "jsonschema"} & set(done.stdout.split())


@settings(max_examples=60, deadline=None)
@given(texts())
def test_islands_are_the_parts_of_the_graph_that_its_best_wires_join(text):
    topology = parse(text)
    tiers = [TIERS[data["kind"]] for _, _, data in topology.graph.edges(data=True)]
    near = nx.Graph()
    near.add_nodes_from(range(topology.ranks))
    for a, b, data in topology.graph.edges(data=True):
        if TIERS[data["kind"]] == min(tiers):
            near.add_edge(a, b)
    parts = [
        tuple(sorted(r for r in part if isinstance(r, int)))
        for part in nx.connected_components(near)
    ]
    assert topology.islands() == tuple(sorted(part for part in parts if part))


def test_a_link_of_a_rank_with_itself_or_with_none_is_refused():
    for pair in ((0, 0), (0, 2), (-1, 0)):
        with pytest.raises(ConfigError, match=r"two different ranks of 0\.\.1"):
            load_topology("h200-x2").link(*pair)


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(ConfigError, match=r"'gb300-nvl36'.*gb300-nvl72.*path of your own"):
        load_topology("gb300-nvl36")


@settings(max_examples=60, deadline=None)
@given(texts())
def test_links_are_the_same_both_ways_and_islands_split_the_ranks(text):
    topology = parse(text)
    ranks = range(topology.ranks)
    assert sorted(r for island in topology.islands() for r in island) == list(ranks)
    assert sorted(r for host in topology.hosts for r in host) == list(ranks)
    for a, b in combinations(ranks, 2):
        assert topology.link(a, b) == topology.link(b, a)
        assert topology.bandwidth_gbs(a, b) == max(f.pair_gbs(a, b) for f in topology.fabrics) > 0


@settings(max_examples=60, deadline=None)
@given(texts())
def test_a_subset_keeps_every_link_and_a_reduced_one_has_no_degraded_rank(text):
    topology = parse(text)
    keep = list(range(0, topology.ranks, 2))
    part = topology.subset(keep)
    for a, b in combinations(range(part.ranks), 2):
        assert part.bandwidth_gbs(a, b) == topology.bandwidth_gbs(keep[a], keep[b])
    smaller = topology.reduced()
    assert (smaller is None) == (not topology.degraded() or _nothing_left(topology))
    assert smaller is None or smaller.degraded() == ()


def _nothing_left(topology):
    bad = set(topology.degraded())
    parts = topology.hosts if len(topology.hosts) > 1 else [(r,) for r in topology.hosts[0]]
    return all(bad & set(part) for part in parts)


@settings(max_examples=40, deadline=None)
@given(texts(max_hosts=2, max_per_host=4))
def test_the_bisection_is_the_least_flow_between_any_two_halves(text):
    topology = parse(text)
    if topology.ranks < 2:
        assert topology.bisection_gbs() == 0.0
        return
    halves = combinations(range(topology.ranks), topology.ranks // 2)
    least = min(_flow(topology.graph, set(half)) for half in halves)
    assert topology.bisection_gbs() == pytest.approx(least)


def _flow(graph, half):
    """Return the largest flow out of a half: its ranks are sources, the others drains."""
    flow = nx.DiGraph()
    for a, b, data in graph.edges(data=True):
        flow.add_edge(a, b, capacity=data["gbs"])
        flow.add_edge(b, a, capacity=data["gbs"])
    for rank in (node for node in graph if isinstance(node, int)):
        if rank in half:
            flow.add_edge("source", rank)
        else:
            flow.add_edge(rank, "drain")
    return nx.maximum_flow_value(flow, "source", "drain")
