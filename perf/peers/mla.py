"""MLA decode, absorbed, 576 wide, pages of 64 tokens, scattered: FlashMLA and FlashAttention-3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from perf.peers.case import Case, random_bf16, sets_for

LATENT, SHARED_KEY, PAGE = 512, 64, 64
WIDTH = LATENT + SHARED_KEY
SCALE = 192**-0.5
HEADS = (6, 12, 96)
POINTS = ((8192, 1), (8192, 8), (8192, 64), (131072, 1), (131072, 8))
LIBRARIES = ("_flashmla_C", "_vllm_fa3_C")


@dataclass(frozen=True)
class Problem:
    """Inputs of one decode call but for the cache, which rotates."""

    heads: int
    context: int
    requests: int
    query: torch.Tensor  # bf16[B, 1, H, 576]
    table: torch.Tensor  # i32[B, pages]
    lengths: torch.Tensor  # i32[B]


def cases() -> Iterator[Case]:
    """Yield every point with every peer."""
    for context, requests in POINTS:
        values = requests * context * WIDTH
        caches = [
            random_bf16(requests * context // PAGE, PAGE, 1, WIDTH)
            for _ in range(max(1, min(sets_for(2 * values, 64), int(2e9 // values))))
        ]
        for heads in HEADS:
            yield from _of_heads(_problem(heads, context, requests), caches)
        del caches


def _problem(heads: int, context: int, requests: int) -> Problem:
    pages = requests * context // PAGE
    table = torch.randperm(pages, device="cuda").int().view(requests, -1).contiguous()
    lengths = torch.full((requests,), context, dtype=torch.int32, device="cuda")
    query = random_bf16(requests, 1, heads, WIDTH)
    return Problem(heads, context, requests, query, table, lengths)


def _of_heads(p: Problem, caches: list[torch.Tensor]) -> Iterator[Case]:
    shape = f"H{p.heads} ctx{p.context} b{p.requests}"
    nbytes = 2.0 * p.requests * (p.context * WIDTH + p.heads * (WIDTH + LATENT))
    flops = 2.0 * p.requests * p.heads * p.context * (WIDTH + LATENT)
    yield Case("mla_decode", shape, "FlashMLA", _flash_mla(p, caches), nbytes, flops)
    for splits in (32, 0):
        calls = _fa3(p, caches, splits)
        yield Case("mla_decode", shape, f"FA3 splits={splits}", calls, nbytes, flops)


def _flash_mla(p: Problem, caches: list[torch.Tensor]) -> list:
    op = torch.ops._flashmla_C.dense_decode_fwd
    head = (LATENT, p.lengths, p.table, SCALE, False)
    # The first call plans the splits; the others are given its plan, as an engine does per step.
    _, _, metadata, splits = op(p.query, caches[0], *head, None, None, None)
    return [lambda c=c: op(p.query, c, *head, metadata, splits, None) for c in caches]


def _fa3(p: Problem, caches: list[torch.Tensor], splits: int) -> list:
    ops = torch.ops._vllm_fa3_C
    rope = p.query[..., LATENT:].reshape(p.requests, p.heads, SHARED_KEY).contiguous()
    latent = p.query[..., :LATENT].reshape(p.requests, p.heads, LATENT).contiguous()
    starts = torch.arange(p.requests + 1, dtype=torch.int32, device="cuda")
    window = (True, -1, -1)
    metadata = None
    if splits:
        metadata = ops.get_scheduler_metadata(
            p.requests, 1, p.context, p.heads, 1, SHARED_KEY, LATENT, torch.bfloat16, p.lengths,
            starts, None, None, None, None, PAGE, 0, *window, False, splits, None, 0,
        )  # fmt: skip

    def call(cache: torch.Tensor) -> object:
        return ops.fwd(
            rope, cache[..., LATENT:], cache[..., :LATENT], None, None, latent, None, starts,
            None, None, None, p.lengths, 1, p.context, p.table, None, None, None, None, None,
            None, None, None, SCALE, *window, 0.0, True, metadata, splits, None, 0, None, 1,
            0, None,
        )  # fmt: skip

    return [lambda c=c: call(c) for c in caches]
