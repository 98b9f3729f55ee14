"""The address arithmetic of a compiled GPU kernel, taken from Triton's IR.

A pointer plus an offset in elements (`tt.addptr`) is an address; everything that an offset is
computed from is kept, in order, everything else is left out. Numbers, not bytes: JSON both ways.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

UNKNOWN = "unknown"
_LOCATION = re.compile(r" loc\((?:[^()]|\([^()]*\))*\)")
_RESULT = re.compile(r"(%[\w$.]+)(?::(\d+))? = (.*)")
_OP = re.compile(r'"?([a-z_]+\.[a-z_0-9.]+)"?')
_VALUE = re.compile(r"%[\w$.]+(?:#\d+)?")
_BITS = re.compile(r"(?:x|: |to |^)i(\d+)>?(?:\)|,|$)")
_PARAMETER = re.compile(r"(%[\w$.]+): (!tt\.ptr<\w+>|[a-z]\w*)")
_FOR = re.compile(r"scf\.for (%\S+) = (%\S+) to (%\S+) step (%\S+)")
_CARRIED = re.compile(r"(%[\w$.]+) = (%[\w$.]+(?:#\d+)?)")
_BLOCK = re.compile(r"(%[\w$.]+): ")
# One result, whose range is that of the first operand.
_SAME = {
    "tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans", "tt.unsplat",
    "tt.split", "tt.addptr", "arith.extsi", "arith.extui", "arith.trunci",
}  # fmt: skip
_ARITHMETIC = {
    "arith.addi", "arith.subi", "arith.muli", "arith.divsi", "arith.divui", "arith.remsi",
    "arith.remui", "arith.minsi", "arith.maxsi", "arith.minui", "arith.maxui", "arith.andi",
    "arith.ori", "arith.shli", "arith.shrsi", "arith.shrui", "arith.select", "arith.cmpi",
    "tt.join",
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One value: how it is made of earlier ones.

    Attributes:
        op: Its operation without the dialect; `same` has its first operand's range, `load` reads
            what its operand points to, `unknown` is anything else that a kernel counts.
        operands: Indices of earlier steps.
        bits: Width of the integer.
        facts: Numbers of the operation: a constant, the ends of a range, an axis, a parameter.
        word: The predicate of a comparison.
    """

    op: str
    operands: tuple[int, ...]
    bits: int
    facts: tuple[int, ...] = ()
    word: str = ""


@dataclass(frozen=True)
class IndexProgram:
    """All steps that addresses need, and which of them are added to pointers."""

    kernel: str
    steps: tuple[Step, ...]
    offsets: tuple[int, ...]

    def to_bytes(self) -> bytes:
        """Return the program as JSON."""
        rows = [[s.op, s.operands, s.bits, s.facts, s.word] for s in self.steps]
        return json.dumps([self.kernel, rows, self.offsets]).encode()

    @staticmethod
    def from_bytes(data: bytes) -> IndexProgram:
        """Return what `to_bytes` wrote."""
        kernel, rows, offsets = json.loads(data)
        steps = (Step(op, tuple(args), bits, tuple(f), word) for op, args, bits, f, word in rows)
        return IndexProgram(kernel, tuple(steps), tuple(offsets))


def parse_ttir(text: str) -> IndexProgram:
    """Return the address arithmetic of a kernel.

    Args:
        text: Triton's IR of one function, inlined, as `asm["ttir"]` has it.
    """
    reader = _Reader()
    for line in text.splitlines():
        reader.read(_LOCATION.sub("", line).strip())
    return _needed(reader.kernel, reader.steps, reader.offsets)


def _needed(kernel: str, steps: list[Step], offsets: list[int]) -> IndexProgram:
    """Keep the steps that offsets depend on, renumbered."""
    wanted: set[int] = set()
    todo = list(offsets)
    while todo:
        index = todo.pop()
        if index not in wanted:
            wanted.add(index)
            todo += steps[index].operands
    place = {old: new for new, old in enumerate(sorted(wanted))}
    kept = tuple(
        Step(s.op, tuple(place[o] for o in s.operands), s.bits, s.facts, s.word)
        for s in (steps[old] for old in sorted(wanted))
    )
    return IndexProgram(kernel, kept, tuple(sorted({place[o] for o in offsets})))


@dataclass
class _Region:
    """An open pair of braces: the names defined in it; of a branch, what it becomes."""

    names: dict[str, list[int]] = field(default_factory=dict)
    yields: list[list[int]] = field(default_factory=list)
    branch: tuple[str, int] | None = None


