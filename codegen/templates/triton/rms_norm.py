"""rms_norm: rows scaled to a mean square of one, times a weight. A block is a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import triton
import triton.language as tl

from k3c.codegen.template import refuse_dtype
from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs
from k3c.codegen.triton_template import TritonTemplate
from k3c.codegen.tuning import Config
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Cost, Stage
from k3c.targets.target import Target

# Elements of a row that one warp of 32 lanes takes: 16 bytes a lane, twice.
_ELEMENTS_PER_WARP = 512
_MAX_THREADS = 1024
# A square and its addition, then two multiplications.
_FLOPS_PER_ELEMENT = 4


@triton.jit
def rms_norm(
    x, weight, y, rows,
    D: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalise one row."""
    columns = tl.arange(0, triton.next_power_of_2(D))
    factors = tl.load(weight + columns, mask=columns < D, other=0.0)
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64) * D
    values = tl.load(x + at + columns, mask=columns < D, other=0.0).to(tl.float32)
    release_dependents(PDL)
    scale = tl.rsqrt(tl.sum(values * values, 0) / D + EPS)
    result = values * scale * factors
    tl.store(y + at + columns, result.to(y.dtype.element_ty), mask=columns < D)


class RmsNorm(TritonTemplate):
    """`rms_norm`: x A[T, D], w f32[D] -> A[T, D]."""

    name: ClassVar[str] = "rms_norm"
    op: ClassVar[str] = "rms_norm"
    reference: ClassVar[str] = "rms_norm"
    kernels: ClassVar[Mapping[str, Any]] = {"": rms_norm}

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        return refuse_dtype(node, 0, ("f32", "bf16")) or refuse_dtype(node, 1, ("f32",))

    def configs(self, node: Node, target: Target) -> tuple[Config, ...]:
        """Return the numbers of warps worth measuring: by the width, never by the rows (NU05)."""
        width = triton.next_power_of_2(node.operands[0].type.sizes[1])
        most = _MAX_THREADS // target.lanes
        rule = min(max(width * 32 // (_ELEMENTS_PER_WARP * target.lanes), 1), most)
        near = dict.fromkeys(min(max(n, 1), most) for n in (rule, 2 * rule, rule // 2))
        return tuple({"num_warps": n} for n in near)

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launch: a block a row."""
        rows, width = node.operands[0].type.sizes
        return (
            self.stage(
                node, target, "", (rows, 1, 1),
                num_warps=self.config(node, target)["num_warps"], pdl=target.kind == "cuda",
                D=width, EPS=node.attrs["eps"],
            ),
        )  # fmt: skip

    def cost(self, node: Node, target: Target) -> Cost:
        """Return bytes once, and the operations of the norm."""
        moved = super().cost(node, target)
        flops = _FLOPS_PER_ELEMENT * node.operands[0].type.elements
        return Cost(moved.read_bytes, moved.write_bytes, flops)


TEMPLATES = (RmsNorm(),)
