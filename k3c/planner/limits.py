"""The largest legal numbers, and what one more of each thing costs: the same for both answers.

What differs is only who says whether a number fits: closed forms, or the plans.
"""

from __future__ import annotations

from collections.abc import Callable

from k3c.planner import quick
from k3c.planner.answer import Capacity, ContextLine
from k3c.planner.problem import MAX_REQUESTS, Problem
from k3c.planner.quick import Part

Legal = Callable[[int, int], bool]  # requests, tokens of each
CONTEXTS = (4096, 8192, 32768, 131072, 262144, 1048576)


def capacity(problem: Problem, part: Part, legal: Legal) -> Capacity:
    """Return how much state fits.

    Args:
        problem: What is asked.
        part: What a rank of the fullest stage holds.
        legal: Says whether so many requests of so many tokens fit every stage; what fits, fits
            with fewer of either.
    """
    asked, mesh = problem.asked, part.mesh
    longest = problem.config.max_position_embeddings
    draft = asked.draft.token_bytes if asked.draft and part.is_last else 0
    token = quick.token_bytes(part, asked.act_bytes) + draft
    slot = quick.slot_bytes(part, asked.act_bytes)
    ranks = mesh.dp * max(1, problem.machine.ranks // mesh.ranks)
    return Capacity(
        max_num_seqs=largest(lambda n: legal(n, asked.context_tokens), 1, MAX_REQUESTS),
        max_model_len=_longest(legal, asked.requests, longest, asked.page_tokens),
        contexts=tuple(
            _context(legal, tokens, ranks, token * tokens > slot)
            for tokens in CONTEXTS
            if tokens <= longest
        ),
        million_tokens_bytes=token * 2**20,
        token_bytes=token,
        request_bytes=slot,
        slots_per_request=1,
        snapshot_bytes=slot,
        replica_slot_bytes=part.moe_layers * quick.expert_bytes(problem.config, mesh),
        page_tokens=asked.page_tokens,
    )


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest number in low..high that fits, where less fits too; low - 1: none."""
    good, bad = low - 1, high + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def _longest(legal: Legal, requests: int, longest: int, page_tokens: int) -> int:
    """Return the most tokens of a request, in whole pages; 0: not even one page fits."""
    pages = largest(lambda n: legal(requests, n * page_tokens), 1, -(-longest // page_tokens))
    return min(pages * page_tokens, longest)


def _context(legal: Legal, tokens: int, ranks: int, pages_cost_more: bool) -> ContextLine:
    count = largest(lambda n: legal(n, tokens), 1, MAX_REQUESTS)
    limit = "mla_pages" if pages_cost_more else "kda_slots"
    if count == MAX_REQUESTS:
        limit = "requests"
    return ContextLine(tokens, count, count * ranks, limit)
