"""Whether the address arithmetic of a kernel stays inside its integers, by intervals.

Every step gets the interval of its values from what is known before a launch: the grid, the scalar
arguments, and how large the indices that a kernel loads can be. Only 32-bit steps can overflow: no
tensor comes near 2^63 elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from k3c.codegen.index_program import UNKNOWN, IndexProgram, Step

Interval = tuple[int, int]

_INT32: Interval = (-(2**31), 2**31 - 1)
_CAN_OVERFLOW = ("addi", "subi", "muli", "shli")
_SIGNS = {"addi": "+", "subi": "-", "muli": "*", "shli": "<<", "divsi": "//", "remsi": "%"}
_EXPRESSION_DEPTH = 6


@dataclass(frozen=True)
class Facts:
    """What is known of all launches of a kernel.

    Attributes:
        grid: Blocks along x, y and z, the most of any launch.
        scalars: Interval of each scalar argument, in order.
        loaded: The largest index that each pointer argument's elements hold, in order.
        largest_index: No index that a kernel counts is larger.
    """

    grid: tuple[int, ...]
    scalars: tuple[Interval, ...]
    loaded: tuple[int, ...]
    largest_index: int

    def joined(self, other: Facts) -> Facts:
        """Return what holds for the launches of both."""
        pairs = zip(self.scalars, other.scalars, strict=True)
        return Facts(
            tuple(max(a, b) for a, b in zip(self.grid, other.grid, strict=True)),
            tuple((min(a[0], b[0]), max(a[1], b[1])) for a, b in pairs),
            tuple(max(a, b) for a, b in zip(self.loaded, other.loaded, strict=True)),
            max(self.largest_index, other.largest_index),
        )


@dataclass(frozen=True)
class Overflow:
    """A step whose value can leave its integer: the expression, and the extreme value."""

    expression: str
    value: int


def overflows(program: IndexProgram, facts: Facts) -> list[Overflow]:
    """Return the steps of addresses that can overflow 32 bits, in the order of the kernel."""
    ranges: list[Interval] = []
    loaded: list[bool] = []
    found: list[Overflow] = []
    for index, step in enumerate(program.steps):
        exact = _interval(step, program, ranges, facts)
        loaded.append(
            step.op in (UNKNOWN, "carried", "load") or any(loaded[o] for o in step.operands)
        )
        if step.op in ("muli", "subi") and all(loaded[o] for o in step.operands):
            # Two loaded numbers together are one index, or a count: a row and its place, an end
            # less a start. Their limits do not occur at once.
            exact = -1, facts.largest_index
        if step.bits == 32:
            # Offsets grow upwards; what is negative is a difference that a mask leaves out.
            if step.op in _CAN_OVERFLOW and exact[1] > _INT32[1]:
                found.append(Overflow(expression(program, index), exact[1]))
            exact = max(exact[0], _INT32[0]), min(exact[1], _INT32[1])
        ranges.append(exact)
    return found


def expression(program: IndexProgram, index: int, depth: int = _EXPRESSION_DEPTH) -> str:
    """Return a step as a formula; what lies too deep is an ellipsis."""
    step = program.steps[index]
    if step.op == "constant":
        return str(step.facts[0])
    if step.op == "program_id":
        return f"program_id({step.facts[0]})"
    if step.op == "range":
        return f"({step.facts[0]}..{step.facts[1]})"
    if step.op == "parameter":
        return f"argument {step.facts[0]}"
    if step.op == "load":
        return "loaded"
    if step.op == "same" and step.operands:
        return expression(program, step.operands[0], depth)
    if not depth:
        return "…"
    inner = [expression(program, o, depth - 1) for o in step.operands]
    if step.op in _SIGNS:
        return f"({inner[0]} {_SIGNS[step.op]} {inner[1]})"
    return f"{step.op}({', '.join(inner)})" if inner else "counted"


def _interval(step: Step, program: IndexProgram, ranges: list[Interval], facts: Facts) -> Interval:
    if step.op == "constant":
        return step.facts[0], step.facts[0]
    if step.op == "range":
        return step.facts[0], step.facts[1]
    if step.op == "program_id":
        return 0, facts.grid[step.facts[0]] - 1
    if step.op == "num_programs":
        return 1, facts.grid[step.facts[0]]
    if step.op == "parameter":
        return facts.scalars[step.facts[0]]
    if step.op == "load":
        return -1, _held(step, program, facts)
    if step.op in (UNKNOWN, "pointer") or not step.operands:
        return -1, facts.largest_index
    given = [ranges[o] for o in step.operands]
    if step.op == "select":
        return _select(step, program, ranges)
    if step.op == "carried":
        # A value that a loop changes counts, or is an index: it starts somewhere and stays one.
        return min(given[0][0], -1), max(given[0][1], facts.largest_index)
    return _RULES.get(step.op, _union)(given)


def _held(step: Step, program: IndexProgram, facts: Facts) -> int:
    """Return the largest index among the elements that a load can read."""
    source = program.steps[step.operands[0]]
    while source.op == "same":
        source = program.steps[source.operands[0]]
    return facts.loaded[source.facts[0]] if source.op == "pointer" else facts.largest_index


def _union(given: list[Interval]) -> Interval:
    return min(low for low, _ in given), max(high for _, high in given)


def _corners(given: list[Interval], of: Callable[[int, int], int]) -> Interval:
    values = [of(a, b) for a in given[0] for b in given[1]]
    return min(values), max(values)


def _shift(given: list[Interval], left: bool) -> Interval:
    amounts = [(max(0, min(b, 63))) for b in given[1]]
    values = [a << b if left else a >> b for a in given[0] for b in amounts]
    return min(values), max(values)


def _quotient(given: list[Interval]) -> Interval:
    """Return the range of a quotient; no kernel divides by less than 1."""
    low, high = given[0]
    least, most = max(1, given[1][0]), max(1, given[1][1])
    # Rounded towards zero, in integers: floats lose the last digits of large offsets.
    towards = {a: [abs(a) // d * (1 if a >= 0 else -1) for d in (least, most)] for a in given[0]}
    return min(towards[low]), max(towards[high])


def _remainder(given: list[Interval]) -> Interval:
    (low, high), most = given[0], max(abs(b) for b in given[1])
    return max(low, 1 - most) if low < 0 else 0, min(high, most - 1) if high > 0 else 0


def _masked(given: list[Interval]) -> Interval:
    known = [high for low, high in given if low >= 0]
    return (0, min(known)) if known else _union([*given, (0, 0)])


def _either(given: list[Interval]) -> Interval:
    if any(low < 0 for low, _ in given):
        return _union([*given, (-1, 0)])
    most = max(high for _, high in given)
    return 0, (1 << most.bit_length()) - 1


def _select(step: Step, program: IndexProgram, ranges: list[Interval]) -> Interval:
    """Return the range of a choice; `where(x < n, x, ...)` keeps x below n."""
    condition, chosen, other = step.operands
    low, high = ranges[chosen]
    test = program.steps[condition]
    if test.op == "cmpi" and test.operands[0] == chosen:
        limit = ranges[test.operands[1]][1]
        high = {"slt": min(high, limit - 1), "sle": min(high, limit)}.get(test.word, high)
    return _union([(min(low, high), high), ranges[other]])


_RULES: Mapping[str, Callable[[list[Interval]], Interval]] = {
    "addi": lambda g: (g[0][0] + g[1][0], g[0][1] + g[1][1]),
    "subi": lambda g: (g[0][0] - g[1][1], g[0][1] - g[1][0]),
    "muli": lambda g: _corners(g, lambda a, b: a * b),
    "divsi": _quotient,
    "divui": _quotient,
    "remsi": _remainder,
    "remui": _remainder,
    "minsi": lambda g: _corners(g, min),
    "minui": lambda g: _corners(g, min),
    "maxsi": lambda g: _corners(g, max),
    "maxui": lambda g: _corners(g, max),
    "andi": _masked,
    "ori": _either,
    "shli": lambda g: _shift(g, True),
    "shrsi": lambda g: _shift(g, False),
    "shrui": lambda g: (0, g[0][1]) if g[0][0] >= 0 else (0, max(g[0][1], 2**31 - 1)),
    # The induction variable: from the start to before the end.
    "loop": lambda g: (g[0][0], max(g[0][0], g[1][1] - 1)),
    "cmpi": lambda g: (0, 1),
}
