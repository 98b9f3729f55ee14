"""The symbolic dimensions of an exported program, restored from the shapes of its inputs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from k3c.errors import ExportError
from k3c.ir.types import Dim, SymDim


class DimTable:
    """Maps torch's symbols (`s77`) to the dimensions that the module names.

    Args:
        graph: Name of the graph, for messages.
    """

    def __init__(self, graph: str) -> None:
        """Start with no symbol known."""
        self.graph = graph
        self.by_symbol: dict[str, SymDim] = {}

    def bind(self, name: str, dims: Mapping[int, SymDim], shape: Sequence[Any]) -> None:
        """Take the symbols of one input.

        Args:
            name: The input.
            dims: The dimension of each of its dynamic axes.
            shape: Its shape in the exported program: integers and symbols.

        Raises:
            ExportError: torch made a dynamic axis constant, or two dimensions equal.
        """
        for axis, size in enumerate(shape):
            dim = dims.get(axis)
            if dim is None:
                assert isinstance(size, int), (
                    f"{self.graph}: {name}[{axis}] is {size}, not constant"
                )
                continue
            where = f"{self.graph}, axis {axis} of {name}"
            hint = "the model's code branches on this size or compares it; remove that"
            if isinstance(size, int):
                raise ExportError(f"dimension {dim} became the constant {size}", where, hint)
            known = self.by_symbol.setdefault(str(size), dim)
            others = [s for s, d in self.by_symbol.items() if d == dim]
            if known != dim or len(others) != 1:
                found = f"{known} and {dim}" if known != dim else f"{dim} as {' and '.join(others)}"
                raise ExportError(f"torch tied dimensions together: {found}", where, hint)

    def check_ranges(self, constraints: Mapping[Any, Any]) -> None:
        """Check that the program holds over the whole range of every dimension.

        Args:
            constraints: `range_constraints` of the exported program.

        Raises:
            ExportError: A range is narrower than the dimension's.
        """
        ranges = {str(symbol): allowed for symbol, allowed in constraints.items()}
        for symbol, dim in self.by_symbol.items():
            allowed = ranges.get(symbol)
            # torch assumes sizes of at least 2 while tracing; that is no guard.
            low = max(dim.lo, 2)
            if allowed is None or (allowed.lower <= low and (dim.hi or 0) <= allowed.upper):
                continue
            found = f"{allowed.lower}..{allowed.upper}"
            raise ExportError(
                f"the program holds for {dim} in {found} only, expected {dim.lo}..{dim.hi}",
                self.graph,
                "the model's code compares this size with a constant; remove that",
            )

    def check_guards(self, guards: Iterable[Any]) -> None:
        """Refuse conditions on sizes that tracing took for granted.

        Two inputs that share a dimension leave `Eq(s1, s2)`. Anything else means that the program
        is one side of a branch, and other sizes would silently run the wrong side.

        Args:
            guards: Relations of the program's shape environment.

        Raises:
            ExportError: A condition is more than the equality of one dimension with itself.
        """
        same: dict[str, set[str]] = {symbol: {symbol} for symbol in self.by_symbol}
        for guard in guards:
            symbols = [str(side) for side in guard.args]
            if type(guard).__name__ != "Equality" or not all(a.is_Symbol for a in guard.args):
                raise self._condition(guard)
            merged = set[str]().union(*(same.get(s, {s}) for s in symbols))
            if len({self.by_symbol[s] for s in merged if s in self.by_symbol}) > 1:
                raise self._condition(guard)
            same |= dict.fromkeys(merged, merged)

    def _condition(self, guard: Any) -> ExportError:
        hint = "the model's code branches on a size; remove that"
        return ExportError(f"the program holds only where {self._named(guard)}", self.graph, hint)

    def _named(self, expression: Any) -> str:
        """Return an expression with the module's names in place of torch's symbols."""
        names = {symbol: dim.name for symbol, dim in self.by_symbol.items()}
        return re.sub(r"s\d+", lambda m: names.get(m[0], m[0]), str(expression))

    def lookup(self, size: Any, name: str) -> Dim:
        """Return the dimension of one axis of an intermediate tensor.

        Raises:
            ExportError: The size is an expression of dimensions, which the IR does not have.
        """
        if isinstance(size, int):
            return size
        if str(size) not in self.by_symbol:
            what = f"size {self._named(size)} is no dimension of the module"
            raise ExportError(what, f"{self.graph}, {name}")
        return self.by_symbol[str(size)]