@dataclass
class _Reader:
    """Reads line by line; a name means what the innermost region that defines it says."""

    kernel: str = ""
    steps: list[Step] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    regions: list[_Region] = field(default_factory=lambda: [_Region()])

    def read(self, line: str) -> None:
        """Take one line without its location."""
        closed = self._close(line) if line.startswith("}") else None
        if line.startswith("tt.func"):
            self._function(line)
        elif line.startswith("scf.yield"):
            self.regions[-1].yields.append([self._find(v) for v in _VALUE.findall(line)])
        elif "scf.for " in line:
            self._loop(line)
            return
        elif line.startswith("^"):
            for name in _BLOCK.findall(line):
                self._define(name, self._add(Step(UNKNOWN, (), 32)))
        elif not line.startswith("}"):
            self._operation(line)
            return
        if line.endswith("{"):
            # `else` continues the `if`: its yields join the same results.
            same = closed or _Region()
            self.regions.append(_Region(yields=same.yields, branch=same.branch))

    def _close(self, line: str) -> _Region | None:
        if len(self.regions) == 1:
            return None
        region = self.regions.pop()
        if region.branch is not None and not line.endswith("{"):
            name, count = region.branch
            ways = [tuple(y[i] for y in region.yields if i < len(y)) for i in range(count)]
            joined = [self._add(Step("join", w, self.steps[w[0]].bits)) for w in ways if w]
            self._scope().names[name] = joined
        return region

    def _function(self, line: str) -> None:
        self.kernel = line.partition("@")[2].partition("(")[0]
        scalars = pointers = 0
        for name, kind in _PARAMETER.findall(line):
            if kind.startswith("!tt.ptr"):
                self._define(name, self._add(Step("pointer", (), 64, (pointers,))))
                pointers += 1
                continue
            self._define(name, self._add(Step("parameter", (), int(kind[1:] or 32), (scalars,))))
            scalars += 1

    def _loop(self, line: str) -> None:
        match = _FOR.search(line)
        assert match is not None, f"loop {line!r}"
        ends = tuple(self._find(v) for v in match.groups()[1:])
        carried = _CARRIED.findall(line.partition("iter_args(")[2].partition(") ->")[0])
        body = _Region()
        bits = 64 if ": i64 {" in line else 32
        inner = self._add(Step("loop", ends, bits))
        body.names[match[1]] = [inner]
        inside = [self._add(Step("carried", (self._find(init),), 32)) for _, init in carried]
        body.names |= {name: [i] for (name, _), i in zip(carried, inside, strict=True)}
        found = _RESULT.match(line)
        if found is not None:
            self._scope().names[found[1]] = list(inside)
        self.regions.append(body)

    def _operation(self, line: str) -> None:
        found = _RESULT.match(line)
        text = found[3] if found else line
        named = _OP.match(text)
        if named is None:
            return
        op, operands = named[1], [self._find(v) for v in _VALUE.findall(text)]
        if op == "tt.addptr":
            self.offsets.append(operands[1])
        if found is None:
            if line.endswith("{"):
                self.regions.append(_Region())
            return
        count = int(found[2] or 1)
        if op == "scf.if":
            self.regions.append(_Region(branch=(found[1], count)))
            return
        step = _step(op, operands, text)
        self._scope().names[found[1]] = [self._add(step) for _ in range(count)]
        if line.endswith("{"):
            self.regions.append(_Region())

    def _scope(self) -> _Region:
        return self.regions[-1]

    def _define(self, name: str, index: int) -> None:
        self._scope().names[name] = [index]

    def _add(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

    def _find(self, value: str) -> int:
        name, _, place = value.partition("#")
        for region in reversed(self.regions):
            if name in region.names:
                return region.names[name][int(place or 0)]
        # A block's argument that is named before it is listed, or a label.
        return self._add(Step(UNKNOWN, (), 32))


def _step(op: str, operands: list[int], text: str) -> Step:
    """Return how one operation makes its value."""
    widths = _BITS.findall(text)
    bits = int(widths[-1]) if widths else 64
    if op == "arith.constant":
        number = re.search(r"constant (?:dense<)?(-?\d+)>? :", text)
        return Step("constant", (), bits, (int(number[1]),)) if number else Step(UNKNOWN, (), bits)
    if op in ("tt.get_program_id", "tt.get_num_programs"):
        axis = "xyz".index(text.split()[1])
        return Step(op.removeprefix("tt.get_"), (), bits, (axis,))
    if op == "tt.make_range":
        end, start = (int(re.search(rf"{w} = (\d+)", text)[1]) for w in ("end", "start"))  # pyright: ignore[reportOptionalSubscript]
        return Step("range", (), bits, (start, end - 1))
    if op in _SAME:
        return Step("same", tuple(operands[:1]), bits)
    if op == "tt.load":
        return Step("load", tuple(operands[:1]), bits)
    if op in _ARITHMETIC:
        word = text.split()[1].rstrip(",") if op == "arith.cmpi" else ""
        return Step(op.partition(".")[2], tuple(operands), bits, (), word)
    return Step(UNKNOWN, (), bits)
