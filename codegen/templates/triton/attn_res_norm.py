"""attn_res_norm: join, mixture over the committed blocks, norm and commit of one site.

A block is a token. Where tokens are few it asks for all sources at once, keeps them in registers as
loaded, and reduces the scores of all of them in one round. Where tokens are many it takes the
sources one by one, and again for the mixture, from the cache: more blocks fit a multiprocessor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import triton
import triton.language as tl

from k3c.codegen.template import refuse_dtype
from k3c.codegen.templates.triton.common import release_dependents, wait_for_inputs
from k3c.codegen.templates.triton.pairs import first_of, pair_pointer, second_of, to_pairs
from k3c.codegen.templates.triton.prefetch import LINE_BYTES, into_l2
from k3c.codegen.triton_template import TritonTemplate
from k3c.codegen.tuning import Config
from k3c.ir.graph import LayerAttr, Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Cost, Scalar, Stage
from k3c.targets.target import Target

_BANK = 2
_NORMS = (3, 4, 5)
_LAYER_SCALARS = ("rows", "restart", "commit_row")
# Registers of a block that reads twice: two blocks fit a multiprocessor of 64 Ki registers.
_TWICE_REGISTERS = 32768
# A dot product and a square for the score, a multiplication and an addition for the mixture.
_FLOPS_PER_SOURCE_ELEMENT = 6
# Widest row that the registers of a block hold nine times.
_MAX_WIDTH = 8192


@triton.jit
def _add(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _join(prefix, delta, restart):
    """Return prefix + delta as pairs; delta alone where `restart` is not 0."""
    first = first_of(prefix) + first_of(delta)
    second = second_of(prefix) + second_of(delta)
    return tl.where(restart == 0, to_pairs(first, second, delta), delta)


@triton.jit
def _sums(pairs, query, AXIS: tl.constexpr):
    """Return dot products with the query and sums of squares, over the last axis of the pairs."""
    query_a, query_b = query
    a, b = first_of(pairs), second_of(pairs)
    return tl.reduce((a * query_a + b * query_b, a * a + b * b), AXIS, _add)


# Longer than a function here may be: one token's dataflow, whose parts share its registers.
# longer than the budget: the sources' sums, scores and mixture are one pass over registers.
@triton.jit
def _mixture(
    bank, block_stride, own, restart, query, columns, in_row, visible, hidden,
    D: tl.constexpr, RES_EPS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Return the joined prefix and the mixture of it with `visible` <= R rows of the bank.

    Args:
        bank: Pointer to the pairs of the token's row of the first block.
        block_stride: Pairs from a block to the next.
        own: Pairs of the prefix and of what it is joined with.
        restart: Layer attribute.
        query: Even and odd columns f32[N] of the norm weight times the projection.
        columns: 0 .. N - 1, N pairs padded to a power of two.
        in_row: columns < D / 2.
        visible: Layer attribute `rows`.
        hidden: 0, but the compiler must not know it.
        D: Width.
        RES_EPS: Epsilon of the scores.
        R: Rows of the bank that registers have room for.
    """
    blocks = tl.arange(0, R)
    at = bank + blocks[:, None].to(tl.int64) * block_stride + columns[None, :]
    rows = tl.load(at, mask=(blocks < visible)[:, None] & in_row[None, :], other=0)
    prefix, delta = own
    joined = _join(prefix, delta, restart)
    own_dot, own_square = _sums(joined, query, 0)
    query_a, query_b = query
    dots, squares = _sums(rows, (query_a[None, :], query_b[None, :]), 1)
    scores = dots * tl.rsqrt(squares / D + RES_EPS)
    scores = tl.where(blocks < visible, scores, float("-inf"))
    own_score = own_dot * tl.rsqrt(own_square / D + RES_EPS)
    top = tl.maximum(tl.max(scores, 0), own_score)
    weights, own_weight = tl.exp(scores - top), tl.exp(own_score - top)
    total = tl.sum(weights, 0) + own_weight
    weights, own_weight = (weights / total)[:, None], own_weight / total
    # What is unpacked again need not wait unpacked since the scores.
    rows ^= hidden
    again = joined ^ hidden
    mixed_a = tl.sum(first_of(rows) * weights, 0) + first_of(again) * own_weight
    mixed_b = tl.sum(second_of(rows) * weights, 0) + second_of(again) * own_weight
    return joined, mixed_a, mixed_b


@triton.jit
def _load_query(res_norm, res_proj, columns, in_row):
    """Return even and odd columns f32[N] of the norm weight times the projection."""
    scale = tl.load(pair_pointer(res_norm) + columns, mask=in_row, other=0)
    direction = tl.load(pair_pointer(res_proj) + columns, mask=in_row, other=0)
    return first_of(scale) * first_of(direction), second_of(scale) * second_of(direction)


