"""Slots and pages: who owns what, and what a snapshot keeps."""

import numpy as np
import pytest

from k3c.artifact import CacheInfo
from k3c.errors import CapacityError
from k3c.runtime.cache.free_list import FreeList
from k3c.runtime.cache.state import SlotRange, State, slot_ranges
from k3c.runtime.driver.cpu import CpuMemory
from tests.support.fake_plan import Sizes, make_buckets, make_plan

RANGES = (SlotRange(0, 8), SlotRange(128, 24))


def make_state(slots=4, pages=9, max_context_tokens=32):
    memory = np.arange(256, dtype=np.uint8)
    cache = CacheInfo(slots - 1, max_context_tokens, 4, pages, slots)
    return State(cache, RANGES, CpuMemory(memory, 0)), memory


def test_slot_and_page_zero_are_never_given_out():
    state, _ = make_state()
    for request in range(3):
        state.alloc(request, 8)
    assert sorted(state.slot(r) for r in range(3)) == [1, 2, 3]
    assert all(state.page_row(r)[:2].all() for r in range(3))
    assert state.free_slots == 0


def test_the_lowest_free_numbers_go_first_after_any_order_of_frees():
    state, _ = make_state()
    for request in range(3):
        state.alloc(request, 8)
    state.free(2)
    state.free(0)
    state.alloc(9, 12)
    assert state.slot(9) == 1
    assert state.page_row(9).tolist() == [1, 2, 5, 0, 0, 0, 0, 0]


def test_extend_keeps_the_slot_and_adds_pages_at_the_end():
    state, _ = make_state()
    state.alloc(0, 1)
    state.alloc(1, 1)
    state.extend(0, 9)
    assert state.slot(0) == 1
    assert state.page_row(0).tolist() == [1, 3, 4, 0, 0, 0, 0, 0]
    state.extend(0, 2)
    assert state.page_row(0).tolist() == [1, 3, 4, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("tokens", "slots"), [(33 - 1, 2), (1, 1)])
def test_what_does_not_fit_changes_nothing(tokens, slots):
    state, _ = make_state(slots=slots, pages=8)
    before = (state.free_pages, state.free_slots)
    assert not state.fits(tokens)
    with pytest.raises(CapacityError):
        state.alloc(0, tokens)
    assert (state.free_pages, state.free_slots) == before


def test_extending_past_the_free_pages_keeps_what_was_owned():
    state, _ = make_state(pages=5)
    state.alloc(0, 4)
    state.alloc(1, 8)
    with pytest.raises(CapacityError, match="2 pages asked for, 1 of 4 are free"):
        state.extend(0, 12)
    assert state.page_row(0).tolist() == [1, 0, 0, 0, 0, 0, 0, 0]


def test_freeing_clears_the_page_table_row():
    state, _ = make_state()
    state.alloc(0, 32)
    row = state.page_row(0)
    state.free(0)
    assert not row.any()
    assert state.free_pages == 8


def test_a_double_free_is_our_own_fault():
    numbers = FreeList(3)
    taken = numbers.take()
    numbers.give(taken)
    with pytest.raises(AssertionError, match="freed twice"):
        numbers.give(taken)
    with pytest.raises(AssertionError, match=r"not in 1\.\.2"):
        numbers.give(0)


def test_a_snapshot_returns_the_slot_and_the_page_list_and_touches_no_other_slot():
    state, memory = make_state()
    state.alloc(5, 4)
    state.alloc(6, 4)
    before = memory.copy()
    kept = state.snapshot(5, 3)
    assert (memory == before).all()
    memory[:] = 99
    state.extend(5, 12)
    assert state.restore(5, kept) == 3
    slot = state.slot(5)
    expected = np.full(256, 99, np.uint8)
    for part in RANGES:
        own = slice(part.offset + slot * part.nbytes, part.offset + (slot + 1) * part.nbytes)
        expected[own] = before[own]
    assert (memory == expected).all()
    assert state.page_row(5).tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert state.free_pages == 6


def test_a_snapshot_of_another_request_is_refused():
    state, _ = make_state()
    state.alloc(0, 4)
    state.alloc(1, 4)
    with pytest.raises(AssertionError, match="not a snapshot of request 1"):
        state.restore(1, state.snapshot(0, 4))


def test_every_state_tensor_of_every_layer_is_found_in_the_plan():
    sizes = Sizes()
    plan = make_plan(make_buckets(sizes)[0], sizes)
    assert slot_ranges(plan, sizes.max_requests + 1) == (SlotRange(0, 16), SlotRange(1024, 16))
