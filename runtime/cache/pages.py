"""Pages of the MLA cache. Page 0 is scratch: padded rows may touch it, no request owns it.

A page that no request uses any more keeps its contents, and the hashes by which they are found,
until it is needed: those that were given back first go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from k3c.errors import CapacityError
from k3c.runtime.cache.free_list import FreeList


class PagePool:
    """Gives out pages of `page_tokens` tokens; several requests may read the same one."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        """Start with every page but page 0 free.

        Args:
            pages: Pages in the planned memory, page 0 included.
            page_tokens: Tokens that one page holds.
        """
        self._empty = FreeList(pages)
        self._kept: OrderedDict[int, None] = OrderedDict()  # no request uses them, oldest first
        self._users: dict[int, int] = {}
        self._hashes: dict[int, list[bytes]] = {}
        self._page_of: dict[bytes, int] = {}
        self.page_tokens = page_tokens

    @property
    def total(self) -> int:
        """Pages that can be given out."""
        return self._empty.total

    @property
    def free_pages(self) -> int:
        """Pages that no request uses, those with kept contents too."""
        return len(self._empty) + len(self._kept)

    @property
    def kept_pages(self) -> int:
        """Pages that no request uses and whose contents can still be found."""
        return len(self._kept)

    def pages_for(self, tokens: int) -> int:
        """Return how many pages hold `tokens` tokens; changes nothing."""
        return -(-tokens // self.page_tokens)

    def unused(self, pages: Sequence[int]) -> int:
        """Return how many of some pages no request uses; changes nothing."""
        return sum(page in self._kept for page in pages)

    def alloc(self, count: int) -> list[int]:
        """Take `count` pages for one user; takes none when it cannot take all.

        Empty ones go first, then those given back longest ago, whose contents are forgotten.

        Raises:
            CapacityError: Fewer than `count` pages are free.
        """
        if count > self.free_pages:
            raise CapacityError(
                f"{count} pages asked for, {self.free_pages} of {self.total} are free",
                hint="wait for a request to finish",
            )
        return [self._take() for _ in range(count)]

    def share(self, pages: Sequence[int]) -> None:
        """Add a user to pages whose contents were found; they stay as they are."""
        for page in pages:
            self._kept.pop(page, None)
            self._users[page] = self._users.get(page, 0) + 1

    def free(self, pages: Sequence[int]) -> None:
        """Remove a user; the last pages are given away first, so that beginnings live longest."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            del self._users[page]
            if page in self._hashes:
                self._kept[page] = None
            else:
                self._empty.give(page)

    def publish(self, page: int, unit_hash: bytes) -> None:
        """Let a unit of a page be found by its hash, unless another page holds the same."""
        if unit_hash not in self._page_of:
            self._page_of[unit_hash] = page
            self._hashes.setdefault(page, []).append(unit_hash)

    def find(self, unit_hash: bytes) -> int | None:
        """Return the page that holds a unit, None where none does; changes nothing."""
        return self._page_of.get(unit_hash)

    def forget(self) -> None:
        """Drop all kept contents; pages in use stay, and are not found any more."""
        for page in self._kept:
            self._empty.give(page)
        self._kept.clear()
        self._hashes.clear()
        self._page_of.clear()

    def _take(self) -> int:
        if len(self._empty):
            page = self._empty.take()
        else:
            page, _ = self._kept.popitem(last=False)
            for unit_hash in self._hashes.pop(page, ()):
                del self._page_of[unit_hash]
        self._users[page] = 1
        return page
