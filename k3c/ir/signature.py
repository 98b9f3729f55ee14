"""Shape rules written as text, e.g. `x: A[T, K], w: W[N, K] -> A[T, N]`.

A capital before the bracket is a dtype variable (any float dtype), a lower-case word a dtype.
A dimension is a variable, an integer attribute of the node, a number, or an expression of these;
`*S` stands for a whole shape. One variable has one value, and one mesh axis, in all its places.
`x?` is optional, `A[T, K] | A[T, k, K]` offers two ranks, and results `...` are left to the op.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from k3c.ir.graph import Attr
from k3c.ir.types import BF16, DTYPES, F32, F64, Dim, DType, SymDim, TensorType

FLOATS = (BF16, F32, F64)
_ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b if b else 0,
}


@dataclass(frozen=True)
class ShapePattern:
    """A dtype word and dimension words."""

    dtype: str
    dims: tuple[str, ...]

    def __str__(self) -> str:
        """Return the pattern as the signature writes it."""
        return f"{self.dtype}[{', '.join(self.dims)}]"


@dataclass(frozen=True)
class Port:
    """One operand or result: its role, the shapes it may have, and whether it may be missing."""

    name: str
    shapes: tuple[ShapePattern, ...]
    optional: bool = False

    def shape_of_rank(self, rank: int) -> ShapePattern | None:
        """Return the alternative with `rank` dimensions, or None."""
        for shape in self.shapes:
            if len(shape.dims) == rank or _whole(shape):
                return shape
        return None


@dataclass(frozen=True)
class Signature:
    """Operands and results; `open_results` leaves the results to a rule of the op."""

    operands: tuple[Port, ...]
    results: tuple[Port, ...]
    open_results: bool


@dataclass
class Binding:
    """What the variables of a signature stand for; `dims` starts with the integer attributes."""

    dims: dict[str, Dim]
    dtypes: dict[str, DType] = field(default_factory=dict[str, DType])
    shapes: dict[str, tuple[Dim, ...]] = field(default_factory=dict[str, tuple[Dim, ...]])
    axes: dict[str, str | None] = field(default_factory=dict[str, str | None])


def parse_signature(text: str) -> Signature:
    """Parse a signature; operands are `role: shape`, results are shapes."""
    left, _, right = text.partition("->")
    operands = tuple(_port(*item.split(":")) for item in _split(left, ","))
    if right.strip() == "...":
        return Signature(operands, (), open_results=True)
    results = tuple(_port(f"result {i}", item) for i, item in enumerate(_split(right, ",")))
    return Signature(operands, results, open_results=False)


def bind_types(
    ports: Sequence[Port], types: Sequence[TensorType], binding: Binding
) -> tuple[int, str] | None:
    """Bind and check types against ports.

    Args:
        ports: As many as there are types.
        types: Types of the operands or results.
        binding: Extended in place.

    Returns:
        None, or the index of the first wrong type and what is wrong with it.
    """
    pairs = list(zip(ports, types, strict=True))
    # Plain variables first, so that an expression may use a variable bound by a later operand.
    for expressions in (False, True):
        for index, (port, found) in enumerate(pairs):
            problem = _bind_one(port, found, binding, expressions=expressions)
            if problem:
                return index, f"{port.name} is {found}, expected {_shapes(port)}: {problem}"
    return None


def infer_type(port: Port, binding: Binding, rank: int | None = None) -> TensorType | None:
    """Return the type that a result has under a binding; None where the binding leaves it open."""
    shape = port.shapes[0] if rank is None else port.shape_of_rank(rank)
    if shape is None:
        return None
    dtype = DTYPES.get(shape.dtype) or binding.dtypes.get(shape.dtype)
    if _whole(shape):
        dims = binding.shapes.get(shape.dims[0][1:])
    else:
        sizes = [evaluate(word, binding) for word in shape.dims]
        dims = None if None in sizes else tuple(s for s in sizes if s is not None)
    return None if dtype is None or dims is None else TensorType(dtype, dims)


def evaluate(word: str, binding: Binding) -> Dim | None:
    """Return the dimension that a word of a signature stands for; None where it is open."""
    return _eval(ast.parse(word, mode="eval").body, binding)


def integer_attrs(attrs: Mapping[str, Attr]) -> dict[str, Dim]:
    """Return the attributes that a signature may use as dimensions."""
    return {name: value for name, value in attrs.items() if type(value) is int}


def _eval(tree: ast.expr, binding: Binding) -> Dim | None:
    if isinstance(tree, ast.Name):
        return binding.dims.get(tree.id)
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int):
        return tree.value
    assert isinstance(tree, ast.BinOp), f"signature expression {ast.unparse(tree)}"
    left, right = _eval(tree.left, binding), _eval(tree.right, binding)
    if not isinstance(left, int) or not isinstance(right, int):
        return None
    return _ARITHMETIC[type(tree.op)](left, right)


def _bind_one(port: Port, found: TensorType, binding: Binding, *, expressions: bool) -> str | None:
    shape = port.shape_of_rank(len(found.shape))
    if shape is None:
        return f"it has {len(found.shape)} dimensions"
    if not expressions:
        problem = _bind_dtype(shape.dtype, found.dtype, binding)
        if problem:
            return problem
    if _whole(shape):
        known = binding.shapes.setdefault(shape.dims[0][1:], found.shape)
        return None if known == found.shape else f"its shape is not {_dims(known)}"
    axes = found.sharding.axes if found.sharding else (None,) * len(found.shape)
    for word, dim, axis in zip(shape.dims, found.shape, axes, strict=True):
        if word.isidentifier() is expressions:
            continue
        problem = _bind_dim(word, dim, binding) or _bind_axis(word, axis, binding)
        if problem:
            return problem
    return None


def _bind_dtype(word: str, found: DType, binding: Binding) -> str | None:
    if word in DTYPES:
        return None if DTYPES[word] == found else f"its dtype is not {word}"
    if found not in FLOATS:
        return f"{word} is a float dtype"
    known = binding.dtypes.setdefault(word, found)
    return None if known == found else f"{word} is {known}"


def _bind_dim(word: str, found: Dim, binding: Binding) -> str | None:
    name = word.isidentifier()
    known = binding.dims.setdefault(word, found) if name else evaluate(word, binding)
    if known == found:
        return None
    return f"{word} is {_dim(known)}, not {_dim(found)}"


def _bind_axis(word: str, found: str | None, binding: Binding) -> str | None:
    if not word.isidentifier():
        return None
    known = binding.axes.setdefault(word, found)
    if known == found:
        return None
    return f"{word} is sharded over {known or 'no axis'} elsewhere, over {found or 'no axis'} here"


def _dim(dim: Dim | None) -> str:
    if isinstance(dim, SymDim):
        times = f"{dim.times} times " if dim.times > 1 else ""
        return f"{times}{dim.name} in [{dim.lo}, {'?' if dim.hi is None else dim.hi}]"
    return "not computable" if dim is None else str(dim)


def _dims(shape: tuple[Dim, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _shapes(port: Port) -> str:
    return " or ".join(map(str, port.shapes))


def _whole(shape: ShapePattern) -> bool:
    return shape.dims[0].startswith("*")


def _port(name: str, text: str) -> Port:
    name = name.strip()
    shapes = tuple(_shape(item) for item in text.split("|"))
    return Port(name.rstrip("?"), shapes, optional=name.endswith("?"))


def _shape(text: str) -> ShapePattern:
    dtype, _, dims = text.strip().partition("[")
    return ShapePattern(dtype, tuple(d.strip() for d in dims.rstrip("]").split(",")))


def _split(text: str, separator: str) -> list[str]:
    """Split at separators outside brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [p.strip() for p in parts if p.strip()]
