"""combine and combine_norm: weighted sum of a token's expert rows, and the norm after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from triton import next_power_of_2

from k3c.codegen.template import refuse_dtype
from k3c.codegen.templates.triton import combine_kernel
from k3c.codegen.triton_template import TritonTemplate
from k3c.codegen.tuning import Config
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Cost, Stage
from k3c.targets.target import Target

_NORM_ELEMENTS = 8  # columns a thread of combine_norm, of every one of the k rows at once
_WIDEST = 16384  # columns of one block


class _Combine(TritonTemplate):
    """The weighted sum; `combine_norm` has the norm's weight as third operand."""

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        return refuse_dtype(node, 0, ("f32", "bf16")) or refuse_dtype(node, 1, ("f32",))

    def cost(self, node: Node, target: Target) -> Cost:
        """Return bytes once, and a multiplication and an addition per routed element."""
        moved = super().cost(node, target)
        return Cost(moved.read_bytes, moved.write_bytes, 2 * node.operands[0].type.elements)

    def sizes(self, node: Node) -> dict[str, Any]:
        """Return the constexprs of both ops."""
        _, k, width = node.operands[0].type.sizes
        return {"K": k, "KP": next_power_of_2(k), "L": width}


class Combine(_Combine):
    """`combine`: rows A[T, k, L], weights f32[T, k] -> A[T, L]."""

    name, op, reference = "triton_combine", "combine", "combine"
    kernels: ClassVar[Mapping[str, Any]] = {"": combine_kernel.combine}

    def configs(self, node: Node, target: Target) -> tuple[Config, ...]:
        """Return the columns of a block: few for few tokens, so that many blocks read."""
        rows, _, width = node.operands[0].type.sizes
        blocks = [
            min(next_power_of_2(width), n) for n in ((256, 512) if rows < 64 else (1024, 512))
        ]
        return tuple({"columns": n, "warps": 4} for n in dict.fromkeys(blocks))

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launch."""
        config, pdl = self.config(node, target), target.kind == "cuda"
        rows, _, width = node.operands[0].type.sizes
        grid = (rows * -(-width // config["columns"]), 1, 1)
        constants = {**self.sizes(node), "BLOCK": config["columns"]}
        return (
            self.stage(node, target, "", grid, num_warps=config["warps"], pdl=pdl, **constants),
        )


class CombineNorm(_Combine):
    """`combine_norm`: rows A[T, k, L], weights f32[T, k], norm f32[L] -> A[T, L]."""

    name, op, reference = "triton_combine_norm", "combine_norm", "combine_norm"
    kernels: ClassVar[Mapping[str, Any]] = {"": combine_kernel.combine_norm}

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        width = node.operands[0].type.sizes[2]
        if width > _WIDEST:
            return Refusal(f"combine_norm takes rows of at most {_WIDEST}", width)
        return super().accepts(node, target) or refuse_dtype(node, 2, ("f32",))

    def configs(self, node: Node, target: Target) -> tuple[Config, ...]:
        """Return the warps of a block, which is one token."""
        width, most = next_power_of_2(node.operands[0].type.sizes[2]), 1024 // target.lanes
        rule = max(1, min(width // (target.lanes * _NORM_ELEMENTS), most))
        more = [n for n in (rule, rule * 2, rule // 2) if 1 <= n <= most]
        return tuple({"warps": n} for n in more)

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launch."""
        rows, _, width = node.operands[0].type.sizes
        eps = node.attrs["eps"]
        assert isinstance(eps, int | float), f"eps {eps!r} is no number"
        constants = {**self.sizes(node), "BLOCK": next_power_of_2(width), "EPS": float(eps)}
        warps, pdl = self.config(node, target)["warps"], target.kind == "cuda"
        return (self.stage(node, target, "", (rows, 1, 1), num_warps=warps, pdl=pdl, **constants),)


TEMPLATES = (Combine(), CombineNorm())
