"""What the two KDA templates share: constants, layout of the taps, refusals, costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from k3c.codegen.template import (
    Array,
    LayoutFamily,
    operand_bytes,
    refuse_dtype,
    register_layout,
    result_bytes,
)
from k3c.codegen.templates.tvm.vector import storage
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.ir.types import TensorType
from k3c.targets.catalogue import Constant, Cost, Scalar
from k3c.targets.target import Target

TAPS = 4  # the convolution's width; its state holds TAPS - 1 raw rows
_TAPS_LAYOUT = f"taps_f32.{TAPS}"
_CONV_WEIGHTS = (6, 7, 8)
# Rows of a head's values stay below TVM's limit of 1024 bytes for buffers on the stack.
_MAX_HEAD_DIM = 252
_STATE = 13


@dataclass(frozen=True)
class KdaShape:
    """Compile-time constants of a KDA kernel.

    Attributes:
        heads: H.
        key: K, key width of a head.
        value: V, value width of a head.
        lanes: f32 elements of a vector; divides K and V.
        act: Activation dtype, "bf16" or "f32".
        lower_bound: Bound of the log decay; "none" selects the unbounded softplus gate.
        scale: Factor on the normalised query.
        l2_eps: Epsilon of the query and key norms.
        eps: Epsilon of the output norm.
    """

    heads: int
    key: int
    value: int
    lanes: int
    act: str
    lower_bound: float | str
    scale: float
    l2_eps: float
    eps: float

    @property
    def keys(self) -> int:
        """Channels of all heads' keys."""
        return self.heads * self.key

    @property
    def values(self) -> int:
        """Channels of all heads' values."""
        return self.heads * self.value

    @property
    def channels(self) -> int:
        """Channels of the convolution state: q, k and v."""
        return 2 * self.keys + self.values

    @property
    def storage(self) -> str:
        """Dtype of an activation buffer."""
        return storage(self.act)

    def strip(self, vectors: int) -> int:
        """Return the widest strip of at most `vectors` vectors whose width divides V."""
        counts = range(vectors, 0, -1)
        return next(n * self.lanes for n in counts if self.value % (n * self.lanes) == 0)


def pack_taps(type_: TensorType, arrays: Sequence[Array]) -> Array:
    """Return f32[P, 4] as the bytes of f32[4, P]: one tap of neighbouring channels is a vector."""
    taps = np.asarray(arrays[0], np.float32).reshape(type_.sizes)
    return np.ascontiguousarray(taps.T).reshape(-1).view(np.uint8)


def unpack_taps(type_: TensorType, data: Array) -> tuple[Array, ...]:
    """Return f32[P, 4]."""
    channels, taps = type_.sizes
    return (np.ascontiguousarray(data.view(np.float32).reshape(taps, channels).T),)


register_layout(LayoutFamily("taps_f32", pack_taps, unpack_taps, lambda type_: type_.nbytes))


def refuse_kda(node: Node) -> Refusal | None:
    """Return why no KDA kernel here implements a node, or None."""
    _, _, key, value = node.operands[_STATE].type.sizes
    taps = node.operands[_CONV_WEIGHTS[0]].type.sizes[1]
    if taps != TAPS:
        return Refusal(f"kda kernels convolve over {TAPS} tokens", str(taps))
    if key % 4 or value % 4 or max(key, value) > _MAX_HEAD_DIM:
        limit = f"kda head widths must be multiples of 4, at most {_MAX_HEAD_DIM}"
        return Refusal(limit, f"{key} and {value}")
    return refuse_dtype(node, 0, ("bf16", "f32")) or refuse_dtype(node, _STATE, ("f32",))


def kda_layouts() -> Mapping[int, str]:
    """Return the layout of the convolution weights."""
    return dict.fromkeys(_CONV_WEIGHTS, _TAPS_LAYOUT)


def kda_constants(node: Node, target: Target) -> Mapping[str, Constant]:
    """Return the fields of `KdaShape`."""
    _, heads, key, value = node.operands[_STATE].type.sizes
    bound = node.attrs["lower_bound"]
    assert isinstance(bound, float | int | str), f"lower_bound is {bound!r}"
    widths = (target.lanes, 8, 4)
    numbers = {name: _number(node, name) for name in ("scale", "l2_eps", "eps")}
    return {
        "heads": heads,
        "key": key,
        "value": value,
        "lanes": next(n for n in widths if key % n == 0 and value % n == 0),
        "act": node.operands[0].type.dtype.name,
        "lower_bound": bound,
        **numbers,
    }


def kda_shape(constants: Mapping[str, Constant]) -> KdaShape:
    """Return the constants as a shape."""
    return KdaShape(**constants)  # type: ignore[arg-type]


def kda_scalars(node: Node) -> tuple[Scalar, ...]:
    """Return the run-time integers: rows, segments, slots."""
    return (
        ("rows", node.operands[0].type.sizes[0]),
        ("segments", node.operands[14].type.sizes[0]),
        ("slots", node.operands[_STATE].type.sizes[0]),
    )


def kda_cost(node: Node) -> Cost:
    """Return what one launch costs when every segment is live: its state is read and written."""
    slots, heads, key, value = node.operands[_STATE].type.sizes
    rows, segments = node.operands[0].type.sizes[0], node.operands[14].type.sizes[0]
    pools = [node.operands[i].type.nbytes for i in (12, _STATE)]
    live = sum(pools) * segments // slots
    read = operand_bytes(node) - sum(pools) + live
    write = result_bytes(node) - sum(pools) + live
    # Per row and head: two reads and one update of the state, a multiply and an add each.
    return Cost(read, write, 6 * rows * heads * key * value)


def _number(node: Node, name: str) -> float:
    value = node.attrs[name]
    assert isinstance(value, float | int), f"{name} is {value!r}"
    return float(value)
