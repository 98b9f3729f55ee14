"""Standard workloads: what the rows of a step hold when an artifact is measured on its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3c.artifact import Bucket, CacheInfo, Manifest
from k3c.errors import ConfigError

SEED = 0


@dataclass(frozen=True)
class Workload:
    """Steps to measure.

    Attributes:
        name: What users call it.
        context_tokens: Tokens of each request before the step.
        decode_requests: Requests of the decode steps.
        prefill_rows: Tokens of the prefill steps, of one request.
    """

    name: str
    context_tokens: int
    decode_requests: tuple[int, ...]
    prefill_rows: tuple[int, ...]

    def buckets(self, manifest: Manifest) -> tuple[Bucket, ...]:
        """Return the buckets that it runs in.

        Raises:
            ConfigError: The artifact lacks one, or its state is too small.
        """
        wanted = [f"decode.b{n}" for n in self.decode_requests]
        wanted += [f"prefill.t{n}" for n in self.prefill_rows]
        known = {bucket.name: bucket for bucket in manifest.buckets}
        missing = [name for name in wanted if name not in known]
        if missing:
            what = f"the artifact has no bucket {', '.join(missing)}"
            hint = "compile with --max-num-seqs and --max-num-batched-tokens as perf/README.md says"
            raise ConfigError(what, f"--workload {self.name}", hint)
        found = tuple(known[name] for name in wanted)
        self._check_state(found, manifest.cache)
        return found

    def _check_state(self, buckets: tuple[Bucket, ...], cache: CacheInfo) -> None:
        for bucket in buckets:
            new = 1 if bucket.phase == "decode" else bucket.dims["T"]
            tokens = self.context(bucket) + new
            if tokens > cache.max_context_tokens:
                what = f"{tokens} tokens in {bucket.name}, planned {cache.max_context_tokens}"
                raise ConfigError(what, f"--workload {self.name}", "compile with --max-model-len")

    def context(self, bucket: Bucket) -> int:
        """Return the tokens of a request before a step of a bucket."""
        return self.context_tokens if bucket.phase == "decode" else 0


WORKLOADS: Mapping[str, Workload] = {
    w.name: w
    for w in (
        Workload("W1", 8192, (1, 8, 64), ()),
        Workload("W1L", 131072, (1, 8), ()),
        Workload("W1S", 8192, (1, 8, 64), ()),
        Workload("W2", 0, (), (2048, 8192)),
        Workload("W3", 8192, (1, 8, 64), (2048, 8192)),
    )
}


def fill_inputs(
    fields: Mapping[str, npt.NDArray], bucket: Bucket, context: int, manifest: Manifest
) -> None:
    """Fill the inputs of a step in which every row is live.

    Args:
        fields: The input fields of the bucket; all are overwritten.
        bucket: A decode bucket, each row a request, or another one, all rows one request.
        context: Tokens of each request before the step.
        manifest: Its cache says how many pages there are; requests share pages where they are few.
    """
    random = np.random.default_rng(SEED)
    rows = bucket.dims["T"]
    for field in fields.values():
        field[...] = 0
    fields["ids"][...] = random.integers(0, manifest.model.vocab_size, rows)
    live = rows if bucket.phase == "decode" else 1
    fields["seg_start"][...] = rows
    fields["seg_start"][:live] = np.arange(live)
    fields["seg_tokens"][:live] = rows // live
    fields["context"][:live] = context
    if "slots" in fields:
        fields["slots"][:live] = 1 + np.arange(live) % (manifest.cache.slots - 1)
    if "page_table" in fields:
        _fill_pages(fields["page_table"][:live], manifest.cache, random)
    if "sample_rows" in fields:
        fields["sample_rows"][:live] = np.arange(live) if live > 1 else rows - 1
        fields["top_p"][...] = 1


def _fill_pages(table: npt.NDArray, cache: CacheInfo, random: np.random.Generator) -> None:
    """Scatter the pages of all requests; page 0 is scratch."""
    pages = 1 + random.permutation(cache.pages - 1)
    table[...] = np.resize(pages, table.shape)
