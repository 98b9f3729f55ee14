"""Slots and pages: who owns what, and what of others is found and used again."""

import numpy as np
import pytest

from k3c.artifact import CacheInfo
from k3c.errors import CapacityError
from k3c.runtime.cache.free_list import FreeList
from k3c.runtime.cache.hashing import HashChain
from k3c.runtime.cache.state import Match, State, StateRange, state_ranges
from k3c.runtime.driver.cpu import CpuMemory
from tests.support.fake_plan import PAGE_TOKENS, Sizes, make_buckets, make_plan

UNIT = 2


def make_state(slots=4, pages=9, max_context_tokens=32):
    sizes = Sizes(max_requests=slots - 1, pages=pages, max_context_tokens=max_context_tokens)
    plan = make_plan(make_buckets(sizes)[0], sizes)
    memory = {
        space: CpuMemory(np.arange(plan.space_bytes[space]).astype(np.uint8), 0)
        for space in ("kv_pages", "state_slots")
    }
    cache = CacheInfo(slots - 1, max_context_tokens, PAGE_TOKENS, pages, slots)
    return State(cache, plan, memory, UNIT), memory


def chain_of(*tokens):
    chain = HashChain(UNIT)
    chain.extend(np.array(tokens, np.int32))
    return chain.hashes


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


def test_every_state_tensor_of_every_layer_is_found_in_the_plan():
    sizes = Sizes()
    plan = make_plan(make_buckets(sizes)[0], sizes)
    slots = state_ranges(plan, "state_slots", sizes.slots)
    assert slots == (StateRange(0, 16), StateRange(1024, 16))
    assert state_ranges(plan, "kv_pages", sizes.pages) == (StateRange(0, 16),)


TOKENS = tuple(range(11))  # two pages and a half, five units and one token


def finished(state, tokens=TOKENS, snapshots=(10,), request=0):
    """Run a request to its end that leaves its pages, and snapshots at some positions."""
    hashes = chain_of(*tokens)
    state.alloc(request, len(tokens))
    for place in snapshots:
        assert state.snapshot(request, hashes[place // UNIT - 1])
    state.publish(request, hashes, len(tokens))
    state.free(request)
    return hashes


def test_a_prefix_is_used_up_to_a_snapshot_with_all_pages_before_it():
    state, _ = make_state()
    hashes = finished(state)
    assert state.match(hashes, 10) == Match(10, 10)
    assert state.match(hashes, 9) == Match(0, 8)
    assert state.match(chain_of(*TOKENS[:8], 50, 51), 9) == Match(0, 8)
    assert state.match(chain_of(50, *TOKENS[1:]), 10) == Match(0, 0)


@pytest.mark.parametrize("length", [7, 8, 9, 12, 13])
def test_whatever_the_length_all_but_the_last_unit_is_found_again(length):
    state, _ = make_state()
    tokens = tuple(range(length))
    last = (length - 1) // UNIT * UNIT
    hashes = finished(state, tokens, (last,))
    assert state.match(hashes, length - 1).tokens == last


def test_the_page_that_a_prefix_ends_in_is_copied_and_the_snapshot_too():
    state, memory = make_state()
    hashes = finished(state)
    before = {space: m.array.copy() for space, m in memory.items()}
    match = state.match(hashes, 10)
    state.alloc(1, 11, match, hashes)
    assert state.page_row(1)[:3].tolist() == [1, 2, 4]
    pages = before["kv_pages"].reshape(-1, PAGE_TOKENS * 4)
    after = memory["kv_pages"].array.reshape(-1, PAGE_TOKENS * 4)
    assert (after[4] == pages[3]).all()
    assert (np.delete(after, 4, 0) == np.delete(pages, 4, 0)).all()
    slot = state.slot(1)
    for part in (0, 1024):
        own = memory["state_slots"].array[part + slot * 16 : part + (slot + 1) * 16]
        kept = before["state_slots"][part + 2 * 16 : part + 3 * 16]
        assert (own == kept).all()


def test_a_whole_page_is_shared_while_both_read_it():
    state, _ = make_state()
    hashes = finished(state, tuple(range(9)), (8,))
    for request in (1, 2):
        state.alloc(request, 9, state.match(hashes, 8), hashes)
    assert state.page_row(1)[:2].tolist() == state.page_row(2)[:2].tolist() == [1, 2]
    assert state.page_row(1)[2] != state.page_row(2)[2]
    state.free(1)
    assert state.page_row(2)[:2].tolist() == [1, 2]
    assert state.usage.pages_used == 3


def test_beginnings_outlive_ends():
    state, _ = make_state(pages=5)
    hashes = finished(state, tuple(range(16)), (4, 16))
    state.alloc(1, 8)
    assert state.match(hashes, 15) == Match(4, 8)


def test_a_snapshot_gives_way_to_a_request_and_is_not_found_any_more():
    state, _ = make_state(slots=2)
    hashes = chain_of(*TOKENS)
    state.alloc(0, 11)
    assert not state.snapshot(0, hashes[4])
    state.free(0)
    state, _ = make_state(slots=3)
    finished(state)
    assert state.usage.snapshots == 1
    for request in (1, 2):
        state.alloc(request, 4)
    assert state.match(hashes, 10) == Match(0, 10)
    assert state.usage.snapshots == 0


def test_the_snapshot_used_longest_ago_goes_first():
    state, _ = make_state(slots=5, pages=20)
    chains = [finished(state, tuple(range(n, n + 5)), (4,), n) for n in (100, 200, 300)]
    state.alloc(1, 5, state.match(chains[0], 4), chains[0])
    state.alloc(2, 5)
    assert [state.match(c, 4).tokens for c in chains] == [4, 0, 4]


def test_the_only_snapshot_is_used_in_its_own_slot():
    hashes = chain_of(*TOKENS)
    state, memory = make_state(slots=3)
    finished(state)
    state.alloc(7, 4)
    before = memory["state_slots"].array.copy()
    state.alloc(1, 11, state.match(hashes, 10), hashes)
    assert (memory["state_slots"].array == before).all()
    assert state.usage.snapshots == 0


def test_forgetting_leaves_running_requests_alone():
    state, _ = make_state()
    hashes = finished(state)
    state.alloc(1, 11, state.match(hashes, 10), hashes)
    state.forget()
    assert state.match(hashes, 10) == Match(0, 0)
    assert state.page_row(1)[:3].tolist() == [1, 2, 4]
    state.free(1)
    assert (state.free_pages, state.free_slots) == (8, 3)
    assert state.usage.pages_kept == 0


def test_hashes_depend_on_all_tokens_before_and_on_the_salt():
    first = chain_of(1, 2, 3, 4)
    assert chain_of(1, 2, 3, 5)[0] == first[0]
    assert chain_of(9, 2, 3, 4)[1] != first[1]
    salted = HashChain(UNIT, b"other")
    salted.extend(np.array([1, 2], np.int32))
    assert salted.hashes[0] != first[0]
    slow = HashChain(UNIT)
    for count in (1, 2, 3, 4):
        slow.extend(np.arange(1, 5, dtype=np.int32)[slow.tokens : count])
    assert slow.hashes == first