@triton.jit
def _load_own(prefix, delta, row, columns, in_row, restart, PAIRS: tl.constexpr):
    """Return pairs of the prefix and of what it is joined with."""
    # A restart leaves a prefix that nobody may have written.
    kept = columns < tl.where(restart == 0, PAIRS, 0)
    own = tl.load(pair_pointer(prefix) + row + columns, mask=kept, other=0)
    return own, tl.load(pair_pointer(delta) + row + columns, mask=in_row, other=0)


@triton.jit
def _store_joined(prefix, bank, joined, row, stride, columns, commit_row, PAIRS: tl.constexpr):
    """Store the joined prefix, and commit it where `commit_row` is not negative."""
    tl.store(pair_pointer(prefix) + row + columns, joined, mask=columns < PAIRS)
    committed = pair_pointer(bank) + tl.maximum(commit_row, 0).to(tl.int64) * stride + row
    mask = columns < tl.where(commit_row >= 0, PAIRS, 0)
    tl.store(committed + columns, joined, mask=mask)


@triton.jit
def _store_normal(y, mixed, weight, columns, D: tl.constexpr, EPS: tl.constexpr):
    """Store the norm of a mixture, rounded before: pairs `mixed`, pairs of f32 `weight`."""
    a, b = first_of(mixed), second_of(mixed)
    factor = tl.rsqrt(tl.sum(a * a + b * b, 0) / D + EPS)
    result = to_pairs(a * factor * first_of(weight), b * factor * second_of(weight), mixed)
    tl.store(y + columns, result, mask=columns < D // 2)


@triton.jit
def attn_res_norm_held(
    prefix, delta, bank, res_norm, res_proj, norm, y, tokens, visible, restart, commit_row,
    D: tl.constexpr, R: tl.constexpr, RES_EPS: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Do one token of one site; all sources wait in registers for their weights."""
    PAIRS: tl.constexpr = D // 2
    columns = tl.arange(0, triton.next_power_of_2(PAIRS))
    in_row = columns < PAIRS
    query = _load_query(res_norm, res_proj, columns, in_row)
    weight = tl.load(pair_pointer(norm) + columns, mask=in_row, other=0)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64) * PAIRS
    stride = tokens.to(tl.int64) * PAIRS
    blocks = pair_pointer(bank) + row
    both = _load_own(prefix, delta, row, columns, in_row, restart, PAIRS)
    release_dependents(PDL)
    hidden = tokens >> 30
    if R >= 8 and visible <= R // 2:
        joined, mixed_a, mixed_b = _mixture(
            blocks, stride, both, restart, query, columns, in_row, visible, hidden, D, RES_EPS,
            R // 2,
        )  # fmt: skip
    else:
        joined, mixed_a, mixed_b = _mixture(
            blocks, stride, both, restart, query, columns, in_row, visible, hidden, D, RES_EPS, R
        )
    _store_joined(prefix, bank, joined, row, stride, columns, commit_row, PAIRS)
    mixed = to_pairs(mixed_a, mixed_b, joined)
    _store_normal(pair_pointer(y) + row, mixed, weight, columns, D, EPS)


# Longer than a function here may be: one token's dataflow.
# longer than the budget: both readings of the sources share every pointer and mask.
@triton.jit
def attn_res_norm_twice(
    prefix, delta, bank, res_norm, res_proj, norm, y, tokens, visible, restart, commit_row,
    D: tl.constexpr, R: tl.constexpr, RES_EPS: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Do one token of one site; sources are read for their scores, then again from the cache."""
    PAIRS: tl.constexpr = D // 2
    columns = tl.arange(0, triton.next_power_of_2(PAIRS))
    in_row = columns < PAIRS
    query = _load_query(res_norm, res_proj, columns, in_row)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    row = tl.program_id(0).to(tl.int64) * PAIRS
    stride = tokens.to(tl.int64) * PAIRS
    blocks = pair_pointer(bank) + row
    index = tl.arange(0, R)
    PER_LINE: tl.constexpr = LINE_BYTES * 8 // blocks.dtype.element_ty.primitive_bitwidth
    lines = tl.arange(0, triton.next_power_of_2(tl.cdiv(PAIRS, PER_LINE))) * PER_LINE
    wanted = tl.minimum(index, tl.maximum(visible - 1, 0)).to(tl.int64)[:, None] * stride
    into_l2(blocks + (wanted + tl.minimum(lines, PAIRS - 1)[None, :]), PDL)
    blocks += columns
    own, added = _load_own(prefix, delta, row, columns, in_row, restart, PAIRS)
    # One source ahead; past the last there is none.
    ahead = tl.load(blocks, mask=columns < tl.where(visible > 0, PAIRS, 0), other=0)
    joined = _join(own, added, restart)
    _store_joined(prefix, bank, joined, row, stride, columns, commit_row, PAIRS)
    own_dot, own_square = _sums(joined, query, 0)
    own_score = own_dot * tl.rsqrt(own_square / D + RES_EPS)
    scores = tl.full([R], float("-inf"), tl.float32)
    for block in range(visible):
        pairs = ahead
        left = columns < tl.where(block + 1 < visible, PAIRS, 0)
        ahead = tl.load(blocks + (block + 1) * stride, mask=left, other=0)
        dot, square = _sums(pairs, query, 0)
        scores = tl.where(index == block, dot * tl.rsqrt(square / D + RES_EPS), scores)
    top = tl.maximum(tl.max(scores, 0), own_score)
    weights, own_weight = tl.exp(scores - top), tl.exp(own_score - top)
    total = tl.sum(weights, 0) + own_weight
    weights, own_weight = weights / total, own_weight / total
    mixed_a, mixed_b = first_of(joined) * own_weight, second_of(joined) * own_weight
    # What was read last is the likeliest to be still in the nearest cache.
    for i in range(visible):
        block = visible - 1 - i
        pairs = tl.load(blocks + block * stride, mask=in_row, other=0)
        share = tl.sum(tl.where(index == block, weights, 0.0), 0)
        mixed_a += first_of(pairs) * share
        mixed_b += second_of(pairs) * share
    weight = tl.load(pair_pointer(norm) + columns, mask=in_row, other=0)
    mixed = to_pairs(mixed_a, mixed_b, joined)
    _store_normal(pair_pointer(y) + row, mixed, weight, columns, D, EPS)


class AttnResNorm(TritonTemplate):
    """`attn_res_norm`; prefix and bank are updated in place."""

    name: ClassVar[str] = "attn_res_norm"
    op: ClassVar[str] = "attn_res_norm"
    reference: ClassVar[str] = "attn_res_norm"
    kernels: ClassVar[Mapping[str, Any]] = {
        "held": attn_res_norm_held,
        "twice": attn_res_norm_twice,
    }

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        for index in _NORMS:
            if refusal := refuse_dtype(node, index, ("f32",)):
                return refusal
        blocks, _, width = node.operands[_BANK].type.sizes
        if width % 2 or width > _MAX_WIDTH:
            return Refusal(f"attn_res_norm takes an even width up to {_MAX_WIDTH}", str(width))
        if blocks > 8:
            return Refusal("attn_res_norm holds at most 8 rows of the bank", str(blocks))
        acts = {node.operands[i].type.dtype.name for i in range(_BANK + 1)}
        if len(acts) > 1:
            return Refusal("prefix, delta and bank must have one dtype", ", ".join(sorted(acts)))
        return refuse_dtype(node, 0, ("f32", "bf16"))

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: token rows, then bank rows, restart and commit row."""
        layer: list[Scalar] = [("tokens", node.operands[0].type.sizes[0])]
        for name in _LAYER_SCALARS:
            value = node.attrs[name]
            assert isinstance(value, int | LayerAttr), f"{name} of attn_res_norm is {value!r}"
            layer.append((name, value))
        return tuple(layer)

    def configs(self, node: Node, target: Target) -> tuple[Config, ...]:
        """Return what is worth measuring; a row's result must not depend on the rows beside it."""
        few = target.kind == "cuda" and node.operands[0].type.sizes[0] <= target.cores
        held = [{"twice": 0, "num_warps": n // target.lanes} for n in (256, 512)]
        twice = [{"twice": 1, "num_warps": n // target.lanes} for n in (512, 256)]
        return tuple(held + twice if few else twice + held)

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launch: a block a token."""
        blocks, tokens, width = node.operands[_BANK].type.sizes
        config = self.config(node, target)
        return (
            self.stage(
                node, target, "twice" if config["twice"] else "held", (tokens, 1, 1),
                num_warps=config["num_warps"], pdl=target.kind == "cuda",
                max_registers=_TWICE_REGISTERS // (config["num_warps"] * 32) * config["twice"],
                D=width, R=triton.next_power_of_2(blocks),
                RES_EPS=node.attrs["res_eps"], EPS=node.attrs["eps"],
            ),
        )  # fmt: skip

    def cost(self, node: Node, target: Target) -> Cost:
        """Return the cost when every bank row is visible and one is committed."""
        prefix, bank = node.operands[0].type, node.operands[_BANK].type
        norms = sum(node.operands[i].type.nbytes for i in _NORMS)
        flops = _FLOPS_PER_SOURCE_ELEMENT * (bank.elements + prefix.elements)
        return Cost(2 * prefix.nbytes + bank.nbytes + norms, 3 * prefix.nbytes, flops)


TEMPLATES = (AttnResNorm(),)
