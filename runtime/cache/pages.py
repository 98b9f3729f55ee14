"""Pages of the MLA cache. Page 0 is scratch: padded rows may touch it, no request owns it."""

from __future__ import annotations

from k3c.errors import CapacityError
from k3c.runtime.cache.free_list import FreeList


class PageAllocator:
    """Gives out pages of `page_tokens` tokens, the lowest free number first."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        """Start with every page but page 0 free.

        Args:
            pages: Pages in the planned memory, page 0 included.
            page_tokens: Tokens that one page holds.
        """
        self._free = FreeList(pages)
        self.page_tokens = page_tokens

    @property
    def free_pages(self) -> int:
        """Pages that no request owns."""
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Return how many pages hold `tokens` tokens; changes nothing."""
        return -(-tokens // self.page_tokens)

    def alloc(self, count: int) -> list[int]:
        """Take `count` pages; takes none when it cannot take all.

        Raises:
            CapacityError: Fewer than `count` pages are free.
        """
        if count > len(self._free):
            raise CapacityError(
                f"{count} pages asked for, {len(self._free)} of {self._free.total} are free",
                hint="wait for a request to finish",
            )
        return [self._free.take() for _ in range(count)]

    def free(self, pages: list[int]) -> None:
        """Make `pages` free; their contents stay until another request writes them."""
        for page in pages:
            self._free.give(page)
