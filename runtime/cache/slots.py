"""State slots of the KDA layers. Slot 0 is scratch: padded rows may touch it, nobody owns it.

A slot holds the state of a running request, or a snapshot: the state after exactly the tokens of a
hash. Snapshots give way to requests, the one that was used longest ago first.
"""

from __future__ import annotations

from collections import OrderedDict

from k3c.errors import CapacityError
from k3c.runtime.cache.free_list import FreeList


class SlotPool:
    """Gives out state slots, and remembers which of the others hold snapshots."""

    def __init__(self, slots: int) -> None:
        """Start with every slot but slot 0 free; `slots` counts slot 0."""
        self._empty = FreeList(slots)
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # oldest use first

    @property
    def total(self) -> int:
        """Slots that can be given out."""
        return self._empty.total

    @property
    def free_slots(self) -> int:
        """Slots that no request owns, those of snapshots too."""
        return len(self._empty) + len(self._snapshots)

    @property
    def snapshots(self) -> int:
        """Slots that hold a snapshot."""
        return len(self._snapshots)

    def alloc(self) -> int:
        """Take one slot for a request.

        Raises:
            CapacityError: Requests own all slots.
        """
        if not self.free_slots:
            raise CapacityError(
                f"all {self.total} state slots are in use", hint="wait for a request to finish"
            )
        return self._take()

    def free(self, slot: int) -> None:
        """Make `slot` free; a request that starts with context 0 never reads what is left in it."""
        self._empty.give(slot)

    def room_for_snapshot(self) -> int | None:
        """Take a slot that the caller writes and then publishes; None where requests own all."""
        return self._take() if self.free_slots else None

    def publish(self, slot: int, unit_hash: bytes) -> None:
        """Let a slot that has been written be found by the hash of the tokens before it."""
        assert unit_hash not in self._snapshots, "a snapshot is kept twice"
        self._snapshots[unit_hash] = slot

    def find(self, unit_hash: bytes) -> int | None:
        """Return the slot of a snapshot, None where there is none; changes nothing."""
        return self._snapshots.get(unit_hash)

    def used(self, unit_hash: bytes) -> None:
        """Note that a snapshot was of use just now."""
        self._snapshots.move_to_end(unit_hash)

    def forget(self) -> None:
        """Drop all snapshots."""
        for slot in self._snapshots.values():
            self._empty.give(slot)
        self._snapshots.clear()

    def _take(self) -> int:
        if not len(self._empty):
            _, slot = self._snapshots.popitem(last=False)
            self._empty.give(slot)
        return self._empty.take()
