"""Whether the commands of a plan that touch the same bytes run in a certain order.

Part of the plan checker: it believes nothing but what the commands say they read, write and wait
for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from k3c.artifact import Buffer, Command, Plan


@dataclass(frozen=True)
class _Access:
    """Bytes [first, last) of a space that a command touches; `copies` is set for a layer's own."""

    space: str
    copies: bool
    first: int
    last: int
    name: str


def unknown_waits(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each command that waits for something other than an earlier one."""
    for graph, commands in plan.commands.items():
        for index, command in enumerate(commands):
            for other in command.after:
                if not 0 <= other < index:
                    where = f"{graph}[{index}] {command.label}"
                    yield f"{where} waits for command {other}, which is not an earlier one"


def races(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each pair of commands that share bytes, one writing, in no order.

    Calls need no check: the first commands of a call wait for the whole call before.
    """
    buffers = {b.id: b for b in plan.buffers}
    for graph, commands in plan.commands.items():
        reads = [_accesses(c.reads, buffers) for c in commands]
        writes = [_accesses(c.writes, buffers) for c in commands]
        for early, late in _unordered(commands):
            found = (
                _shared(writes[early], writes[late])
                or _shared(writes[early], reads[late])
                or _shared(reads[early], writes[late])
            )
            if found:
                first, second = (f"[{i}] {commands[i].label}" for i in (early, late))
                yield f"{graph}{first} and {second} are in no order, and share {found}"


def _unordered(commands: Sequence[Command]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of commands, earlier index first, that no chain of waits connects."""
    done: list[int] = []  # a bit for each command that is done before this one starts
    for index, command in enumerate(commands):
        done.append(0)
        for other in command.after:
            done[index] |= done[other] | 1 << other
        missing = ~done[index] & ((1 << index) - 1)
        while missing:
            low = missing & -missing
            yield low.bit_length() - 1, index
            missing ^= low


def _accesses(names: Sequence[str], buffers: Mapping[str, Buffer]) -> list[_Access]:
    found = (buffers[name] for name in names)
    return [_Access(b.space, b.per_layer, b.offset, b.offset + b.nbytes, b.id) for b in found]


def _shared(left: Sequence[_Access], right: Sequence[_Access]) -> str:
    """Return what two commands share, as text; empty when nothing."""
    for a in left:
        for b in right:
            same = (a.space, a.copies) == (b.space, b.copies)
            if same and max(a.first, b.first) < min(a.last, b.last):
                byte = f"byte {max(a.first, b.first)} of {a.space}"
                return a.name if a.name == b.name else f"{byte} ({a.name}, {b.name})"
    return ""
