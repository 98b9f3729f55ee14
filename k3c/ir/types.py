"""Types of the IR: element types, dimensions, layouts, shardings and tensors.

Immutable and standard library only. A shape is global and logical; bytes are derived from it once
every symbolic dimension is bound by a bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

MX_BLOCK = 32  # elements that share one e8m0 scale in MXFP4 (OCP Microscaling v1.0)


@dataclass(frozen=True)
class DType:
    """An element type; `bits` is fractional for block formats (mxfp4: 4 + 8/32)."""

    name: str
    bits: float

    def __str__(self) -> str:
        """Return the name as the IR text writes it."""
        return self.name


F64 = DType("f64", 64)
F32 = DType("f32", 32)
BF16 = DType("bf16", 16)
F8 = DType("f8e4m3", 8)  # OCP float8 e4m3: finite up to 448, one NaN; for caches
I64 = DType("i64", 64)
I32 = DType("i32", 32)
U8 = DType("u8", 8)
MXFP4 = DType("mxfp4", 4.25)  # e2m1 elements, 32 to an mx_block, one e8m0 scale a block
DTYPES: Mapping[str, DType] = {d.name: d for d in (F64, F32, BF16, F8, I64, I32, U8, MXFP4)}


@dataclass(frozen=True)
class SymDim:
    """A symbolic dimension with an inclusive range; `hi` None: unbounded (an error to plan).

    With `times` it is so many times the symbol: the rows of that many ranks. The range is still
    that of the symbol.
    """

    name: str
    lo: int
    hi: int | None
    times: int = 1

    def __str__(self) -> str:
        """Return the dimension as the IR text writes it, `T` or `4*T`."""
        return self.name if self.times == 1 else f"{self.times}*{self.name}"

    def bind(self, dims: Mapping[str, int]) -> Dim:
        """Return the size under a binding; the dimension itself where it leaves it open."""
        return self.times * dims[self.name] if self.name in dims else self


Dim = int | SymDim


@dataclass(frozen=True)
class Layout:
    """A byte order, named; the kernel template that reads it owns `pack` and `unpack`."""

    name: str

    def __str__(self) -> str:
        """Return the name as the IR text writes it."""
        return self.name


ROW_MAJOR = Layout("row_major")


@dataclass(frozen=True)
class Sharding:
    """One mesh axis, or None, for each dimension of a tensor."""

    axes: tuple[str | None, ...]


@dataclass(frozen=True)
class TensorType:
    """Element type, logical shape, layout and sharding of a value."""

    dtype: DType
    shape: tuple[Dim, ...]
    layout: Layout = ROW_MAJOR
    sharding: Sharding | None = None

    def bind(self, dims: Mapping[str, int]) -> TensorType:
        """Return this type with the symbolic dimensions in `dims` replaced by integers."""
        shape = tuple(d.bind(dims) if isinstance(d, SymDim) else d for d in self.shape)
        return replace(self, shape=shape)

    # Kept: a plan asks for the sizes of each of its types hundreds of times.
    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The shape as integers; every dimension must be bound."""
        found = tuple(d for d in self.shape if isinstance(d, int))
        assert len(found) == len(self.shape), f"a dimension of {self} is not bound"
        return found

    @cached_property
    def elements(self) -> int:
        """Number of elements; every dimension must be bound."""
        return prod(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of the logical tensor; a packed layout may add padding, which its owner states."""
        bits = self.elements * self.dtype.bits
        return int(-(-bits // 8))

    def __str__(self) -> str:
        """Return the type as the IR text writes it, with layout and sharding where they are set."""
        text = f"{self.dtype}[{', '.join(str(d) for d in self.shape)}]"
        if self.layout != ROW_MAJOR:
            text += f" as {self.layout}"
        if self.sharding is not None:
            text += f" @ ({', '.join(a or '-' for a in self.sharding.axes)})"
        return text
