"""Plans of a K3-shaped module: bounds, arguments, and a shadow memory that runs the schedule."""

from dataclasses import replace

import numpy as np
import pytest

from k3c.artifact import to_json
from k3c.errors import PassError
from k3c.ir.text import parse
from k3c.passes import build_plan, schedule, select_kernels
from k3c.passes.assign_buffers import Boundary, assign, in_place
from k3c.passes.weight_table import weight_table
from k3c.plan_check import check
from tests.support.plan_modules import (
    TARGET,
    TEXT,
    FakeTemplate,
    bucket,
    catalogue,
    kernel_symbol,
    module,
    packed_bytes,
    plans,
)

NAMES = ("decode.b1", "decode.b2", "decode.b4", "decode.b8")
NAMES += ("prefill.t16", "prefill.t64", "prefill.t256", "score.t64")


def build(source, name, templates=None):
    selected = select_kernels.run(source, bucket(name), templates or catalogue(), TARGET)
    scheduled = schedule.run(selected)
    weights = weight_table([selected], packed_bytes)
    return scheduled.selected, build_plan.run(scheduled, weights, kernel_symbol)


@pytest.mark.parametrize("name", NAMES)
def test_the_arena_is_within_five_percent_of_the_lower_bound(name):
    (plan,) = plans(name)
    assert plan.space_bytes["arena"] <= 1.05 * plan.arena_lower_bound_bytes
    assert not any(c.kind == "copy" for cs in plan.commands.values() for c in cs)


def test_building_twice_gives_the_same_bytes():
    assert list(map(to_json, plans(*NAMES[:2]))) == list(map(to_json, plans(*NAMES[:2])))


