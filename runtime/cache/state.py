"""State: the two memories of requests behind one interface.

A request owns one state slot (the KDA state and the convolution rows of every KDA layer) and a list
of pages (the latent rows of every MLA layer). Both live in planned memory; this module only decides
which slot and pages are whose, what of other requests can be used again, and copies it.

A prefix is used again up to a position where both are there: every page before it, and a snapshot
of the slot exactly at it. What cannot be had whole is computed.

Source: Kimi K3 serving spec §4.3 (lookup), §4.4 (copy on write), §4.6 (eviction).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3c.artifact import CacheInfo, Plan, Space
from k3c.errors import CapacityError
from k3c.runtime.cache.pages import PagePool
from k3c.runtime.cache.slots import SlotPool
from k3c.runtime.driver.driver import Memory


@dataclass(frozen=True)
class StateRange:
    """One state tensor of one layer: slot or page `i` is at `offset + i * nbytes` of its space."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class Match:
    """What is there of a request's tokens.

    Attributes:
        tokens: Tokens whose state can be used again, whole units.
        junction: Tokens whose pages are there: where the snapshot of `tokens` falls short.
    """

    tokens: int = 0
    junction: int = 0


@dataclass(frozen=True)
class Usage:
    """How full the state is: what requests own, what is only kept, what there is."""

    pages_used: int
    pages_kept: int
    pages_total: int
    slots_used: int
    snapshots: int
    slots_total: int


