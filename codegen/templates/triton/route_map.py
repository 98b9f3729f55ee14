"""map_experts, and route_dispatch with a map: experts that a map places on ranks.

In modules of their own, so that kernels for experts by number stay the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from k3c.codegen.template import first_expert, local_experts, refuse_dtype
from k3c.codegen.templates.triton import route_map_kernel
from k3c.codegen.templates.triton.route import RouteDispatch
from k3c.codegen.triton_template import TritonTemplate
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Scalar, Stage
from k3c.targets.target import Target

_BLOCK = 256  # routed rows of a block: two a thread
_MAP = 2  # which operand the map is, of both ops
_SORT_STAGES = tuple(name for name in RouteDispatch.kernels if name not in ("few", "choose"))


class MapExperts(TritonTemplate):
    """`map_experts`: weights f32[T, k], experts i32[T, k] -> those of this rank, by its slots."""

    name, op, reference = "triton_map_experts", "map_experts", "map_experts"
    kernels: ClassVar[Mapping[str, Any]] = {
        "table": route_map_kernel.map_by_table,
        "number": route_map_kernel.map_by_number,
    }

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        return refuse_dtype(node, 0, ("f32",)) or refuse_dtype(node, 1, ("i32",))

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: tokens, the first expert of this rank."""
        return ("rows", node.operands[0].type.sizes[0]), first_expert(node)

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launch."""
        kind, mapped = node.operands[1].type, len(node.operands) > _MAP
        constants: dict[str, Any] = {
            "K": kind.sizes[1], "COUNT": local_experts(node, 0), "BLOCK": _BLOCK,
            "WIDTH": node.operands[_MAP].type.sizes[1] if mapped else 0,
        }  # fmt: skip
        grid, pdl = (-(-kind.elements // _BLOCK), 1, 1), target.kind == "cuda"
        name = "table" if mapped else "number"
        return (self.stage(node, target, name, grid, pdl=pdl, **constants),)


class RoutePlaced(RouteDispatch):
    """`route_dispatch` of the experts that a map gives this rank."""

    name = "triton_route_placed"
    kernels: ClassVar[Mapping[str, Any]] = {
        "few": route_map_kernel.place_few,
        "choose": route_map_kernel.place_chosen,
        **dict.fromkeys(_SORT_STAGES, route_map_kernel.place_stage),
    }

    mapped = True

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integer: tokens."""
        return (("rows", node.operands[0].type.sizes[0]),)

    def choice_constants(self, node: Node) -> dict[str, Any]:
        """Return the constexprs of a choice, but for how it is dealt to warps."""
        return {**super().choice_constants(node), "WIDTH": node.operands[_MAP].type.sizes[1]}


TEMPLATES = (MapExperts(), RoutePlaced())