class Shadow:
    """Stamps every cache line of a space with the value that lies there."""

    def __init__(self, plan):
        self.lines = {s: np.full(-(-n // 64), -1) for s, n in plan.space_bytes.items()}
        self.buffers = {b.id: b for b in plan.buffers}
        self.stamps = {}

    def at(self, name, call):
        b = self.buffers[name]
        first = b.offset + (call.bases[b.space] if b.per_layer else 0)
        return self.lines[b.space][first // 64 : -(-(first + b.nbytes) // 64)]

    def write(self, name, call, value):
        self.at(name, call)[:] = self.stamps.setdefault(value, len(self.stamps))

    def holds(self, name, call, value):
        return bool((self.at(name, call) == self.stamps.get(value, -2)).all())


def shadow_run(selected, plan):
    """Run the schedule on a shadow memory; return every operand that was not what it should be."""
    shadow, wrong = Shadow(plan), []
    carried = {}
    for number, call in enumerate(plan.calls):
        graph = selected.module.graph(call.graph)
        values = {item.value.name: carried.get(item.value.name) for item in graph.inputs}
        carries = {i.value.name for i in graph.inputs if i.role == "carry"}
        for node, command in zip(graph.nodes, plan.commands[call.graph], strict=False):
            shared = in_place(node)
            fresh = [r for i, r in enumerate(node.results) if i not in shared]
            args = [a.buffer for a in command.args if a.buffer]
            for operand, name in zip(node.operands, args, strict=False):
                known = values.get(operand.name)
                scratch = shadow.buffers[name].space == "arena"
                if scratch and known and not shadow.holds(name, call, known):
                    wrong.append((number, command.label, operand.name))
                assert known or not scratch or operand.name in carries
            for name in args[len(node.operands) + len(fresh) :]:
                shadow.write(name, call, (number, "workspace", command.label))
            for i, result in enumerate(node.results):
                name = args[shared[i]] if i in shared else args[len(node.operands)]
                args = (
                    args
                    if i in shared
                    else args[: len(node.operands)] + args[len(node.operands) + 1 :]
                )
                values[result.name] = (number, result.name)
                shadow.write(name, call, values[result.name])
        for name, value in graph.outputs:
            carried[name] = values[value.name]
            if name in shadow.buffers and not shadow.holds(name, call, carried[name]):
                wrong.append((number, "return", name))
    return wrong


@pytest.mark.parametrize("name", ["decode.b1", "prefill.t64", "score.t64"])
def test_every_operand_holds_its_value_when_it_is_read(name):
    assert shadow_run(*build(module(), name)) == []


def test_the_shadow_memory_sees_a_carry_that_is_overwritten():
    selected, plan = build(module(), "decode.b1")
    bank = next(b for b in plan.buffers if b.id == "bank")
    moved = tuple(
        replace(b, offset=bank.offset) if b.id == "kda_moe.z" else b for b in plan.buffers
    )
    assert shadow_run(selected, replace(plan, buffers=moved))


def test_in_place_results_share_their_operand_and_are_no_argument():
    _, plan = build(module(), "decode.b2")
    site = plan.commands["kda_moe"][0]
    buffers = [a.buffer for a in site.args if a.buffer]
    operands = ["prefix", "pending", "bank"]
    operands += [f"kda_moe.{n}" for n in ("a_res", "a_proj", "a_norm")]
    assert buffers == [*operands, "kda_moe.y1"]
    assert set(site.writes) == {"prefix", "bank", "kda_moe.y1"}


def test_scalars_follow_the_buffers_as_numbers_or_layer_attributes():
    _, plan = build(module(), "prefill.t16")
    site = plan.commands["mla_moe"][0]
    scalars = [a for a in site.args if not a.buffer]
    assert scalars[0].value == 16
    assert [a.layer_attr for a in scalars[1:]] == ["commit_row", "attn_restart", "attn_rows"]


def test_workspace_is_planned_in_the_arena_after_the_results():
    _, plan = build(module(), "prefill.t16")
    command = next(c for c in plan.commands["mla_moe"] if "grouped_gemm -> %g1" in c.label)
    buffers = [a.buffer for a in command.args if a.buffer]
    assert buffers[-2:] == ["mla_moe.g1", "mla_moe.g1.workspace"]
    workspace = next(b for b in plan.buffers if b.id == buffers[-1])
    assert (workspace.space, workspace.nbytes) == ("arena", 16 * 260)
    assert workspace.last == workspace.first + 1


def test_outputs_land_in_carries_and_io_without_a_copy():
    _, plan = build(module(), "decode.b2")
    assert "pending" in plan.commands["kda_moe"][-1].writes
    assert {"tokens", "logits"} <= {n for c in plan.commands["head"] for n in c.writes}


def test_state_has_one_range_per_layer_in_schedule_order():
    _, plan = build(module(), "decode.b2")
    bases = {c.layer: c.bases for c in plan.calls if c.layer >= 0}
    kda = 5 * 3 * 288 * 2 + 5 * 2 * 48 * 48 * 4
    assert [bases[i]["state_slots"] for i in (0, 1, 3)] == [0, kda, 2 * kda]
    assert [bases[i]["kv_pages"] for i in (2, 4)] == [0, 9 * 16 * 48 * 2]
    assert "kv_pages" not in bases[1]


def test_estimates_sum_over_all_calls():
    selected, plan = build(module(), "decode.b2")
    nodes = sum(len(selected.module.graph(c.graph).nodes) for c in plan.calls)
    assert plan.estimates["launches"] == plan.estimates["flops"] == nodes


HEADER = "k3ir 1\nlevel kernel\ndim T in [1, 64]\n\n"
ADD = [FakeTemplate(op, f"{op}_x") for op in ("add", "situ", "sigmoid_mul")]


def toy(body, carries="carry %a: bf16[T, 96], carry %b: bf16[T, 96]", layers=2):
    calls = "\n".join(f"  step {i} {{}}" for i in range(layers))
    results = ", ".join(["bf16[T, 96]"] * body.split("return")[1].count("="))
    text = f"graph @step({carries}) -> {results} {{\n{body}\n}}\n\nschedule {{\n{calls}\n}}\n"
    return build(parse(HEADER + text), "decode.b2", catalogue(*ADD))


def test_a_result_that_would_overwrite_a_carry_too_early_is_copied_at_the_end():
    body = "  %x = add(%a, %b) : bf16[T, 96]\n  %y = add(%x, %a) : bf16[T, 96]\n"
    _, plan = toy(body + "  return a=%x, b=%y")
    copies = [(c.reads, c.writes) for c in plan.commands["step"] if c.kind == "copy"]
    assert copies == [(("step.x",), ("a",))]
    assert check(plan) == []


def test_carries_that_change_places_go_through_scratch():
    _, plan = toy("  %x = add(%a, %b) : bf16[T, 96]\n  return a=%b, b=%a")
    copies = [(c.reads[0], c.writes[0]) for c in plan.commands["step"] if c.kind == "copy"]
    memory = {"a": "old a", "b": "old b"}
    for source, to in copies:
        memory[to] = memory[source]
    assert (memory["a"], memory["b"]) == ("old b", "old a")


def test_one_value_returned_twice_reaches_both_carries():
    body = "  %x = add(%a, %b) : bf16[T, 96]\n  %y = add(%x, %x) : bf16[T, 96]\n"
    _, plan = toy(body + "  return a=%y, b=%y")
    commands = plan.commands["step"]
    assert commands[1].writes == ("a",)
    assert [(c.reads, c.writes) for c in commands[2:]] == [(("a",), ("b",))]


def test_a_carry_returned_as_it_came_needs_no_command():
    text = "graph @step(carry %a: bf16[T, 96], carry %b: bf16[T, 96]) -> bf16[T, 96], bf16[T, 96]"
    text += " {\n  %x = add(%a, %b) : bf16[T, 96]\n  return a=%x, b=%b\n}\n\nschedule {\n}\n"
    source = parse(HEADER + text)
    found = assign(source.graphs[0], Boundary.of(source, {}))
    assert found.copies == (("a", "step.x"),)
    assert found.owner == {"a": "a", "b": "b", "x": "step.x"}


def test_an_unbound_dimension_is_named():
    short = replace(bucket("decode.b2"), dims={"T": 2, "B": 2, "S": 5, "M": 4})
    with pytest.raises(PassError, match=r"dimension P is not bound.*kv_cache.*mla_moe"):
        select_kernels.run(module(), short, catalogue(), TARGET)


def test_reading_a_value_after_it_was_overwritten_is_refused():
    text = TEXT.replace("linear(%o, %w_o)", "linear(%prefix, %w_o)")
    with pytest.raises(PassError, match=r"%prefix after %p1 has overwritten it"):
        build(parse(text), "decode.b2")


def test_a_carry_that_is_overwritten_and_not_returned_is_refused():
    text = TEXT.replace("return prefix=%p2, pending=%out", "return pending=%out")
    text = text.replace(") -> bf16[T, 96], bf16[T, 96], bf16[2", ") -> bf16[T, 96], bf16[2")
    with pytest.raises(PassError, match="carry %prefix was overwritten"):
        build(parse(text), "decode.b2")
