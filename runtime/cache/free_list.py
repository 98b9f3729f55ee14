"""A set of free numbers that gives out the lowest first, so that runs are reproducible."""

from __future__ import annotations

import heapq


class FreeList:
    """The numbers `1 .. count - 1`; 0 is scratch and is never given out."""

    def __init__(self, count: int) -> None:
        """Make all numbers but 0 free."""
        assert count >= 1, f"count is {count}, expected room for the scratch number 0"
        self._heap = list(range(1, count))
        self._free = set(self._heap)
        self.total = count - 1

    def __len__(self) -> int:
        return len(self._heap)

    def take(self) -> int:
        """Remove and return the lowest free number; the caller has checked that there is one."""
        number = heapq.heappop(self._heap)
        self._free.remove(number)
        return number

    def give(self, number: int) -> None:
        """Make a taken number free again."""
        assert 0 < number <= self.total, f"{number} is not in 1..{self.total}"
        assert number not in self._free, f"{number} is freed twice"
        self._free.add(number)
        heapq.heappush(self._heap, number)
