"""token_logprob: log softmax of each row at its target, in two passes of one block over the row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import triton
import triton.language as tl

from k3c.codegen.template import operand_bytes, refuse_dtype, result_bytes
from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs
from k3c.codegen.triton_template import TritonTemplate
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Cost, Stage
from k3c.targets.target import Target

_ELEMENTS = 4096  # of a tile's row: 16 bytes a thread
_THREADS = 1024
_ROWS = tl.constexpr(4)  # rows of a tile, in flight at once


@triton.jit
def load_tile(row, start, V: tl.constexpr, TILE: tl.constexpr):
    """Return logits f32[_ROWS, TILE]; -inf behind the vocabulary."""
    at = start + tl.arange(0, _ROWS)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    return tl.load(row + at, mask=at < V, other=float("-inf"))


@triton.jit
def token_logprob(
    logits, targets, logprobs, rows, V: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Store one row's log probability; 0 without a target, NaN for one past the vocabulary."""
    t = tl.program_id(0)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    target = tl.load(targets + t)
    result = tl.where(target < V, 0.0, float("nan"))
    if (target >= 0) & (target < V):
        row = logits + t.to(tl.int64) * V
        highest = tl.full((TILE,), float("-inf"), tl.float32)
        for start in range(0, V, _ROWS * TILE):
            highest = tl.maximum(highest, tl.max(load_tile(row, start, V, TILE), axis=0))
        # A NaN may be skipped here: it returns in the sum.
        best = tl.max(highest, axis=0)
        total = tl.zeros((TILE,), tl.float32)
        for start in range(0, V, _ROWS * TILE):
            total += tl.sum(tl.exp(load_tile(row, start, V, TILE) - best), axis=0)
        # Lanes sum a few dozen values each; a vocabulary's worth of float32 would drift.
        mass = tl.sum(total.to(tl.float64), axis=0)
        chosen = tl.load(row + target).to(tl.float64) - best.to(tl.float64)
        result = (chosen - tl.log(mass)).to(tl.float32)
    tl.store(logprobs + t, result)


class TokenLogprob(TritonTemplate):
    """`token_logprob` for any number of rows."""

    name, op, reference = "triton_token_logprob", "token_logprob", "token_logprob"
    kernels: ClassVar[Mapping[str, Any]] = {"": token_logprob}

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        return refuse_dtype(node, 0, ("f32",))

    def cost(self, node: Node, target: Target) -> Cost:
        """Return bytes and operations of one launch."""
        flops = 5 * node.operands[0].type.elements
        return Cost(operand_bytes(node), result_bytes(node), flops)

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launch: a block a row."""
        rows, vocab = node.operands[0].type.sizes
        tile = min(_ELEMENTS, triton.next_power_of_2(vocab))
        warps = max(1, min(_THREADS, tile // 4) // target.lanes)
        pdl = target.kind == "cuda"
        return (
            self.stage(
                node, target, "", (rows, 1, 1), num_warps=warps, pdl=pdl, V=vocab, TILE=tile
            ),
        )


TEMPLATES = (TokenLogprob(),)
