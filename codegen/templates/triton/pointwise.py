"""add, sigmoid_mul, situ, residual_join and advance: one value in, one value out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from k3c.codegen.template import refuse_dtype
from k3c.codegen.templates.triton import pointwise_kernel
from k3c.codegen.triton_template import TritonTemplate
from k3c.ir.graph import LayerAttr, Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Constant, Scalar, Stage
from k3c.targets.target import Target

_BLOCK = 1024  # elements of a block: 8 a thread, two loads of 16 bytes in bf16
_SEGMENTS = 128  # segments of a block of advance


class _Binary(TritonTemplate):
    """Two operands of one shape, one result."""

    kernels: ClassVar[Mapping[str, Any]] = {"": pointwise_kernel.binary}

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        return refuse_dtype(node, 0, ("f32", "bf16")) or refuse_dtype(
            node, 1, (node.operands[0].type.dtype.name,)
        )

    def constexprs(self, node: Node) -> dict[str, Constant]:
        """Return the constexprs but for the sizes."""
        return {"OP": self.op, "BETA": 1.0, "LINEAR_BETA": "none"}

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launch."""
        kind = node.results[0].type
        width = kind.elements // kind.sizes[0]
        grid, pdl = (-(-kind.elements // _BLOCK), 1, 1), target.kind == "cuda"
        sizes: dict[str, Any] = {"WIDTH": width, "BLOCK": _BLOCK, **self.constexprs(node)}
        return (self.stage(node, target, "", grid, pdl=pdl, **sizes),)


class Add(_Binary):
    """`add`: the sum, rounded once."""

    name, op, reference = "triton_add", "add", "add"


class SigmoidMul(_Binary):
    """`sigmoid_mul`: a * sigmoid(z); the sigmoid is rounded before the product."""

    name, op, reference = "triton_sigmoid_mul", "sigmoid_mul", "sigmoid_mul"


class Situ(_Binary):
    """`situ`: the gated activation of two tensors."""

    name, op, reference = "triton_situ", "situ", "situ"

    def constexprs(self, node: Node) -> dict[str, Constant]:
        """Return the constexprs but for the sizes."""
        beta, cap = node.attrs["beta"], node.attrs["linear_beta"]
        assert isinstance(beta, int | float), f"beta {beta!r} is no number"
        assert isinstance(cap, int | float | str), f"linear_beta {cap!r} is no number"
        linear = cap if isinstance(cap, str) else float(cap)
        return {"OP": self.op, "BETA": float(beta), "LINEAR_BETA": linear}


class ResidualJoin(_Binary):
    """`residual_join`: prefix + delta, or delta alone at a restart; the prefix is not read then."""

    name, op, reference = "triton_residual_join", "residual_join", "residual_join"
    kernels: ClassVar[Mapping[str, Any]] = {"": pointwise_kernel.residual_join}

    def constexprs(self, node: Node) -> dict[str, Constant]:
        """Return the constexprs but for the sizes: none."""
        return {}

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: rows, restart."""
        restart = node.attrs["restart"]
        assert isinstance(restart, int | LayerAttr), f"restart {restart!r} is no integer"
        return (*super().scalars(node), ("restart", restart))


class Advance(TritonTemplate):
    """`advance`: ids, context and position of the next decode step, in place."""

    name, op, reference = "triton_advance", "advance", "advance"
    kernels: ClassVar[Mapping[str, Any]] = {"": pointwise_kernel.advance}

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        segments, rows = (node.operands[i].type.sizes[0] for i in (0, 1))
        if segments > rows:
            return Refusal(f"advance needs a row for each of {segments} segments", rows)
        return None

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: segments."""
        return (("segments", node.operands[0].type.sizes[0]),)

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launch."""
        grid = (-(-node.operands[0].type.sizes[0] // _SEGMENTS), 1, 1)
        pdl = target.kind == "cuda"
        return (self.stage(node, target, "", grid, num_warps=4, pdl=pdl, BLOCK=_SEGMENTS),)


TEMPLATES = (Add(), SigmoidMul(), Situ(), ResidualJoin(), Advance())