def state_ranges(plan: Plan, space: Space, count: int) -> tuple[StateRange, ...]:
    """Return where each state tensor of each layer lies in a space.

    Args:
        plan: Any plan of the artifact: all agree on the state.
        space: `state_slots` or `kv_pages`.
        count: Slots or pages in the planned memory, number 0 included.
    """
    found: set[tuple[int, int]] = set()
    for call in plan.calls:
        for buffer in plan.buffers:
            if buffer.space != space or buffer.graph not in ("", call.graph):
                continue
            assert buffer.nbytes % count == 0, f"{buffer.id}: {buffer.nbytes} B in {count} parts"
            base = call.bases.get(space, 0) if buffer.per_layer else 0
            found.add((base + buffer.offset, buffer.nbytes // count))
    return tuple(StateRange(offset, nbytes) for offset, nbytes in sorted(found))


class _Tensors:
    """The state tensors of a space: copies one slot or page onto another."""

    def __init__(self, ranges: Sequence[StateRange], memory: Memory) -> None:
        self._ranges, self._memory = ranges, memory

    def copy(self, to: int, source: int) -> None:
        """Copy in all layers, after everything that was launched before."""
        for part in self._ranges:
            place, other = (part.offset + i * part.nbytes for i in (to, source))
            self._memory.copy(place, other, part.nbytes)


class State:
    """Who owns which slot and which pages. Requests are named by their id.

    Attributes:
        changes: Counts up whenever pages are added to a request.
    """

    def __init__(
        self, cache: CacheInfo, plan: Plan, memory: Mapping[str, Memory], unit_tokens: int
    ) -> None:
        """Own nothing yet.

        Args:
            cache: Sizes from the manifest.
            plan: Any plan of the artifact.
            memory: The spaces; kv_pages and state_slots are written by copies within them.
            unit_tokens: Tokens of a match unit; they divide a page's.
        """
        assert cache.page_tokens % unit_tokens == 0, f"{unit_tokens} in {cache.page_tokens} tokens"
        self._pages = PagePool(cache.pages, cache.page_tokens)
        self._slots = SlotPool(cache.slots)
        self._unit_tokens = unit_tokens
        self._units_in_page = cache.page_tokens // unit_tokens
        self._page_rows = _Tensors(state_ranges(plan, "kv_pages", cache.pages), memory["kv_pages"])
        self._slot_rows = _Tensors(
            state_ranges(plan, "state_slots", cache.slots), memory["state_slots"]
        )
        self._slot_of: dict[int, int] = {}
        self._pages_of: dict[int, list[int]] = {}
        self._published: dict[int, int] = {}  # units of a request that can be found
        self.changes = 0
        # Row `slot` is the page table of the slot's owner; made once: a step allocates nothing.
        columns = self._pages.pages_for(cache.max_context_tokens)
        self._table = np.zeros((cache.slots, columns), np.int32)

    @property
    def usage(self) -> Usage:
        """How full it is."""
        pages, slots = self._pages, self._slots
        return Usage(
            pages.total - pages.free_pages,
            pages.kept_pages,
            pages.total,
            slots.total - slots.free_slots,
            slots.snapshots,
            slots.total,
        )

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self._pages.page_tokens

    @property
    def free_pages(self) -> int:
        """Pages that no request owns."""
        return self._pages.free_pages

    @property
    def free_slots(self) -> int:
        """Slots that no request owns."""
        return self._slots.free_slots

    def match(self, hashes: Sequence[bytes], limit: int) -> Match:
        """Return what is there of a request; changes nothing.

        Args:
            hashes: Of its units.
            limit: Tokens to use again at most: one at least must go through the model.
        """
        whole = units = self._units_there(hashes, limit)
        while units and self._slots.find(hashes[units - 1]) is None:
            units -= 1
        return Match(units * self._unit_tokens, whole * self._unit_tokens)

    def fits(self, tokens: int, match: Match | None = None, hashes: Sequence[bytes] = ()) -> bool:
        """Return whether `alloc` would succeed now; changes nothing."""
        shared = self._shared_pages(match, hashes)
        whole = (match.tokens if match else 0) // self._pages.page_tokens
        needed = self._pages.pages_for(tokens) - whole + self._pages.unused(shared)
        return self.free_slots > 0 and needed <= self.free_pages

    def alloc(
        self,
        request_id: int,
        tokens: int,
        match: Match | None = None,
        hashes: Sequence[bytes] = (),
    ) -> None:
        """Give a request a slot and pages for `tokens` tokens, with a prefix that is there.

        Whole pages of the prefix are shared; a page that it ends in is copied, since the request
        goes on writing it; the snapshot is copied into the request's slot.

        Args:
            request_id: The request.
            tokens: Tokens to have pages for.
            match: What `match` found, just now.
            hashes: Those that it was found by.

        Raises:
            CapacityError: No slot or too few pages are free; nothing has changed then.
        """
        assert request_id not in self._slot_of, f"request {request_id} has a slot already"
        if not self.fits(tokens, match, hashes):
            what = f"{self._pages.pages_for(tokens)} pages and a slot asked for, {self.free_pages}"
            free = f"{what} pages and {self.free_slots} slots are free"
            raise CapacityError(free, hint="wait for a request to finish")
        shared, units = self._shared_pages(match, hashes), 0
        self._pages.share(shared)
        snapshot = None
        if match and match.tokens:
            units = match.tokens // self._unit_tokens
            self._slots.used(hashes[units - 1])
            snapshot = self._slots.find(hashes[units - 1])
        slot = self._slots.alloc()
        if snapshot is not None and slot != snapshot:
            self._slot_rows.copy(slot, snapshot)
        self._slot_of[request_id], self._published[request_id] = slot, units
        self._pages_of[request_id] = self._own_pages(shared, match)
        self._table[slot, : len(self._pages_of[request_id])] = self._pages_of[request_id]
        self.extend(request_id, tokens)

    def extend(self, request_id: int, tokens: int) -> None:
        """Give a request more pages until they hold `tokens` tokens; its slot stays.

        Raises:
            CapacityError: Too few pages are free; nothing has changed then.
        """
        owned, slot = self._pages_of[request_id], self._slot_of[request_id]
        more = self._pages.pages_for(tokens) - len(owned)
        assert len(owned) + more <= self._table.shape[1], f"{tokens} tokens exceed the page table"
        if more > 0:
            new = self._pages.alloc(more)
            self.changes += 1
            self._table[slot, len(owned) : len(owned) + more] = new
            owned.extend(new)

    def has_pages(self, request_id: int, tokens: int, spare: int) -> bool:
        """Return whether `extend` would succeed now and leave some pages; changes nothing."""
        more = self._pages.pages_for(tokens) - len(self._pages_of[request_id])
        return more + spare <= self.free_pages

    def free(self, request_id: int) -> None:
        """Take slot and pages from a request; what was published of it can still be found."""
        slot = self._slot_of.pop(request_id)
        self._table[slot] = 0
        self._slots.free(slot)
        self._pages.free(self._pages_of.pop(request_id))
        del self._published[request_id]

    def publish(self, request_id: int, hashes: Sequence[bytes], context_tokens: int) -> None:
        """Let others find the units of a request that have been written.

        Args:
            request_id: The request.
            hashes: Of its units.
            context_tokens: Tokens whose rows its pages hold.
        """
        owned = self._pages_of[request_id]
        done = min(context_tokens // self._unit_tokens, len(hashes))
        for unit in range(self._published[request_id], done):
            self._pages.publish(owned[unit // self._units_in_page], hashes[unit])
        self._published[request_id] = max(done, self._published[request_id])

    def snapshot(self, request_id: int, unit_hash: bytes) -> bool:
        """Keep a copy of a request's slot, to be found by the hash of the tokens it has seen.

        Returns:
            Whether one is kept now: not where requests own every slot.
        """
        if self._slots.find(unit_hash) is not None:
            self._slots.used(unit_hash)
            return True
        slot = self._slots.room_for_snapshot()
        if slot is None:
            return False
        self._slot_rows.copy(slot, self._slot_of[request_id])
        # Published once it is written, never before.
        self._slots.publish(slot, unit_hash)
        return True

    def forget(self) -> None:
        """Drop everything that is only kept; running requests stay as they are."""
        self._pages.forget()
        self._slots.forget()

    def owns(self, request_id: int) -> bool:
        """Return whether a request has a slot and pages; changes nothing."""
        return request_id in self._slot_of

    def slot(self, request_id: int) -> int:
        """Return the slot of a request; changes nothing."""
        return self._slot_of[request_id]

    def page_row(self, request_id: int) -> npt.NDArray[np.int32]:
        """Return i32[M], the pages of a request in order, then zeros; a view, not to be written."""
        return self._table[self._slot_of[request_id]]

    def room(self, request_id: int) -> int:
        """Return how many tokens a request's pages hold; changes nothing."""
        return len(self._pages_of[request_id]) * self._pages.page_tokens

    def _units_there(self, hashes: Sequence[bytes], limit: int) -> int:
        """Return how many units from the start some pages hold, whole pages and a part of one.

        The page of a unit holds the units before it in that page too.
        """
        most, units = min(limit // self._unit_tokens, len(hashes)), 0
        while units < most:
            end, _ = self._page_from(hashes, units)
            if end < units + self._units_in_page:
                return min(end, most)
            units = end
        return min(units, most)

    def _page_from(self, hashes: Sequence[bytes], first: int) -> tuple[int, int]:
        """Return up to which unit a page holds those from `first`, a page's first, and the page.

        It is found by the last of them: the page of a unit holds the units before it too.
        """
        for end in range(min(first + self._units_in_page, len(hashes)), first, -1):
            page = self._pages.find(hashes[end - 1])
            if page is not None:
                return end, page
        return first, 0

    def _shared_pages(self, match: Match | None, hashes: Sequence[bytes]) -> list[int]:
        """Return the pages of a match in order; the last one may be used in part."""
        units = match.tokens // self._unit_tokens if match else 0
        starts = range(0, units, self._units_in_page)
        return [self._page_from(hashes, first)[1] for first in starts]

    def _own_pages(self, shared: list[int], match: Match | None) -> list[int]:
        """Replace a page that the prefix ends in by a copy of its own."""
        if not match or match.tokens % self._pages.page_tokens == 0:
            return shared
        source = shared[-1]
        (own,) = self._pages.alloc(1)
        self._page_rows.copy(own, source)
        self._pages.free([source])
        return [*shared[:-1], own]
