"""kda_fb of decode buckets: every segment has at most one token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import triton

from k3c.codegen.templates.triton.kda_decode_kernels import kda_decode_strips, kda_decode_whole
from k3c.codegen.templates.triton.kda_node import kda_constexprs, kda_cost, operand, refuse_kda
from k3c.codegen.triton_template import TritonTemplate
from k3c.codegen.tuning import Config
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Cost, Stage
from k3c.targets.target import Target

# Elements of a state that a thread may hold: fewer threads would spill.
_ELEMENTS_PER_THREAD = 64


class KdaDecode(TritonTemplate):
    """`kda_fb` for buckets with one row a segment; a block is one head of one segment.

    Stage `whole` keeps a head's state in registers: everything is asked for at once, which counts
    while there are fewer blocks than multiprocessors. Stage `strips` takes it in parts, so that
    several blocks fit a multiprocessor, which counts after that.
    """

    name: ClassVar[str] = "kda_decode"
    op: ClassVar[str] = "kda_fb"
    reference: ClassVar[str] = "kda_fb"
    kernels: ClassVar[Mapping[str, Any]] = {"whole": kda_decode_whole, "strips": kda_decode_strips}

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        rows, segments = node.operands[0].type.sizes[0], operand(node, "slots").sizes[0]
        if rows != segments:
            found = f"{rows} rows in {segments} segments"
            return Refusal("kda_decode takes one row a segment", found)
        return refuse_kda(node)

    def configs(self, node: Node, target: Target) -> tuple[Config, ...]:
        """Return strips (0: whole) and threads: by the number of blocks, whole or strips first."""
        _, heads, key, _ = operand(node, "kda_state").sizes
        width = triton.next_power_of_2(key)
        least = max(width * width // _ELEMENTS_PER_THREAD, target.lanes)
        whole = [{"strip": 0, "num_warps": n // target.lanes} for n in (least, 2 * least)]
        narrow = [
            {"strip": min(strip, width), "num_warps": threads // target.lanes}
            for strip, threads in ((32, 128), (16, 256), (32, 256))
        ]
        unique = [c for i, c in enumerate(narrow) if c not in narrow[:i]]
        few = heads * operand(node, "slots").sizes[0] <= target.cores
        return tuple(whole + unique if few else unique + whole)

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launch."""
        config, constexprs = self.config(node, target), kda_constexprs(node)
        name = "strips" if config["strip"] else "whole"
        if config["strip"]:
            constexprs["W"] = config["strip"]
        blocks = constexprs["H"] * operand(node, "slots").sizes[0]
        return (
            self.stage(
                node, target, name, (blocks, 1, 1),
                num_warps=config["num_warps"], pdl=target.kind == "cuda", **constexprs,
            ),
        )  # fmt: skip

    def cost(self, node: Node, target: Target) -> Cost:
        """Return what one launch costs when every segment is live."""
        _, heads, key, value = operand(node, "kda_state").sizes
        rows, width = operand(node, "f_a").sizes
        # Two reads and one update of the state, a multiply and an add each; the forget product.
        flops = rows * heads * key * (6 * value + 2 * width)
        return kda_cost(node, ("conv_state", "kda_state"), flops)


TEMPLATES = (KdaDecode(),)
