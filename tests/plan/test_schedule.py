"""Scheduling lowers the peak where it can, never breaks an order that matters, and repeats."""

from k3c.ir.text import parse
from k3c.passes import schedule, select_kernels
from tests.support.plan_modules import TARGET, TEXT, FakeTemplate, bucket, catalogue, module

TOY = """k3ir 1
level kernel
dim T in [1, 64]

graph @step(carry %a: bf16[T, 96]) -> bf16[T, 96] {
  weight %wide: bf16[960, 96] from "layers.*.wide"
  weight %narrow: bf16[96, 960] from "layers.*.narrow"
NODES
  %y = add(%n1, %n2) : bf16[T, 96]
  return a=%y
}

schedule {
  step 0 {}
}
"""
ONE = "{beta: 0.0, epilogues: (none), linear_beta: none}"
WIDE = [f"  %w{i} = linear(%a, %wide) {ONE} : bf16[T, 960]" for i in (1, 2)]
NARROW = [f"  %n{i} = linear(%w{i}, %narrow) {ONE} : bf16[T, 96]" for i in (1, 2)]


def run(text, name="decode.b2"):
    adding = FakeTemplate("add", "add_any")
    selected = select_kernels.run(parse(text), bucket(name), catalogue(adding), TARGET)
    return schedule.run(selected)


def names(scheduled, graph="step"):
    return [n.results[0].name for n in scheduled.selected.module.graph(graph).nodes]


def test_a_node_moves_when_that_lowers_the_peak():
    done = run(TOY.replace("NODES", "\n".join(WIDE + NARROW)))
    assert names(done) in (["w1", "n1", "w2", "n2", "y"], ["w2", "n2", "w1", "n1", "y"])
    assert done.moves == {"step": 1}


def test_program_order_stays_where_moving_gains_nothing():
    text = TOY.replace("NODES", "\n".join([WIDE[0], NARROW[0], WIDE[1], NARROW[1]]))
    done = run(text)
    assert names(done) == ["w1", "n1", "w2", "n2", "y"]
    assert done.moves == {"step": 0}


def test_levels_say_what_could_run_together():
    text = TOY.replace("NODES", "\n".join([WIDE[0], NARROW[0], WIDE[1], NARROW[1]]))
    assert run(text).levels["step"] == (0, 1, 0, 1, 2)


def test_scheduling_twice_gives_one_order_and_the_same_nodes():
    selected = select_kernels.run(module(), bucket("prefill.t64"), catalogue(), TARGET)
    first, second = schedule.run(selected), schedule.run(selected)
    assert first.selected.module == second.selected.module
    for graph in selected.module.graphs:
        nodes = first.selected.module.graph(graph.name).nodes
        assert sorted(n.results[0].name for n in nodes) == sorted(
            n.results[0].name for n in graph.nodes
        )


def test_every_operand_is_made_before_it_is_read():
    selected = select_kernels.run(module(), bucket("prefill.t64"), catalogue(), TARGET)
    for graph in schedule.run(selected).selected.module.graphs:
        known = {i.value.name for i in graph.inputs} | {w.value.name for w in graph.weights}
        for node in graph.nodes:
            assert {v.name for v in node.operands} <= known
            known |= {v.name for v in node.results}


def test_readers_of_a_buffer_stay_before_its_overwriting():
    # The old prefix is read by a node with a large result, which would otherwise move down.
    text = TEXT.replace(
        "  %p2, %y2, %b2 = attn_res_norm(%p1,",
        "  %e1 = add(%p1, %d) : bf16[T, 96]\n  %p2, %y2, %b2 = attn_res_norm(%p1,",
    ).replace("%out = linear(%h, %w_down) {", "%out = linear(%h, %w_down, %e1) {")
    order = names(run(text, "prefill.t64"), "kda_dense")
    assert order.index("e1") < order.index("p2")
