"""Plan budgets: no number of a plan moves unseen."""

from dataclasses import replace

import pytest

from k3c.ir.graph import Node, Value
from k3c.ir.types import F32
from k3c.model.config import load_config
from k3c.planner.exact import Planner, make_planner
from k3c.targets.catalogue import Catalogue, Cost, Stage
from k3c.targets.mesh import Mesh, parse_mesh
from k3c.targets.topology import load_topology
from perf import budgets
from perf.budgets import CASES, FOLDER, bless, measure, moved, path_of, read

H200 = next(case for case in CASES if case.machine == "hgx-h200-x2")
ADVICE = (
    'run make bless-budgets WHY="..." if they should move, and commit the files with the change'
)


class CastTemplate:
    """A kernel that casts: what a pass that leaves casts behind would make the plan launch."""

    name, op, reference = "planted_cast", "cast", "cast"

    def accepts(self, node, target):
        return None

    def layouts(self, node, target):
        return {}

    def stages(self, node, target):
        return (Stage("", {}, (1, 1, 1)),)

    def configs(self, node, target):
        return ({},)

    def config(self, node, target):
        return {}

    def tuning_key(self, node):
        return str(node.results[0].type)

    def scalars(self, node):
        return ()

    def workspace_bytes(self, node, target):
        return 0

    def cost(self, node, target):
        return Cost(node.operands[0].type.nbytes, node.results[0].type.nbytes, 0)


def with_casts(module, name):
    """Cast the first result of a graph to f32 and back, as a careless pass would."""
    graph = module.graph(name)
    first, *rest = graph.nodes
    old = first.results[0]
    wide = Value("planted_wide", replace(old.type, dtype=F32))
    back = Value("planted_back", old.type)
    swap = lambda v: back if v.name == old.name else v  # noqa: E731
    nodes = (
        first,
        Node("cast", (old,), (wide,), {}),
        Node("cast", (wide,), (back,), {}),
        *(replace(n, operands=tuple(map(swap, n.operands))) for n in rest),
    )
    outputs = tuple((n, swap(v)) for n, v in graph.outputs)
    changed = replace(graph, nodes=nodes, outputs=outputs)
    return replace(module, graphs=tuple(changed if g.name == name else g for g in module.graphs))


@pytest.fixture(scope="module")
def planner():
    return make_planner(load_config(H200.config), load_topology(H200.machine).target, "bfloat16")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_number_of_a_plan_has_moved_without_a_reason(case):
    lines = moved(read(case)["buckets"], measure(case))
    assert not lines, "\n".join([f"{len(lines)} numbers moved; {ADVICE}", *lines])


def test_measuring_the_same_commit_again_never_alerts(planner):
    first, again = measure(H200, planner), measure(H200, planner)
    fresh = Planner(planner.config, planner.target, planner.module, planner.catalogue)
    assert moved(first, again) == moved(first, measure(H200, fresh)) == []


def test_an_extra_cast_of_a_pass_is_caught_in_every_bucket(planner):
    mesh = parse_mesh(H200.mesh) or Mesh()
    catalogue = Catalogue((*planner.catalogue.templates, CastTemplate()))
    planted = Planner(planner.config, planner.target, planner.module, catalogue)
    (module,) = planner.lowered(mesh)
    planted._lowered[mesh] = (with_casts(module, "kda_moe"),)
    clean, found = measure(H200, planner), measure(H200, planted)
    layers = sum(call.graph == "kda_moe" for call in module.schedule)
    assert layers == 68
    for bucket, numbers in found.items():
        assert numbers["launches"] == clean[bucket]["launches"] + 2 * layers
        # bf16 is read and f32 written, then f32 read and bf16 written: 12 bytes an element.
        extra = numbers["bytes_moved"] - clean[bucket]["bytes_moved"]
        assert extra > 0
        assert extra % (12 * layers) == 0
        assert numbers["kernels"] > clean[bucket]["kernels"]
        assert numbers["estimated_us"] > clean[bucket]["estimated_us"]
    lines = moved(clean, found)
    assert {line.split()[0] for line in lines} == set(clean)
    assert any(line.startswith("decode.b1 launches: ") for line in lines)


def test_a_bucket_that_is_gone_or_new_is_a_moved_number():
    assert moved({"decode.b1": {"launches": 3}}, {}) == ["decode.b1 launches: 3 -> none"]
    assert moved({}, {"decode.b1": {"launches": 3}}) == ["decode.b1 launches: none -> 3"]
    assert moved({"a": {"x": 200}}, {"a": {"x": 199}}) == ["a x: 200 -> 199 (-0.50%)"]


def test_blessing_keeps_the_reason_and_needs_one(tmp_path):
    case = CASES[0]
    with pytest.raises(AssertionError, match="a reason is needed"):
        bless(case, {"b": {"launches": 1}}, "  ", tmp_path)
    bless(case, {"b": {"launches": 1}}, "new", tmp_path)
    before = path_of(case, tmp_path).read_bytes()
    assert bless(case, {"b": {"launches": 1}}, "nothing moved", tmp_path) == []
    assert path_of(case, tmp_path).read_bytes() == before
    bless(case, {"b": {"launches": 2}}, "one more launch", tmp_path)
    kept = read(case, tmp_path)
    assert kept["buckets"] == {"b": {"launches": 2}}
    assert [entry["why"] for entry in kept["log"]] == ["new", "one more launch"]
    assert kept["log"][1]["moved"] == ["b launches: 1 -> 2 (+100.00%)"]


def test_the_command_names_what_moved_and_fails(tmp_path, monkeypatch, capsys):
    case = CASES[0]
    bless(case, {"decode.b1": {"launches": 7}}, "new", tmp_path)
    monkeypatch.setattr(budgets, "CASES", (case,))
    monkeypatch.setattr(budgets, "measure", lambda case: {"decode.b1": {"launches": 8}})
    monkeypatch.setattr(budgets, "read", lambda case: read(case, tmp_path))
    assert budgets.main([]) == 1
    assert "decode.b1 launches: 7 -> 8" in capsys.readouterr().out
    assert budgets.main(["--bless"]) == 2


def test_every_file_belongs_to_a_case_and_tells_why():
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(case.name for case in CASES)
    for case in CASES:
        assert all(entry["why"].strip() for entry in read(case)["log"])
        assert read(case)["log"], case.name
