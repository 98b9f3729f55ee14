"""Segments over a paged latent cache, for tests of the kernels that work on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = 16


@dataclass(frozen=True)
class PagedStep:
    """One step of packed segments.

    Attributes:
        rows: Rows of the step, padding included.
        pages: Pages of the cache; page 0 belongs to no segment.
        segments: seg_start, seg_tokens, context i32[B] and page_table i32[B, M].
        owned: i64 page numbers that live segments use.
        page: Positions of a page.
    """

    rows: int
    pages: int
    segments: tuple[Tensor, Tensor, Tensor, Tensor]
    owned: Tensor
    page: int = PAGE

    def poison(self, cache: Tensor) -> Tensor:
        """Fill with NaN what no segment may read: other pages and positions past each length."""
        _, tokens, context, table = self.segments
        keep = torch.zeros(self.pages * self.page, dtype=torch.bool)
        for s in range(len(tokens)):
            if tokens[s]:
                at = torch.arange(int(context[s] + tokens[s]))
                keep[table[s].long()[at // self.page] * self.page + at % self.page] = True
        flat = cache.flatten(0, 1)
        flat[~keep] = torch.nan
        return flat.view_as(cache)


def paged_step(spans: Sequence[tuple[int, int]], padding: int = 2, page: int = PAGE) -> PagedStep:
    """Lay out segments of (tokens, context); (0, 0) is a padded segment. Pages are shuffled."""
    needs = [-(-(t + c) // page) if t else 0 for t, c in spans]
    pages = sum(needs) + 3
    free = (torch.randperm(pages - 1) + 1).tolist()
    table = torch.zeros(len(spans), max(needs) + 1, dtype=torch.int32)
    starts, row, owned = [], 0, []
    for s, (need, (tokens, _)) in enumerate(zip(needs, spans, strict=True)):
        mine = [free.pop() for _ in range(need)]
        table[s, :need] = torch.tensor(mine, dtype=torch.int32)
        owned += mine
        starts.append(row if tokens else 0)
        row += tokens
    tokens, context = torch.tensor(spans, dtype=torch.int32).unbind(1)
    segments = (torch.tensor(starts, dtype=torch.int32), tokens.clone(), context.clone(), table)
    return PagedStep(row + padding, pages, segments, torch.tensor(owned), page)
