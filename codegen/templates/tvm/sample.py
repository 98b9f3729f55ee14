"""sample: one token a request, without sorting the vocabulary.

A task is a request. Probabilities, unnormalised so that the largest is 1, stand in the workspace as
f32; the bits of non-negative floats order as integers, so the thresholds of top-k and top-p are
found by bisection over 30 bits, one vector pass each. Sums are float64 in a fixed order: the same
row gives the same token whatever its neighbours are.

A row that holds a NaN, or whose maximum is not finite, gives token -1: such logits are a fault of
the step, and the engine fails that request instead of reporting token 0 as an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from k3c.codegen.template import operand_bytes, padded, refuse_dtype, result_bytes
from k3c.codegen.templates.tvm.rowwise import RowTemplate
from k3c.codegen.templates.tvm.vector import exp, hold, is_nan, span, splat
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Constant, Cost
from k3c.targets.target import Target

_BLOCK = 64  # entries whose mass is summed at once in the search for the token
_ONE_BITS = 0x3F800000  # the largest probability, 1.0
_BITS = 30  # of a threshold between 0 and 1.0
_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment
_MIX_A, _MIX_B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NO_INDEX = 0x7FFFFFFF


@dataclass(frozen=True)
class _Shape:
    vocab: int
    lanes: int

    @property
    def whole(self) -> int:
        """Entries in whole vectors."""
        return self.vocab - self.vocab % self.lanes

    @property
    def stride(self) -> int:
        """Entries of a workspace row: the vocabulary and zeros up to whole blocks."""
        return padded(self.vocab, _BLOCK)


class Sample(RowTemplate):
    """`sample` for any number of requests."""

    name = "sample"
    op = "sample"
    reference = "sample"

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        return refuse_dtype(node, 0, ("f32",))

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the compile-time constants."""
        return {"vocab": node.operands[0].type.sizes[1], "lanes": target.lanes}

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of every request's probabilities."""
        requests, vocab = node.operands[0].type.sizes
        return 4 * requests * _Shape(vocab, target.lanes).stride

    def cost(self, node: Node, target: Target) -> Cost:
        """Return bytes and operations of one launch without filters."""
        scratch = self.workspace_bytes(node, target)
        read, write = operand_bytes(node) + 2 * scratch, result_bytes(node) + scratch
        return Cost(read, write, 30 * node.operands[0].type.elements)

    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel."""
        return _kernel(_Shape(int(constants["vocab"]), int(constants["lanes"])))


def _times(a: Any, b: int) -> Any:
    """Return a * b mod 2^64 by halves: an overflowing product is undefined for the compiler."""
    low_mask = T.uint64(_MASK)
    low = hold((a & low_mask) * T.uint64(b & _MASK))
    cross = hold(((a >> T.uint64(32)) * T.uint64(b & _MASK)) & low_mask)
    other = hold(((a & low_mask) * T.uint64(b >> 32)) & low_mask)
    high = hold((cross + other + (low >> T.uint64(32))) & low_mask)
    return hold((high << T.uint64(32)) | (low & low_mask))


def _plus(a: Any, b: Any) -> Any:
    """Return a + b mod 2^64 by halves."""
    low_mask, half = T.uint64(_MASK), T.uint64(32)
    low = hold((a & low_mask) + (b & low_mask))
    high = hold(((a >> half) + (b >> half) + (low >> half)) & low_mask)
    return hold((high << half) | (low & low_mask))


def _uniform(seed: Any, position: Any) -> Any:
    """Return u in [0, 1), float64: splitmix64 of seed * golden + position, its upper 24 bits."""
    golden = (T.uint64(_GOLDEN >> 32) << T.uint64(32)) | T.uint64(_GOLDEN & _MASK)
    start = _times(hold(T.Cast("uint64", seed)), _GOLDEN)
    z = _plus(start, hold(T.Cast("uint64", T.Cast("int64", position))))
    z = _plus(z, hold(golden))
    z = _times(hold(z ^ (z >> T.uint64(30))), _MIX_A)
    z = _times(hold(z ^ (z >> T.uint64(27))), _MIX_B)
    z = hold(z ^ (z >> T.uint64(31)))
    return T.Cast("float64", z >> T.uint64(40)) * T.float64(2.0**-24)


@T.inline
def _scan(c, logits, row, best, bad):
    """best[0] = largest logit of a row that is not NaN; bad[0] = 1 where the row holds a NaN."""
    high = T.alloc_buffer((c.lanes,), "float32")
    seen = T.alloc_buffer((c.lanes,), "float32")
    high[span(0, c.lanes)] = splat(float("-inf"), c.lanes)
    seen[span(0, c.lanes)] = splat(0.0, c.lanes)
    for v in range(c.whole // c.lanes):
        x = T.meta_var(hold(logits[row, span(v * c.lanes, c.lanes)]))
        old = T.meta_var(high[span(0, c.lanes)])
        high[span(0, c.lanes)] = T.Select(x > old, x, old)
        seen[span(0, c.lanes)] = T.Select(
            is_nan(x, c.lanes), splat(1.0, c.lanes), seen[span(0, c.lanes)]
        )
    best[0] = T.float32(float("-inf"))
    bad[0] = T.float32(0)
    for j in T.unroll(c.lanes):
        best[0] = T.Select(high[j] > best[0], high[j], best[0])
        bad[0] = T.Select(seen[j] > bad[0], seen[j], bad[0])
    for j in range(c.vocab - c.whole):
        y = T.meta_var(hold(logits[row, c.whole + j]))
        best[0] = T.Select(y > best[0], y, best[0])
        bad[0] = T.Select(is_nan(y, 1), T.float32(1), bad[0])


@T.inline
def _first_best(c, logits, row, best, token):
    """token[0] = lowest index of the largest logit."""
    low = T.alloc_buffer((c.lanes,), "int32")
    low[span(0, c.lanes)] = T.broadcast(T.int32(_NO_INDEX), c.lanes)
    for v in range(c.whole // c.lanes):
        x = T.meta_var(logits[row, span(v * c.lanes, c.lanes)])
        old = T.meta_var(low[span(0, c.lanes)])
        index = T.meta_var(span(v * c.lanes, c.lanes))
        low[span(0, c.lanes)] = T.Select(
            x == splat(best[0], c.lanes), T.Select(old < index, old, index), old
        )
    token[0] = _NO_INDEX
    for j in T.unroll(c.lanes):
        token[0] = T.Select(low[j] < token[0], low[j], token[0])
    for j in range(c.vocab - c.whole):
        if logits[row, c.whole + j] == best[0] and token[0] == _NO_INDEX:
            token[0] = c.whole + j


def _probability(x: Any, best: Any, temperature: Any, lanes: int) -> Any:
    """Return exp((x - best) / temperature); below e^-87, also for x = -inf, it is 0."""
    power = hold((x - best) / temperature)
    zero = splat(0.0, lanes)
    return hold(T.Select(power < splat(-87.0, lanes), zero, exp(power, lanes)))


@T.inline
def _probabilities(c, e, logits, row, best, temperature):
    """e[row] = the probabilities over the largest, and zeros behind the vocabulary."""
    for v in range(c.whole // c.lanes):
        e[row, span(v * c.lanes, c.lanes)] = _probability(
            logits[row, span(v * c.lanes, c.lanes)],
            splat(best[0], c.lanes),
            splat(temperature, c.lanes),
            c.lanes,
        )
    for j in range(c.vocab - c.whole):
        e[row, c.whole + j] = _probability(logits[row, c.whole + j], best[0], temperature, 1)
    for j in range(c.stride - c.vocab):
        e[row, c.vocab + j] = T.float32(0)


@T.inline
def _count(c, e, row, threshold, total):
    """total[0] = number of entries of at least the threshold, which is above 0."""
    lane = T.alloc_buffer((c.lanes,), "int32")
    lane[span(0, c.lanes)] = T.broadcast(T.int32(0), c.lanes)
    for v in range(c.stride // c.lanes):
        lane[span(0, c.lanes)] += T.Select(
            e[row, span(v * c.lanes, c.lanes)] >= splat(threshold, c.lanes),
            T.broadcast(T.int32(1), c.lanes),
            T.broadcast(T.int32(0), c.lanes),
        )
    total[0] = 0
    for j in T.unroll(c.lanes):
        total[0] += lane[j]


@T.inline
def _block_mass(c, e, row, first, threshold, lane, total):
    """total[0] = mass of the block's entries of at least the threshold."""
    lane[span(0, c.lanes)] = T.broadcast(T.float64(0), c.lanes)
    for v in range(_BLOCK // c.lanes):
        x = T.meta_var(hold(e[row, span(first + v * c.lanes, c.lanes)]))
        kept = T.meta_var(T.Select(x >= splat(threshold, c.lanes), x, splat(0.0, c.lanes)))
        lane[span(0, c.lanes)] += T.Cast(f"float64x{c.lanes}", kept)
    total[0] = T.float64(0)
    for j in T.unroll(c.lanes):
        total[0] += lane[j]


@T.inline
def _mass(c, e, row, threshold, total):
    """total[0] = mass of the row's entries of at least the threshold, block by block."""
    lane = T.alloc_buffer((c.lanes,), "float64")
    block = T.alloc_buffer((1,), "float64")
    total[0] = T.float64(0)
    for b in range(c.stride // _BLOCK):
        _block_mass(c, e, row, b * _BLOCK, threshold, lane, block)
        total[0] += block[0]


@T.inline
def _top_k(c, e, row, k, low):
    """low[0] = bits of the k-th largest entry: the largest threshold that keeps at least k."""
    high = T.alloc_buffer((1,), "int32")
    middle = T.alloc_buffer((1,), "int32")
    total = T.alloc_buffer((1,), "int32")
    high[0] = _ONE_BITS + 1
    for _ in range(_BITS):
        if high[0] - low[0] > 1:
            middle[0] = low[0] + (high[0] - low[0]) // 2
            _count(c, e, row, T.reinterpret("float32", middle[0]), total)
            if total[0] >= k:
                low[0] = middle[0]
            else:
                high[0] = middle[0]


@T.inline
def _top_p(c, e, row, p, low):
    """low[0] = bits of the largest threshold whose mass is at least p of the mass kept before."""
    high = T.alloc_buffer((1,), "int32")
    middle = T.alloc_buffer((1,), "int32")
    total = T.alloc_buffer((1,), "float64")
    wanted = T.alloc_buffer((1,), "float64")
    _mass(c, e, row, T.reinterpret("float32", low[0]), total)
    wanted[0] = T.Cast("float64", p) * total[0]
    high[0] = _ONE_BITS + 1
    for _ in range(_BITS):
        if high[0] - low[0] > 1:
            middle[0] = low[0] + (high[0] - low[0]) // 2
            _mass(c, e, row, T.reinterpret("float32", middle[0]), total)
            if total[0] >= wanted[0]:
                low[0] = middle[0]
            else:
                high[0] = middle[0]


@T.inline
def _pick(c, e, row, threshold, uniform, token):
    """token[0] = first index whose cumulative kept mass exceeds uniform * all kept mass."""
    lane = T.alloc_buffer((c.lanes,), "float64")
    block = T.alloc_buffer((1,), "float64")
    mass = T.alloc_buffer((2,), "float64")  # the goal, and what lies before the block
    last = T.alloc_buffer((1,), "int32")
    _mass(c, e, row, threshold, mass)
    mass[0] = uniform * mass[0]
    mass[1] = T.float64(0)
    token[0] = -1
    for b in range(c.stride // _BLOCK):
        if token[0] < 0:
            _block_mass(c, e, row, b * _BLOCK, threshold, lane, block)
            if mass[1] + block[0] > mass[0]:
                last[0] = -1
                for j in range(_BLOCK):
                    x = T.meta_var(e[row, b * _BLOCK + j])
                    if x >= threshold and x > T.float32(0) and token[0] < 0:
                        last[0] = b * _BLOCK + j
                        mass[1] += T.Cast("float64", x)
                        if mass[1] > mass[0]:
                            token[0] = last[0]
                if token[0] < 0:
                    token[0] = last[0]
            else:
                mass[1] += block[0]


def _kernel(c: _Shape) -> Any:
    @T.prim_func
    def kernel(
        logits_h: T.handle, temperature_h: T.handle, top_k_h: T.handle, top_p_h: T.handle,
        min_p_h: T.handle, seed_h: T.handle, position_h: T.handle,
        tokens_h: T.handle, workspace_h: T.handle, requests: T.int64,
    ):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        logits = T.decl_buffer((requests, c.vocab), "float32", data=logits_h)
        temperature = T.decl_buffer((requests,), "float32", data=temperature_h)
        top_k = T.decl_buffer((requests,), "int32", data=top_k_h)
        top_p = T.decl_buffer((requests,), "float32", data=top_p_h)
        min_p = T.decl_buffer((requests,), "float32", data=min_p_h)
        seed = T.decl_buffer((requests,), "int64", data=seed_h)
        position = T.decl_buffer((requests,), "int32", data=position_h)
        tokens = T.decl_buffer((requests,), "int32", data=tokens_h)
        e = T.decl_buffer((requests, c.stride), "float32", data=workspace_h)
        for row in T.parallel(requests):
            best = T.alloc_buffer((1,), "float32")
            bad = T.alloc_buffer((1,), "float32")
            low = T.alloc_buffer((1,), "int32")
            token = T.alloc_buffer((1,), "int32")
            _scan(c, logits, row, best, bad)
            token[0] = -1
            if bad[0] == T.float32(0) and T.fabs(best[0]) < T.float32(float("inf")):
                if temperature[row] > T.float32(0):
                    _probabilities(c, e, logits, row, best, temperature[row])
                    low[0] = 0
                    if top_k[row] > 0 and top_k[row] < c.vocab:
                        _top_k(c, e, row, top_k[row], low)
                    if top_p[row] < T.float32(1):
                        _top_p(c, e, row, top_p[row], low)
                    best[0] = T.reinterpret("float32", low[0])
                    best[0] = T.Select(min_p[row] > best[0], min_p[row], best[0])
                    _pick(c, e, row, best[0], _uniform(seed[row], position[row]), token)
                else:
                    _first_best(c, logits, row, best, token)
            tokens[row] = token[0]

    return kernel


TEMPLATES = (Sample(),)
