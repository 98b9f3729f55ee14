"""Place buffers with lifetimes into one space of bytes: rectangle packing.

`plan(problem) -> Solution`, deterministic. Greedy placement in several orders, then a bounded local
search where all of them miss the lower bound (the largest set of bytes live at one time).
`k3c/plan_check.py` checks the outcome and shares no code with this file.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from k3c.artifact import ALIGN_BYTES, aligned

SEARCH_STEPS = 300  # about a millisecond each; only where greedy misses the bound


@dataclass(frozen=True)
class Buffer:
    """Bytes that are needed from time `first` until before time `last`."""

    id: str
    nbytes: int
    first: int
    last: int
    align: int = ALIGN_BYTES

    @property
    def rounded(self) -> int:
        """Size in whole units of alignment: what it takes in a packed space."""
        return -(-self.nbytes // self.align) * self.align

    def meets(self, other: Buffer) -> bool:
        """Say whether both are live at one time."""
        return self.first < other.last and other.first < self.last


@dataclass(frozen=True)
class Problem:
    """Buffers with unique ids."""

    buffers: tuple[Buffer, ...]


@dataclass(frozen=True)
class Solution:
    """Where each buffer lies, how many bytes that takes, and how few any placement could take."""

    offsets: Mapping[str, int]
    height_bytes: int
    lower_bound_bytes: int


Order = list[Buffer]
_Fit = Callable[[Sequence[tuple[int, int]], int], int]

_ORDERS: tuple[Callable[[Buffer], tuple[int, ...]], ...] = (
    lambda b: (-b.rounded, b.first),
    lambda b: (-b.rounded * (b.last - b.first), b.first),
    lambda b: (b.first - b.last, -b.rounded, b.first),
    lambda b: (b.first, -b.rounded),
    lambda b: (-b.last, -b.rounded),
)


def plan(problem: Problem) -> Solution:
    """Place all buffers so that no two that are live together share a byte.

    Args:
        problem: The buffers, with `first < last` and alignments that are powers of two.
    """
    buffers = sorted(problem.buffers, key=lambda b: b.id)
    assert len({b.id for b in buffers}) == len(buffers), "buffer ids are not unique"
    always, rest = _split_always(buffers)
    offsets: dict[str, int] = {}
    bottom = _stack(always, offsets)
    groups = _groups(rest)
    need = max((lower_bound_bytes(group) for group in groups), default=0)
    height = bottom
    for group in groups:
        placed = _pack(group, need)
        offsets |= {name: bottom + offset for name, offset in placed.items()}
        height = max(height, bottom + _height(group, placed))
    return Solution(dict(sorted(offsets.items())), height, lower_bound_bytes(buffers))


def lower_bound_bytes(buffers: Sequence[Buffer]) -> int:
    """Return the largest sum of rounded sizes that is live at one time."""
    changes = sorted(
        change for b in buffers for change in ((b.first, 1, b.rounded), (b.last, 0, -b.rounded))
    )
    most = live = 0
    for _, _, nbytes in changes:
        live += nbytes
        most = max(most, live)
    return most


def _split_always(buffers: Order) -> tuple[Order, Order]:
    """Part the buffers that are live all the time: they go to the bottom, where they cost least."""
    if not buffers:
        return [], []
    start, end = min(b.first for b in buffers), max(b.last for b in buffers)
    always = [b for b in buffers if (b.first, b.last) == (start, end)]
    return always, [b for b in buffers if (b.first, b.last) != (start, end)]


def _stack(buffers: Order, offsets: dict[str, int]) -> int:
    bottom = 0
    # The strictest alignment first, so that stacking leaves no gaps.
    for b in sorted(buffers, key=lambda b: (-b.align, b.id)):
        offsets[b.id] = bottom
        bottom += b.rounded
    return aligned(bottom)


def _groups(buffers: Order) -> list[Order]:
    """Cut the time line where nothing is live: the parts do not affect each other."""
    groups: list[Order] = []
    end = 0
    for b in sorted(buffers, key=lambda b: (b.first, b.last, b.id)):
        if not groups or b.first >= end:
            groups.append([])
            end = b.last
        groups[-1].append(b)
        end = max(end, b.last)
    return groups


def _pack(buffers: Order, enough_bytes: int) -> dict[str, int]:
    """Place buffers; stop at the first placement that is not higher than `enough_bytes`."""
    meets = {b.id: [o for o in buffers if o is not b and b.meets(o)] for b in buffers}
    best: tuple[int, Order, dict[str, int]] | None = None
    for key in _ORDERS:
        order = sorted(buffers, key=lambda b, key=key: (*key(b), b.id))
        for fit in (_first_fit, _best_fit):
            placed = _place(order, meets, fit)
            height = _height(buffers, placed)
            if best is None or height < best[0]:
                best = height, order, placed
            if height <= enough_bytes:
                return placed
    assert best is not None, "nothing to pack"
    return _search(best, meets, enough_bytes)


def _search(
    best: tuple[int, Order, dict[str, int]], meets: Mapping[str, Order], enough_bytes: int
) -> dict[str, int]:
    """Move a buffer that reaches the top to an earlier place in the order, again and again."""
    choose = random.Random(len(meets))  # a fixed seed: plans are reproducible
    height, order, placed = best
    for _ in range(SEARCH_STEPS):
        top = [i for i, b in enumerate(order) if i and placed[b.id] + b.rounded >= height]
        if height <= enough_bytes or not top:
            break
        trial = list(order)
        moved = trial.pop(choose.choice(top))
        trial.insert(choose.randrange(order.index(moved)), moved)
        # Half of the steps also exchange two buffers, to leave a local minimum.
        if choose.random() < 0.5:
            i, j = choose.randrange(len(trial)), choose.randrange(len(trial))
            trial[i], trial[j] = trial[j], trial[i]
        result = _place(trial, meets, _first_fit)
        if (found := _height(trial, result)) <= height:
            height, order, placed = found, trial, result
    return placed


def _place(order: Order, meets: Mapping[str, Order], fit: _Fit) -> dict[str, int]:
    placed: dict[str, int] = {}
    for b in order:
        taken = sorted(
            (placed[o.id], placed[o.id] + o.nbytes) for o in meets[b.id] if o.id in placed
        )
        placed[b.id] = fit(_gaps(taken, b.align), b.nbytes)
    return placed


def _gaps(taken: Sequence[tuple[int, int]], align: int) -> list[tuple[int, int]]:
    """Return (aligned start, bytes) of each gap in sorted ranges; the last one has no end."""
    gaps: list[tuple[int, int]] = []
    free = 0
    for first, last in taken:
        if first > free:
            gaps.append((free, first - free))
        free = max(free, -(-last // align) * align)
    return [*gaps, (free, 1 << 62)]


def _first_fit(gaps: Sequence[tuple[int, int]], nbytes: int) -> int:
    return next(start for start, size in gaps if size >= nbytes)


def _best_fit(gaps: Sequence[tuple[int, int]], nbytes: int) -> int:
    return min((size, start) for start, size in gaps if size >= nbytes)[1]


def _height(buffers: Sequence[Buffer], placed: Mapping[str, int]) -> int:
    return max((placed[b.id] + b.rounded for b in buffers), default=0)
