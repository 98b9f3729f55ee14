"""The checker accepts good plans and finds every kind of corruption, by its rule."""

from dataclasses import replace

import pytest

from k3c.artifact import Arg, Bucket, Buffer, Command, IoField, LayerCall, Plan, from_json, to_json
from k3c.errors import PlanError
from k3c.plan_check import check, check_together, lower_bound_bytes, require
from tests.support.plan_modules import plans


@pytest.fixture(scope="module")
def good():
    return plans("decode.b2", "prefill.t16", "score.t64")


def rules(plan):
    return {finding.rule for finding in check(plan)}


def with_buffer(plan, name, **changes):
    assert any(b.id == name for b in plan.buffers)
    buffers = tuple(replace(b, **changes) if b.id == name else b for b in plan.buffers)
    return replace(plan, buffers=buffers)


def with_command(plan, graph, index, **changes):
    commands = list(plan.commands[graph])
    commands[index] = replace(commands[index], **changes)
    return replace(plan, commands={**plan.commands, graph: tuple(commands)})


def with_call(plan, index, **changes):
    calls = list(plan.calls)
    calls[index] = replace(calls[index], **changes)
    return replace(plan, calls=tuple(calls))


def buffer(plan, name):
    return next(b for b in plan.buffers if b.id == name)


def test_good_plans_have_no_findings(good):
    assert [check(plan) for plan in good] == [[], [], []]
    assert check_together(good) == []
    for plan in good:
        require(plan)


def test_a_plan_survives_json(good):
    assert from_json(Plan, to_json(good[0]), "x") == good[0]


BUFFER_MUTATIONS = [
    ("kda_moe.g1", {"offset": 0}, "overlap"),
    ("pending", {"offset": 0, "nbytes": 1 << 20}, "bounds"),
    ("kda_moe.y2", {"offset": 1}, "alignment"),
    ("kda_moe.y2", {"align": 48}, "alignment"),
    ("kda_moe.y2", {"align": 128}, "alignment"),
    ("kda_moe.y2", {"nbytes": -1}, "size"),
    ("kda_moe.y2", {"offset": -64}, "size"),
    ("kda_moe.y2", {"offset": 1 << 30}, "bounds"),
    ("kda_moe.y2", {"space": "comm"}, "known-space"),
    ("kda_moe.y2", {"graph": "gone"}, "known-graph"),
    ("kda_moe.y2", {"graph": "mla_moe"}, "known-buffer"),
    ("kda_moe.y2", {"id": "kda_moe.y1"}, "unique-id"),
    ("kda_moe.y2", {"first": 9}, "lifetime"),
    ("kda_moe.y2", {"last": 1}, "lifetime"),
    ("kda_moe.y2", {"last": 99}, "lifetime"),
    ("kda_moe.y2", {"per_layer": True}, "per-layer"),
    ("kda_moe.w_in", {"offset": 64}, "overlap"),
    ("kda_moe.kda_state", {"offset": 0}, "overlap"),
    ("kda_moe.kda_state", {"per_layer": False}, "overlap"),
    ("mla_moe.kv_cache", {"nbytes": 1 << 20}, "overlap"),
    ("logits", {"offset": 0}, "overlap"),
    ("logits", {"nbytes": 64}, "io"),
]


@pytest.mark.parametrize(("name", "changes", "rule"), BUFFER_MUTATIONS)
def test_a_corrupted_buffer_is_found(good, name, changes, rule):
    assert rule in rules(with_buffer(good[0], name, **changes))


def test_two_scratch_buffers_that_are_live_together_may_not_share_a_byte(good):
    plan = good[0]
    y2, logits = buffer(plan, "kda_moe.y2"), buffer(plan, "kda_moe.logits")
    assert y2.first < logits.last
    assert logits.first < y2.last
    assert rules(with_buffer(plan, logits.id, offset=y2.offset)) == {"overlap"}


def test_scratch_may_not_share_a_byte_with_a_carry(good):
    bank = buffer(good[0], "bank")
    assert "overlap" in rules(with_buffer(good[0], "kda_moe.y1", offset=bank.offset))


def test_layers_may_not_share_state_or_overlap_in_part(good):
    plan = good[0]
    third = next(i for i, c in enumerate(plan.calls) if c.layer == 3)
    first = next(c for c in plan.calls if c.layer == 1)
    assert rules(with_call(plan, third, bases=first.bases)) == {"overlap"}
    bases = {**plan.calls[third].bases, "weights": first.bases["weights"] + 64}
    assert rules(with_call(plan, third, bases=bases)) == {"overlap"}


