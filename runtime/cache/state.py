"""State: the two memories of a request behind one interface.

A request owns one state slot (the KDA state and the convolution rows of every KDA layer) and a list
of pages (the latent rows of every MLA layer). Both live in planned memory; this module only decides
which slot and pages are whose, and copies slots for snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3c.artifact import CacheInfo, Plan
from k3c.errors import CapacityError
from k3c.runtime.cache.pages import PageAllocator
from k3c.runtime.cache.slots import SlotAllocator
from k3c.runtime.driver.driver import Memory


@dataclass(frozen=True)
class SlotRange:
    """One state tensor of one layer in space state_slots: slot `s` is at `offset + s * nbytes`."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class Snapshot:
    """A kept state: what the slot held after `context_tokens` tokens, and the pages in use then."""

    context_tokens: int
    pages: tuple[int, ...]
    slot_bytes: bytes


def slot_ranges(plan: Plan, slots: int) -> tuple[SlotRange, ...]:
    """Return where each state tensor of each layer lies in space state_slots.

    Args:
        plan: Any plan of the artifact: all agree on the state.
        slots: Slots in the planned memory, slot 0 included.
    """
    found: set[tuple[int, int]] = set()
    for call in plan.calls:
        for buffer in plan.buffers:
            if buffer.space != "state_slots" or buffer.graph not in ("", call.graph):
                continue
            assert buffer.nbytes % slots == 0, f"{buffer.id}: {buffer.nbytes} B in {slots} slots"
            base = call.bases.get("state_slots", 0) if buffer.per_layer else 0
            found.add((base + buffer.offset, buffer.nbytes // slots))
    return tuple(SlotRange(offset, nbytes) for offset, nbytes in sorted(found))


class State:
    """Who owns which slot and which pages. Requests are named by their id."""

    def __init__(self, cache: CacheInfo, ranges: tuple[SlotRange, ...], memory: Memory) -> None:
        """Own nothing yet.

        Args:
            cache: Sizes from the manifest.
            ranges: The state tensors, from `slot_ranges`.
            memory: Space state_slots; only `restore` writes it.
        """
        self._pages = PageAllocator(cache.pages, cache.page_tokens)
        self._slots = SlotAllocator(cache.slots)
        self._ranges = ranges
        self._memory = memory
        self._slot_of: dict[int, int] = {}
        self._pages_of: dict[int, list[int]] = {}
        # Row `slot` is the page table of the slot's owner; made once: a step allocates nothing.
        columns = self._pages.pages_for(cache.max_context_tokens)
        self._table = np.zeros((cache.slots, columns), np.int32)

    @property
    def free_pages(self) -> int:
        """Pages that no request owns."""
        return self._pages.free_pages

    @property
    def free_slots(self) -> int:
        """Slots that no request owns."""
        return self._slots.free_slots

    def fits(self, tokens: int) -> bool:
        """Return whether `alloc` of `tokens` would succeed now; changes nothing."""
        return self.free_slots > 0 and self._pages.pages_for(tokens) <= self.free_pages

    def alloc(self, request_id: int, tokens: int) -> None:
        """Give a request a slot and pages for `tokens` tokens; does not touch their contents.

        Raises:
            CapacityError: No slot or too few pages are free; nothing has changed then.
        """
        assert request_id not in self._slot_of, f"request {request_id} has a slot already"
        slot = self._slots.alloc()
        self._slot_of[request_id], self._pages_of[request_id] = slot, []
        try:
            self.extend(request_id, tokens)
        except CapacityError:
            self.free(request_id)
            raise

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
            self._table[slot, len(owned) : len(owned) + more] = new
            owned.extend(new)

    def free(self, request_id: int) -> None:
        """Take slot and pages from a request; its snapshots are void from here on."""
        slot = self._slot_of.pop(request_id)
        self._table[slot] = 0
        self._slots.free(slot)
        self._pages.free(self._pages_of.pop(request_id))

    def slot(self, request_id: int) -> int:
        """Return the slot of a request; changes nothing."""
        return self._slot_of[request_id]

    def page_row(self, request_id: int) -> npt.NDArray[np.int32]:
        """Return i32[M], the pages of a request in order, then zeros; a view, not to be written."""
        return self._table[self._slot_of[request_id]]

    def room(self, request_id: int) -> int:
        """Return how many tokens a request's pages hold; changes nothing."""
        return len(self._pages_of[request_id]) * self._pages.page_tokens

    def snapshot(self, request_id: int, context_tokens: int) -> Snapshot:
        """Copy a request's slot and page list; changes nothing.

        Args:
            request_id: The request.
            context_tokens: Tokens that its state holds now; `restore` returns to this count.
        """
        slot = self._slot_of[request_id]
        parts = [self._memory.read(r.offset + slot * r.nbytes, r.nbytes) for r in self._ranges]
        return Snapshot(context_tokens, tuple(self._pages_of[request_id]), b"".join(parts))

    def restore(self, request_id: int, snapshot: Snapshot) -> int:
        """Return a request to a snapshot of its own: writes its slot, frees the pages added since.

        Rows of the kept pages past the snapshot's tokens are stale: they are written again before
        they are read, because the cache only grows by appending.

        Returns:
            The number of tokens that the state holds now.
        """
        slot, owned = self._slot_of[request_id], self._pages_of[request_id]
        kept = len(snapshot.pages)
        assert tuple(owned[:kept]) == snapshot.pages, f"not a snapshot of request {request_id}"
        start = 0
        for part in self._ranges:
            data = snapshot.slot_bytes[start : start + part.nbytes]
            self._memory.write(part.offset + slot * part.nbytes, data)
            start += part.nbytes
        self._pages.free(owned[kept:])
        self._table[slot, kept:] = 0
        del owned[kept:]
        return snapshot.context_tokens
