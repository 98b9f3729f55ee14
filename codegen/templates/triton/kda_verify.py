"""kda_verify and kda_fold: speculative tokens of KDA layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import triton

from k3c.codegen.template import refuse_dtype
from k3c.codegen.templates.triton.kda_node import (
    MAX_HEAD_DIM,
    kda_constexprs,
    kda_cost,
    operand,
    refuse_kda,
)
from k3c.codegen.templates.triton.kda_verify_kernels import kda_fold, kda_verify
from k3c.codegen.triton_template import TritonTemplate
from k3c.codegen.tuning import Config
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Cost, Scalar, Stage
from k3c.targets.target import Target

_ELEMENTS_PER_THREAD = 64
_FOLD_STRIP = 32
_FOLD_THREADS = 128
_RECORDS = ("rec_k", "rec_g", "rec_u", "rec_conv")
_POOLS = ("conv_state", "kda_state")


class KdaVerify(TritonTemplate):
    """`kda_verify`; a block is one head of one segment."""

    name: ClassVar[str] = "kda_verify"
    op: ClassVar[str] = "kda_verify"
    reference: ClassVar[str] = "kda_verify"
    kernels: ClassVar[Mapping[str, Any]] = {"": kda_verify}

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        return refuse_kda(node)

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: rows and segments."""
        segments = operand(node, "slots").sizes[0]
        return (("rows", node.operands[0].type.sizes[0]), ("segments", segments))

    def configs(self, node: Node, target: Target) -> tuple[Config, ...]:
        """Return the numbers of warps worth measuring; more than that hold elements twice."""
        width = triton.next_power_of_2(operand(node, "kda_state").sizes[2])
        least = max(width * width // _ELEMENTS_PER_THREAD, target.lanes)
        return tuple({"num_warps": n // target.lanes} for n in (least, 2 * least))

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launch."""
        constexprs = kda_constexprs(node)
        rows, segments = node.operands[0].type.sizes[0], operand(node, "slots").sizes[0]
        return (
            self.stage(
                node, target, "", (constexprs["H"] * segments, 1, 1),
                num_warps=self.config(node, target)["num_warps"], pdl=target.kind == "cuda",
                WIDTH=operand(node, "rec_k").sizes[1],
                R=triton.next_power_of_2(-(-rows // segments)), **constexprs,
            ),
        )  # fmt: skip

    def cost(self, node: Node, target: Target) -> Cost:
        """Return what one launch costs when every row is live."""
        _, heads, key, value = operand(node, "kda_state").sizes
        rows, width = operand(node, "f_a").sizes
        return kda_cost(node, (*_POOLS, *_RECORDS), rows * heads * key * (6 * value + 2 * width))


class KdaFold(TritonTemplate):
    """`kda_fold`; a block is some columns of one head of one request."""

    name: ClassVar[str] = "kda_fold"
    op: ClassVar[str] = "kda_fold"
    reference: ClassVar[str] = "kda_fold"
    kernels: ClassVar[Mapping[str, Any]] = {"": kda_fold}

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        _, _, key, value = operand(node, "kda_state").sizes
        if key != value or key > MAX_HEAD_DIM:
            limit = f"kda_fold takes keys and values of one width up to {MAX_HEAD_DIM}"
            return Refusal(limit, f"{key} and {value}")
        return refuse_dtype(node, 0, ("bf16", "f32")) or refuse_dtype(node, 1, ("f32", "bf16"))

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launch."""
        _, heads, key, _ = operand(node, "kda_state").sizes
        padded = triton.next_power_of_2(key)
        strip = min(_FOLD_STRIP, padded)
        blocks = operand(node, "slots").sizes[0] * heads * (padded // strip)
        return (
            self.stage(
                node, target, "", (blocks, 1, 1),
                num_warps=_FOLD_THREADS // target.lanes, pdl=target.kind == "cuda",
                H=heads, K=key, WIDTH=operand(node, "rec_k").sizes[1], W=strip,
            ),
        )  # fmt: skip

    def cost(self, node: Node, target: Target) -> Cost:
        """Return what one launch costs when every token of every request stands."""
        _, heads, key, value = operand(node, "kda_state").sizes
        requests, width = operand(node, "slots").sizes[0], operand(node, "rec_k").sizes[1]
        flops = 2 * requests * heads * key * value * (width + 1)
        return kda_cost(node, (*_POOLS, *_RECORDS), flops)


TEMPLATES = (KdaVerify(), KdaFold())
