"""token_logprob: log softmax of each row at its target, in two passes over the row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from k3c.codegen.template import operand_bytes, refuse_dtype, result_bytes
from k3c.codegen.templates.tvm.rowwise import RowTemplate
from k3c.codegen.templates.tvm.vector import exp, hold, span, splat
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Constant, Cost
from k3c.targets.target import Target


@dataclass(frozen=True)
class _Shape:
    vocab: int
    lanes: int

    @property
    def whole(self) -> int:
        """Entries in whole vectors."""
        return self.vocab - self.vocab % self.lanes


class TokenLogprob(RowTemplate):
    """`token_logprob` for any number of rows."""

    name = "token_logprob"
    op = "token_logprob"
    reference = "token_logprob"

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        return refuse_dtype(node, 0, ("f32",))

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the compile-time constants."""
        return {"vocab": node.operands[0].type.sizes[1], "lanes": target.lanes}

    def cost(self, node: Node, target: Target) -> Cost:
        """Return bytes and operations of one launch."""
        flops = 20 * node.operands[0].type.elements
        return Cost(operand_bytes(node), result_bytes(node), flops)

    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        return _kernel(_Shape(int(constants["vocab"]), int(constants["lanes"])))


@T.inline
def _largest(c, logits, row, best):
    """best[0] = largest logit of a row. A NaN may be skipped here: it returns in the sum."""
    high = T.alloc_buffer((c.lanes,), "float32")
    high[span(0, c.lanes)] = splat(float("-inf"), c.lanes)
    for v in range(c.whole // c.lanes):
        x = T.meta_var(hold(logits[row, span(v * c.lanes, c.lanes)]))
        old = T.meta_var(high[span(0, c.lanes)])
        high[span(0, c.lanes)] = T.Select(x > old, x, old)
    best[0] = T.float32(float("-inf"))
    for j in T.unroll(c.lanes):
        best[0] = T.Select(high[j] > best[0], high[j], best[0])
    for j in range(c.vocab - c.whole):
        y = T.meta_var(hold(logits[row, c.whole + j]))
        best[0] = T.Select(y > best[0], y, best[0])


@T.inline
def _sum_exp(c, logits, row, best, total):
    """total[0] = sum of exp(logit - best), in float64: a vocabulary's worth of f32 would drift."""
    lane = T.alloc_buffer((c.lanes,), "float64")
    lane[span(0, c.lanes)] = T.broadcast(T.float64(0), c.lanes)
    for v in range(c.whole // c.lanes):
        x = T.meta_var(logits[row, span(v * c.lanes, c.lanes)])
        lane[span(0, c.lanes)] += T.Cast(
            f"float64x{c.lanes}", exp(x - splat(best[0], c.lanes), c.lanes)
        )
    total[0] = T.float64(0)
    for j in T.unroll(c.lanes):
        total[0] += lane[j]
    for j in range(c.vocab - c.whole):
        total[0] += T.Cast("float64", exp(logits[row, c.whole + j] - best[0], 1))


def _kernel(c: _Shape) -> Any:
    @T.prim_func
    def kernel(
        logits_h: T.handle, targets_h: T.handle, logprobs_h: T.handle, rows: T.int64
    ):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        logits = T.decl_buffer((rows, c.vocab), "float32", data=logits_h)
        targets = T.decl_buffer((rows,), "int32", data=targets_h)
        logprobs = T.decl_buffer((rows,), "float32", data=logprobs_h)
        for row in T.parallel(rows):
            best = T.alloc_buffer((1,), "float32")
            total = T.alloc_buffer((1,), "float64")
            logprobs[row] = T.float32(0)
            if targets[row] >= c.vocab:
                logprobs[row] = T.float32(float("nan"))
            if targets[row] >= 0 and targets[row] < c.vocab:
                _largest(c, logits, row, best)
                _sum_exp(c, logits, row, best, total)
                chosen = T.meta_var(T.Cast("float64", logits[row, targets[row]]))
                logprobs[row] = T.Cast(
                    "float32", chosen - T.Cast("float64", best[0]) - T.log(total[0])
                )

    return kernel


TEMPLATES = (TokenLogprob(),)
