"""The memory report accounts for every byte exactly once."""

import pytest

from k3c.memory_report import memory_report, totals
from k3c.passes import build_plan, schedule, select_kernels
from k3c.passes.weight_table import weight_table
from tests.support.plan_modules import (
    TARGET,
    bucket,
    catalogue,
    kernel_symbol,
    module,
    packed_bytes,
)


def report_of(name):
    selected = select_kernels.run(module(), bucket(name), catalogue(), TARGET)
    weights = weight_table([selected], packed_bytes)
    plan = build_plan.run(schedule.run(selected), weights, kernel_symbol)
    return plan, weights, memory_report(plan, weights.entries)


@pytest.mark.parametrize("name", ["decode.b1", "prefill.t16", "score.t64"])
def test_segments_cover_each_space_without_overlap(name):
    plan, _, segments = report_of(name)
    for space, size in plan.space_bytes.items():
        end = 0
        for segment in (s for s in segments if s.space == space):
            assert segment.offset == end
            assert segment.nbytes > 0
            end += segment.nbytes
        assert end == size
        assert sum(totals(segments)[space].values()) == size


def test_padding_of_layouts_is_listed_as_padding():
    _, weights, segments = report_of("decode.b1")
    of_layouts = sum(entry.padding_bytes for entry in weights.entries)
    assert of_layouts > 0
    owned = [s for s in segments if s.space == "weights" and s.kind == "padding" and s.owners]
    assert sum(s.nbytes for s in owned) == of_layouts


def test_every_layer_appears_with_its_own_bytes():
    _, _, segments = report_of("decode.b1")
    owners = [owner for s in segments for owner in s.owners]
    for name in ("kda_moe.w_in@1", "kda_moe.w_in@3", "kda_moe.kda_state@3", "mla_moe.kv_cache@4"):
        assert name in owners
    state = totals(segments)["state_slots"]
    assert state["used"] == 3 * 5 * (3 * 288 * 2 + 2 * 48 * 48 * 4)
