"""What templates share: the registry of weight layouts, refusals, and sizes of values.

A layout belongs to the template that reads it. Its family is the text of its name before the first
dot; the rest encodes every parameter, so that two packings of one weight differ in name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from k3c.errors import CodegenError
from k3c.ir.graph import LayerAttr, Node
from k3c.ir.refusal import Refusal
from k3c.ir.types import ROW_MAJOR, TensorType
from k3c.targets.catalogue import Scalar

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class LayoutFamily:
    """How the weights of one family of layouts are packed.

    Attributes:
        name: Text before the first dot of the layout names.
        pack: (type, arrays) -> u8[nbytes]; bf16 arrays are uint16, mxfp4 is (packed, scale) of u8.
        unpack: (type, u8[nbytes]) -> the arrays that were packed.
        nbytes: Bytes of a packed weight of a type, padding included.
    """

    name: str
    pack: Callable[[TensorType, Sequence[Array]], Array]
    unpack: Callable[[TensorType, Array], tuple[Array, ...]]
    nbytes: Callable[[TensorType], int]


_FAMILIES: dict[str, LayoutFamily] = {}


def register_layout(family: LayoutFamily) -> None:
    """Make a family of layouts known; a name may be taken once."""
    taken = _FAMILIES.get(family.name, family)
    assert taken == family, f"layout family {family.name} is registered twice"
    _FAMILIES[family.name] = family


def pack(type_: TensorType, arrays: Sequence[Array]) -> Array:
    """Return a weight as the bytes u8[packed_nbytes(type)] of its layout.

    Raises:
        CodegenError: The layout is unknown.
    """
    if type_.layout == ROW_MAJOR:
        parts = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays]
        return np.concatenate(parts)
    return _family(type_).pack(type_, arrays)


def unpack(type_: TensorType, data: Array) -> tuple[Array, ...]:
    """Return the arrays that `pack` was given; of a row-major weight, its bytes.

    Raises:
        CodegenError: The layout is unknown.
    """
    return (data,) if type_.layout == ROW_MAJOR else _family(type_).unpack(type_, data)


def packed_nbytes(type_: TensorType) -> int:
    """Return the bytes of a packed weight, padding included.

    Raises:
        CodegenError: The layout is unknown.
    """
    return type_.nbytes if type_.layout == ROW_MAJOR else _family(type_).nbytes(type_)


def padded(count: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `count`."""
    return -(-count // multiple) * multiple


def operand_bytes(node: Node) -> int:
    """Return the bytes of all operands of a node, packed weights with their padding."""
    return sum(packed_nbytes(v.type) for v in node.operands)


def result_bytes(node: Node) -> int:
    """Return the bytes of all results of a node."""
    return sum(v.type.nbytes for v in node.results)


def refuse_dtype(node: Node, index: int, allowed: Sequence[str]) -> Refusal | None:
    """Return a refusal when operand `index` has a dtype outside `allowed`."""
    found = node.operands[index].type.dtype.name
    if found in allowed:
        return None
    return Refusal(f"operand {index} of {node.op} must be {' or '.join(allowed)}", found)


def first_expert(node: Node) -> Scalar:
    """Return the run-time integer `first_expert` of a node: the first expert of this rank."""
    value = node.attrs.get("first_expert", 0)
    assert isinstance(value, int | LayerAttr), f"first_expert {value!r} is no integer"
    return "first_expert", value


def local_experts(node: Node, total: int) -> int:
    """Return the experts of this rank, attribute `num_experts` of a node; 0 means all."""
    count = node.attrs.get("num_experts", 0)
    assert isinstance(count, int), f"num_experts {count!r} is no integer"
    return count or total


def _family(type_: TensorType) -> LayoutFamily:
    name = type_.layout.name.partition(".")[0]
    # The modules that own layouts register them when they are imported, which takes TVM seconds.
    for compiler in ("tvm", "triton") if name not in _FAMILIES else ():
        if find_spec(compiler) is not None:
            import_module(f"k3c.codegen.templates.{compiler}")
    if name not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise CodegenError(f"unknown layout family {name!r}", str(type_), f"known: {known}")
    return _FAMILIES[name]