def test_corrupted_calls_are_found(good):
    plan = good[0]
    assert rules(with_call(plan, 2, bases={})) == {"base"}
    bad = {**plan.calls[2].bases, "weights": 1}
    assert "base" in rules(with_call(plan, 2, bases=bad))
    assert "bounds" in rules(with_call(plan, 2, bases=dict.fromkeys(bad, 1 << 40)))
    assert "layer-attribute" in rules(with_call(plan, 2, attrs={}))
    assert "known-graph" in rules(with_call(plan, 2, graph="gone"))
    assert rules(replace(plan, calls=plan.calls[:-1])) >= {"called"}


def test_corrupted_commands_are_found(good):
    plan = good[0]
    first = plan.commands["kda_moe"][0]
    assert rules(with_command(plan, "kda_moe", 0, reads=("gone",))) == {"known-buffer"}
    assert rules(with_command(plan, "kda_moe", 0, args=(Arg(buffer="gone"),))) == {"known-buffer"}
    assert "argument" in rules(with_command(plan, "kda_moe", 0, args=first.args[1:]))
    both = Arg(buffer="prefix", value=3)
    assert rules(with_command(plan, "kda_moe", 0, args=(both, *first.args[1:]))) == {"argument"}
    writes = (*first.writes, "kda_moe.a_res")
    assert rules(with_command(plan, "kda_moe", 0, writes=writes)) == {"read-only"}
    assert "copy" in rules(with_command(plan, "kda_moe", 0, kind="copy"))


def test_reading_scratch_before_it_is_written_is_found(good):
    plan = good[0]
    backwards = plan.commands["kda_moe"][::-1]
    swapped = tuple(replace(c, after=(i - 1,) if i else ()) for i, c in enumerate(backwards))
    assert "initialised" in rules(replace(plan, commands={**plan.commands, "kda_moe": swapped}))


def test_a_carry_that_nothing_writes_is_found():
    carry = Buffer("x", 64, 64, "arena", "", 0, 1, 0)
    out = Buffer("y", 4, 64, "io", "", 0, 1, 0)
    command = Command("launch", "k", (Arg(buffer="x"), Arg(buffer="y")), ("x",), ("y",), "op")
    plan = Plan(
        Bucket("decode.b1", "decode", {}),
        0,
        {"arena": 64, "io": 4},
        64,
        (carry, out),
        {"g": (command,)},
        (LayerCall("g", 0, {}, {}),),
        (IoField("y", "out", "f32", (1,), "y"),),
        "entry",
        {},
    )
    assert rules(plan) == {"initialised"}


def test_sizes_and_the_lower_bound_are_derived_again(good):
    plan = good[0]
    assert lower_bound_bytes(plan) == plan.arena_lower_bound_bytes
    assert rules(replace(plan, arena_lower_bound_bytes=64)) == {"lower-bound"}
    small = {**plan.space_bytes, "arena": plan.arena_lower_bound_bytes - 64}
    assert "lower-bound" in rules(replace(plan, space_bytes=small))
    assert "known-space" in rules(replace(plan, space_bytes={**plan.space_bytes, "x": 1}))


def test_corrupted_io_is_found(good):
    plan, fields = good[0], list(good[0].io)
    assert rules(replace(plan, io=(*fields, fields[0]))) == {"io"}
    flipped = "in" if fields[0].direction == "out" else "out"
    assert rules(replace(plan, io=(replace(fields[0], direction=flipped), *fields[1:]))) == {"io"}
    assert rules(replace(plan, io=(replace(fields[0], buffer="gone"), *fields[1:]))) == {"io"}
    wide = replace(fields[0], shape=(*fields[0].shape, 2))
    assert rules(replace(plan, io=(wide, *fields[1:]))) == {"io"}


def test_plans_of_one_artifact_must_agree_on_the_state(good):
    moved = with_buffer(good[1], "kda_moe.conv_state", offset=92160)
    assert {f.rule for f in check_together([good[0], moved])} == {"shared-state"}
    larger = replace(good[1], space_bytes={**good[1].space_bytes, "kv_pages": 1 << 20})
    assert {f.rule for f in check_together([good[0], larger])} == {"shared-space"}


def test_require_names_the_bucket_and_how_many_findings(good):
    bad = with_buffer(good[0], "kda_moe.y2", offset=1 << 30)
    with pytest.raises(PlanError, match=r"bounds: kda_moe.y2 ends at byte.*plan decode.b2"):
        require(bad)
