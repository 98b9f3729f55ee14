"""The buckets that an artifact is compiled for: phases with every symbolic dimension bound."""

from __future__ import annotations

from dataclasses import dataclass

from k3c.artifact import Bucket, CacheInfo
from k3c.targets.target import Target

SCORE_ROWS = (64,)


@dataclass(frozen=True)
class BucketSizes:
    """What a kind of target is worth compiling for.

    Attributes:
        page_tokens: Positions of a page of the MLA cache.
        decode_requests: Requests of a decode step, ascending.
        prefill_rows: Rows of a prefill step, ascending.
        chunk_requests: Requests whose chunks a prefill or score step may pack.
    """

    page_tokens: int
    decode_requests: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    chunk_requests: int


_CPU = BucketSizes(16, (1, 2, 4, 8), (16, 64, 256), 8)
_GPU = BucketSizes(
    64, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), (64, 256, 1024, 2048, 4096, 8192), 8
)


def bucket_sizes(target: Target) -> BucketSizes:
    """Return the sizes for a target."""
    return _CPU if target.kind == "cpu" else _GPU


def make_buckets(cache: CacheInfo, target: Target, max_chunk_tokens: int) -> tuple[Bucket, ...]:
    """Return the buckets of an artifact.

    Args:
        cache: Sizes of the state; no decode bucket is wider than its requests need.
        target: The device.
        max_chunk_tokens: Rows that the largest prefill bucket must have at most; at least the
            smallest bucket is there.
    """
    sizes = bucket_sizes(target)
    state = {
        "S": cache.slots,
        "P": cache.pages,
        "M": -(-cache.max_context_tokens // cache.page_tokens),
    }
    packed = {"B": sizes.chunk_requests, **state}
    first, *rest = sizes.prefill_rows
    decode = _enough(sizes.decode_requests, cache.max_requests)
    prefill = (first, *(n for n in rest if n <= max_chunk_tokens))
    return (
        *(Bucket(f"decode.b{n}", "decode", {"T": n, "B": n, **state}) for n in decode),
        *(Bucket(f"prefill.t{n}", "prefill", {"T": n, **packed}) for n in prefill),
        *(Bucket(f"score.t{n}", "score", {"T": n, **packed}) for n in SCORE_ROWS),
    )


def _enough(sizes: tuple[int, ...], needed: int) -> tuple[int, ...]:
    """Return the ascending sizes up to the first that holds `needed`."""
    smaller = [n for n in sizes if n < needed]
    return sizes[: len(smaller) + 1]
