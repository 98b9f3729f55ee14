"""State slots of the KDA layers. Slot 0 is scratch: padded rows may touch it, nobody owns it."""

from __future__ import annotations

from k3c.errors import CapacityError
from k3c.runtime.cache.free_list import FreeList


class SlotAllocator:
    """Gives out state slots, the lowest free number first."""

    def __init__(self, slots: int) -> None:
        """Start with every slot but slot 0 free; `slots` counts slot 0."""
        self._free = FreeList(slots)

    @property
    def free_slots(self) -> int:
        """Slots that no request owns."""
        return len(self._free)

    def alloc(self) -> int:
        """Take one slot.

        Raises:
            CapacityError: No slot is free.
        """
        if not self._free:
            raise CapacityError(
                f"all {self._free.total} state slots are in use",
                hint="wait for a request to finish",
            )
        return self._free.take()

    def free(self, slot: int) -> None:
        """Make `slot` free; a request that starts with context 0 never reads what is left in it."""
        self._free.give(slot)
