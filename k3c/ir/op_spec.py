"""What a row of the op registry says, and how a node is checked against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from k3c.ir.graph import Attr, LayerAttr, Node
from k3c.ir.signature import (
    Binding,
    Signature,
    bind_types,
    infer_type,
    integer_attrs,
)
from k3c.ir.types import TensorType

Level = Literal["model", "kernel", "both"]
AttrKind = Literal["int", "float", "bool", "float?", "layer", "epilogue", "epilogues", "axis"]
EPILOGUES = ("none", "situ")


@dataclass(frozen=True)
class AttrSpec:
    """An attribute's kind; with a default it may be missing and then means the default.

    Kinds: `float?` is a float or the word none; `layer` an integer or a LayerAttr; `epilogue` a
    word of EPILOGUES; `epilogues` one such word for each result; `axis` the name of a mesh axis.
    """

    kind: AttrKind
    default: Attr | None = None

    def check(self, value: Attr) -> str | None:
        """Return what is wrong with a value, or None."""
        return None if _KINDS[self.kind](value) else f"{value} is not of kind {self.kind}"

    def is_default(self, value: Attr) -> bool:
        """Whether a value means the same as a missing attribute."""
        if self.kind == "epilogues" and isinstance(value, tuple):
            return all(word == "none" for word in value)
        return self.default is not None and value == self.default


@dataclass(frozen=True)
class Problem:
    """What is wrong with a node; `operand` is the index of the guilty operand, if it is one."""

    what: str
    operand: int | None = None


Extra = Callable[[Node, Binding], str | None]


@dataclass(frozen=True)
class OpSpec:
    """One op.

    Attributes:
        name: Its name.
        signature: Operand roles and shape rule.
        attrs: Its attributes by name.
        level: `model`: passes must replace it before kernels are chosen.
        in_place: Result index -> operand index that the result overwrites.
        updates_io: What it overwrites may be a field that the runtime fills.
        commutative: The first two operands may change places.
        extra: A check that the signature cannot say; it sees the bound variables.
    """

    name: str
    signature: Signature
    attrs: Mapping[str, AttrSpec]
    level: Level
    in_place: Mapping[int, int] = field(default_factory=dict[int, int])
    updates_io: bool = False
    commutative: bool = False
    extra: Extra | None = None

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the operands in order, the optional ones too."""
        return tuple(port.name for port in self.signature.operands)

    def check(self, node: Node) -> Problem | None:
        """Return what is wrong with a node of this op: attributes, arity, types; or None."""
        problem = self._check_attrs(node) or self._check_arity(node)
        if problem:
            return Problem(problem)
        binding = Binding(integer_attrs(node.attrs))
        ports = self.signature.operands[: len(node.operands)]
        wrong = bind_types(ports, [v.type for v in node.operands], binding)
        if wrong:
            return Problem(wrong[1], wrong[0])
        if not self.signature.open_results:
            wrong = bind_types(self.signature.results, [v.type for v in node.results], binding)
        what = wrong[1] if wrong else self.extra(node, binding) if self.extra else None
        return Problem(what) if what else None

    def infer(
        self, operands: tuple[TensorType, ...], attrs: Mapping[str, Attr]
    ) -> tuple[TensorType, ...] | None:
        """Return the result types; None where the operands leave a dtype or a width open."""
        binding = Binding(integer_attrs(attrs))
        ports = self.signature.operands[: len(operands)]
        if self.signature.open_results or bind_types(ports, operands, binding):
            return None
        found = [infer_type(port, binding) for port in self.signature.results]
        types = tuple(t for t in found if t is not None)
        return types if len(types) == len(found) else None

    def _check_attrs(self, node: Node) -> str | None:
        for name, value in node.attrs.items():
            if name not in self.attrs:
                known = ", ".join(self.attrs) or "none"
                return f"attribute {name} is unknown; {self.name} takes {known}"
            problem = self.attrs[name].check(value)
            if problem:
                return f"attribute {name}: {problem}"
        required = {n for n, s in self.attrs.items() if s.default is None}
        missing = sorted(required - node.attrs.keys())
        return f"attribute {missing[0]} is missing" if missing else None

    def _check_arity(self, node: Node) -> str | None:
        ports, results = self.signature.operands, self.signature.results
        most, least = len(ports), sum(not p.optional for p in ports)
        if not least <= len(node.operands) <= most:
            wanted = str(most) if least == most else f"{least} to {most}"
            roles = ", ".join(self.roles)
            return f"{len(node.operands)} operands, expected {wanted}: {roles}"
        if not self.signature.open_results and len(node.results) != len(results):
            return f"{len(node.results)} results, expected {len(results)}"
        return None if node.results else "no results"


def _is_epilogue(value: Attr) -> bool:
    return isinstance(value, str) and value in EPILOGUES


_KINDS: Mapping[AttrKind, Callable[[Attr], bool]] = {
    "int": lambda v: type(v) is int,
    "float": lambda v: type(v) is float,
    "bool": lambda v: type(v) is bool,
    "float?": lambda v: type(v) is float or v == "none",
    "layer": lambda v: type(v) is int or isinstance(v, LayerAttr),
    "epilogue": _is_epilogue,
    "axis": lambda v: isinstance(v, str) and v.isidentifier(),
    "epilogues": lambda v: isinstance(v, tuple) and all(map(_is_epilogue, v)),
}


def epilogues(node: Node) -> tuple[str, ...]:
    """Return the epilogue of each result of a linear or grouped_gemm."""
    words = node.attrs.get("epilogues", node.attrs.get("epilogue", "none"))
    if isinstance(words, tuple) and words:
        return tuple(map(str, words))
    return (str(words or "none"),) * len(node.results)
