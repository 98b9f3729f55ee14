"""mla_absorb_q and mla_absorb_v: into the latent space and out of it, one small product a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from k3c.codegen.template import refuse_dtype, result_bytes
from k3c.codegen.templates.triton.mla_absorb_kernel import absorb_q, absorb_v
from k3c.codegen.templates.triton.mla_layout import HalfLayout
from k3c.codegen.triton_template import TritonTemplate
from k3c.codegen.tuning import Config
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Cost, Stage
from k3c.targets.target import Target

_ACTS = ("f32", "bf16")
_MIN_TILE = 16  # smallest side of a matrix product


@dataclass(frozen=True)
class AbsorbShape:
    """The facts of a node that its kernel and its configurations depend on.

    Attributes:
        rows: T.
        heads: n.
        nope: dn.
        value: dv.
        latent: r.
        wide: Whether the product is computed in f32, without tensor cores.
    """

    rows: int
    heads: int
    nope: int
    value: int
    latent: int
    wide: bool

    @staticmethod
    def of(node: Node) -> AbsorbShape:
        """Return the shape of a node."""
        heads, nope, value = (_integer(node, name) for name in ("heads", "nope_dim", "v_dim"))
        kinds = [v.type.dtype.name for v in node.operands]
        wide = kinds[1] == "f32" or (node.op == "mla_absorb_q" and kinds[0] == "f32")
        rows, latent = node.operands[0].type.sizes[0], node.operands[1].type.sizes[1]
        return AbsorbShape(rows, heads, nope, value, latent, wide)

    def programs(self, columns: int, config: Config) -> int:
        """Return the programs for heads of `columns` columns."""
        return -(-self.rows // config["BM"]) * self.heads * -(-columns // config["BN"])


class _MlaAbsorb(TritonTemplate):
    """What the two templates share; `half` names the layout."""

    half: ClassVar[str]

    def layouts(self, node: Node, target: Target) -> Mapping[int, str]:
        """Return the layout of kv_b's half."""
        return {1: self._layout(node).name}

    def cost(self, node: Node, target: Target) -> Cost:
        """Return half of kv_b read once, and a multiplication and an addition per product."""
        layout, weight = self._layout(node), node.operands[1].type
        rows, (_, latent) = node.operands[0].type.sizes[0], weight.sizes
        products = layout.heads * layout.head_rows * latent
        others = sum(v.type.nbytes for i, v in enumerate(node.operands) if i != 1)
        read = products * int(weight.dtype.bits) // 8 + others
        return Cost(read, result_bytes(node), 2 * rows * products)

    def _layout(self, node: Node) -> HalfLayout:
        shape = AbsorbShape.of(node)
        return HalfLayout(self.half, shape.heads, shape.nope, shape.value)

    def _refuse_weight(self, node: Node) -> Refusal | None:
        shape, rows = AbsorbShape.of(node), node.operands[1].type.sizes[0]
        wanted = shape.heads * (shape.nope + shape.value)
        if rows != wanted:
            return Refusal(f"kv_b must have {wanted} rows", rows)
        return refuse_dtype(node, 1, _ACTS)


