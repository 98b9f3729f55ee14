"""`linear` and `norm_linear` of more than 16 rows: a tiled product, K split where tiles are few."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from k3c.codegen.template import padded
from k3c.codegen.templates.triton.linear_base import DECODE_ROWS, PREFETCH_BYTES, LinearTemplate
from k3c.codegen.templates.triton.linear_gemm_kernel import (
    linear_finish,
    linear_gemm,
    linear_norm,
)
from k3c.codegen.templates.triton.linear_node import LinearShape
from k3c.codegen.triton_template import INT32_LIMIT
from k3c.codegen.tuning import Config
from k3c.ir.graph import Node
from k3c.targets.catalogue import Stage
from k3c.targets.target import Target

# (rows, columns of a tile, elements of K a step, stages, warps, share of the peak that its main
# loop reaches). Shares are estimates; those of variants differ only to rank them.
_TILES = (
    (128, 256, 64, 4, 8, 0.80),
    (128, 256, 64, 3, 8, 0.79),
    (256, 128, 64, 4, 8, 0.78),
    (128, 128, 64, 3, 8, 0.70),
    (128, 128, 64, 3, 4, 0.69),
    (64, 256, 64, 3, 8, 0.60),
    (64, 128, 64, 4, 4, 0.50),
    (64, 128, 128, 3, 4, 0.49),
    (64, 64, 64, 4, 4, 0.35),
    (64, 64, 128, 4, 4, 0.34),
)
_SPLITS = (1, 2, 3, 4, 5, 6, 8)
_GROUP = 8
_CANDIDATES = 10
# Rate at which one multiprocessor takes tiles from the second-level cache, bytes/us.
_INGEST_BYTES_PER_US = 70e3
_STAGE_US = 1.5
_NORM_COLUMNS = 2048
# Up to so many rows a product is bound by the stream of its weights.
_STREAMED_ROWS = 128


class LinearGemm(LinearTemplate):
    """`linear` of more than 16 rows."""

    name = "linear_gemm"
    op = "linear"
    reference = "linear"
    row_range = (DECODE_ROWS + 1, INT32_LIMIT - 1)
    kernels: ClassVar[Mapping[str, Any]] = {
        "norm": linear_norm,
        "": linear_gemm,
        "part": linear_gemm,
        "finish": linear_finish,
    }

    def configs(self, node: Node, target: Target) -> tuple[Config, ...]:
        """Return the configurations of least estimated time, the best first."""
        shape = LinearShape.of(node)
        if shape.wide:
            return (_config(64, 64, 32, 2, 4, 1),)
        return _ranked(shape, target)

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of the normalised rows and of the partial sums."""
        shape, split = LinearShape.of(node), self.config(node, target)["SPLIT"]
        width = 4 if shape.act == "f32" else 2
        rows = padded(shape.rows * shape.inner * width, 64) if shape.norm else 0
        return rows + (0 if split == 1 else split * shape.rows * shape.packed_rows * 4)

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the norm of the rows, the product, and the sum of its parts, as far as needed."""
        shape, config = LinearShape.of(node), self.config(node, target)
        split, stages = config["SPLIT"], config["STAGES"]
        tiles = -(-shape.rows // config["BLOCK_M"]) * -(-shape.packed_rows // config["BLOCK_N"])
        product = self.linear_stage(
            node, target, "" if split == 1 else "part", tiles * split,
            num_warps=config["WARPS"], num_stages=stages,
            BLOCK_M=config["BLOCK_M"], BLOCK_N=config["BLOCK_N"], BLOCK_K=config["BLOCK_K"],
            GROUP=_GROUP, SPLIT=split, STAGES=stages,
            PREFETCH=_prefetch_bytes(shape, target, config),
        )  # fmt: skip
        before = (self._norm_stage(node, target),) if shape.norm else ()
        after = (self.finish_stage(node, target, split, shape.norm),) if split > 1 else ()
        return (*before, product, *after)

    def _norm_stage(self, node: Node, target: Target) -> Stage:
        shape = LinearShape.of(node)
        chunk = min(_NORM_COLUMNS, 1 << (shape.inner - 1).bit_length())
        return self.linear_stage(node, target, "norm", shape.rows, CHUNK=chunk)


class NormLinearGemm(LinearGemm):
    """`norm_linear` of more than 16 rows: a first stage normalises the rows."""

    name = "norm_linear_gemm"
    op = "norm_linear"
    reference = "norm_linear"


def _config(
    block_m: int, block_n: int, block_k: int, stages: int, warps: int, split: int
) -> dict[str, int]:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "STAGES": stages,
        "WARPS": warps,
        "SPLIT": split,
    }


# Asked for by workspace, stages and costs of every node of every bucket.
@cache
def _ranked(shape: LinearShape, target: Target) -> tuple[Config, ...]:
    """Return the configurations of least estimated time, the best first."""
    ranked = sorted(_space(shape, target), key=lambda c: _estimate_us(shape, target, *c))
    # Variants that differ on one target may be one on another.
    found = {tuple(config.items()): config for config, _ in ranked}
    return tuple(found.values())[:_CANDIDATES]


def _space(shape: LinearShape, target: Target) -> list[tuple[Config, float]]:
    """Return every configuration with the share of the peak that its main loop reaches."""
    splits = [s for s in _SPLITS if s == 1 or (shape.rows <= 512 and shape.inner >= 512 * s)]
    if target.kind == "hip":
        # Its warps are twice as wide and its shared memory is smaller.
        tiles = [(m, n, k, 2, 4, share) for m, n, k, *_, share in _TILES if m * n <= 128 * 128]
    else:
        tiles = list(_TILES)
    return [(_config(*tile[:5], split), tile[5]) for tile in tiles for split in splits]


def _estimate_us(shape: LinearShape, target: Target, config: Config, share: float) -> float:
    """Return the time of a configuration: the slowest of tensor cores, caches and memory.

    Args:
        shape: The node.
        target: The device.
        config: The configuration.
        share: Share of the peak that its main loop reaches.
    """
    m, n, split = config["BLOCK_M"], config["BLOCK_N"], config["SPLIT"]
    tiles = -(-shape.rows // m) * -(-shape.packed_rows // n) * split
    # The fullest multiprocessor decides.
    most, inner = -(-tiles // target.cores), shape.inner / split
    flops_per_us = target.peak_gflops * 1e3 / target.cores
    bytes_per_us = target.bandwidth_gbs * 1e3
    compute = most * 2 * m * n * inner / (flops_per_us * share)
    ingest = most * (m + n) * inner * 2 / _INGEST_BYTES_PER_US
    memory = (shape.weight_bytes + shape.rows * shape.inner * 2) / bytes_per_us
    partial = 2 * 4 * split * shape.rows * shape.packed_rows / bytes_per_us
    return max(compute, ingest, memory) + (partial + _STAGE_US if split > 1 else 0)


def _prefetch_bytes(shape: LinearShape, target: Target, config: Config) -> int:
    """Return the bytes of each row of weights that a block asks for early: few rows stream them."""
    if target.kind != "cuda" or shape.wide or shape.rows > _STREAMED_ROWS or shape.inner % 8:
        return 0
    split = config["SPLIT"]
    part = padded(-(-shape.inner // split), config["BLOCK_K"]) * 2
    return min(part, PREFETCH_BYTES // (shape.packed_rows * split)) // 16 * 16


TEMPLATES = (LinearGemm(), NormLinearGemm())