class MlaAbsorbQ(_MlaAbsorb):
    """`mla_absorb_q`: q A[T, n * (dn + dr)], kv_b -> f32[T, n, r + dr]."""

    name: ClassVar[str] = "mla_absorb_q"
    op: ClassVar[str] = "mla_absorb_q"
    reference: ClassVar[str] = "mla_absorb_q"
    half: ClassVar[str] = "q"
    kernels: ClassVar[Mapping[str, Any]] = {"": absorb_q}

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        (rows, width), out = node.operands[0].type.sizes, node.results[0].type
        heads, nope = _integer(node, "heads"), _integer(node, "nope_dim")
        wanted = (rows, heads, node.operands[1].type.sizes[1] + width // heads - nope)
        if (out.dtype.name, out.sizes) != ("f32", wanted) or width % heads:
            return Refusal(f"the result must be f32{list(wanted)}", str(out))
        return refuse_dtype(node, 0, _ACTS) or self._refuse_weight(node)

    def configs(self, node: Node, target: Target) -> tuple[Config, ...]:
        """Return the configurations worth measuring, the rule's choice first."""
        shape = AbsorbShape.of(node)
        if shape.wide:
            return ({"BM": 16, "BN": 32, "warps": 4},)
        if shape.rows <= 16:
            few = ((32, 2), (64, 4), (128, 4)) if shape.heads <= 16 else ((128, 4), (64, 4))
            return tuple({"BM": 16, "BN": columns, "warps": warps} for columns, warps in few)
        if shape.rows <= 64:
            rows = max(_MIN_TILE, _power(shape.rows))
            return tuple({"BM": rows, "BN": columns, "warps": 4} for columns in (64, 128))
        return (
            {"BM": 128, "BN": 128, "warps": 8},
            {"BM": 64, "BN": 128, "warps": 4},
            {"BM": 128, "BN": 256, "warps": 8},
        )

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return one launch."""
        shape, config = AbsorbShape.of(node), self.config(node, target)
        columns = min(config["BN"], max(_MIN_TILE, _power(shape.latent)))
        rope = node.results[0].type.sizes[2] - shape.latent
        launch = self.stage(
            node, target, "", (shape.programs(shape.latent, {**config, "BN": columns}), 1, 1),
            num_warps=config["warps"], pdl=target.kind == "cuda",
            HEADS=shape.heads, NOPE=shape.nope, ROPE=rope, LATENT=shape.latent,
            NOPE_PAD=max(_MIN_TILE, _power(shape.nope)), ROPE_PAD=_power(max(rope, 1)),
            BM=config["BM"], BN=columns,
        )  # fmt: skip
        return (launch,)


class MlaAbsorbV(_MlaAbsorb):
    """`mla_absorb_v`: o_lat f32[T, n, r], kv_b, maybe z A[T, n * dv] -> A[T, n * dv]."""

    name: ClassVar[str] = "mla_absorb_v"
    op: ClassVar[str] = "mla_absorb_v"
    reference: ClassVar[str] = "mla_absorb_v"
    half: ClassVar[str] = "v"
    kernels: ClassVar[Mapping[str, Any]] = {"": absorb_v}

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        (rows, heads, latent), out = node.operands[0].type.sizes, node.results[0].type
        wanted = (rows, _integer(node, "heads") * _integer(node, "v_dim"))
        if out.sizes != wanted or heads * _integer(node, "v_dim") != wanted[1]:
            return Refusal(f"the result must be {list(wanted)}", str(out))
        if latent != node.operands[1].type.sizes[1]:
            return Refusal(f"kv_b must be {latent} wide", node.operands[1].type.sizes[1])
        for other in node.operands[2:]:
            if other.type != out:
                return Refusal(f"the gate must be {out}", str(other.type))
        if out.dtype.name not in _ACTS:
            return Refusal("the result must be f32 or bf16", out.dtype.name)
        return refuse_dtype(node, 0, ("f32",)) or self._refuse_weight(node)

    def configs(self, node: Node, target: Target) -> tuple[Config, ...]:
        """Return the configurations worth measuring, the rule's choice first."""
        shape = AbsorbShape.of(node)
        whole = max(_MIN_TILE, _power(shape.latent))
        if shape.wide:
            return ({"BM": 16, "BN": 32, "BK": 32, "warps": 4, "stages": 2},)
        if shape.rows <= 16:
            few = (16, 32, 64) if shape.heads <= 16 else (64, 32)
            return tuple(
                {"BM": 16, "BN": columns, "BK": whole, "warps": 4, "stages": 1} for columns in few
            )
        if shape.rows <= 64:
            return tuple(
                {"BM": rows, "BN": columns, "BK": 128, "warps": 4, "stages": 3}
                for rows, columns in ((16, 32), (32, 32), (16, 64), (64, 64))
            )
        return (
            {"BM": 128, "BN": 128, "BK": 64, "warps": 8, "stages": 2},
            {"BM": 64, "BN": 128, "BK": 64, "warps": 4, "stages": 3},
            {"BM": 128, "BN": 128, "BK": 32, "warps": 8, "stages": 3},
        )

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return one launch."""
        shape, config = AbsorbShape.of(node), self.config(node, target)
        columns = min(config["BN"], max(_MIN_TILE, _power(shape.value)))
        inner = min(config["BK"], max(_MIN_TILE, _power(shape.latent)))
        gated = len(node.operands) > 2
        launch = self.stage(
            node, target, "", (shape.programs(shape.value, {**config, "BN": columns}), 1, 1),
            num_warps=config["warps"], num_stages=config["stages"], pdl=target.kind == "cuda",
            HEADS=shape.heads, LATENT=shape.latent, VALUE=shape.value,
            LATENT_PAD=-(-shape.latent // inner) * inner, GATED=int(gated),
            BM=config["BM"], BN=columns, BK=inner, **({} if gated else {"z": 0}),
        )  # fmt: skip
        return (launch,)


def _integer(node: Node, name: str) -> int:
    found = node.attrs[name]
    assert isinstance(found, int), f"{node.op}: {name} is {found!r}"
    return found


def _power(count: int) -> int:
    """Return the smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


TEMPLATES = (MlaAbsorbQ(), MlaAbsorbV())
