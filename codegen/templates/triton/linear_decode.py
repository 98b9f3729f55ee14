"""`linear` and `norm_linear` of up to 16 rows: a stream of weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from k3c.codegen.templates.triton.linear_base import DECODE_ROWS, PREFETCH_BYTES, LinearTemplate
from k3c.codegen.templates.triton.linear_decode_kernel import linear_decode
from k3c.codegen.templates.triton.linear_gemm_kernel import linear_finish
from k3c.codegen.templates.triton.linear_node import LinearShape
from k3c.codegen.tuning import Config
from k3c.ir.graph import Node
from k3c.targets.catalogue import Stage
from k3c.targets.target import Target

# Shared memory of one multiprocessor that the blocks of one kernel may fill; the rest is for the
# blocks of the next kernel, which ask for their weights early.
_SHARED_SHARE = 0.7
_MAX_STAGES = 6
# Steps of K: (slices, elements of a slice), the widest first; at least three steps fill a pipeline.
_STEPS = ((4, 128), (4, 64), (2, 64), (4, 32), (2, 32))
_MIN_BLOCK_K = 32
_GOOD_STAGES = 4
# Elements of x that a thread of the norm holds at a time.
_NORM_ELEMENTS = 64


class LinearDecode(LinearTemplate):
    """`linear` of 1 to 16 rows."""

    name = "linear_decode"
    op = "linear"
    reference = "linear"
    row_range = (1, DECODE_ROWS)
    kernels: ClassVar[Mapping[str, Any]] = {
        "": linear_decode,
        "part": linear_decode,
        "finish": linear_finish,
    }

    def configs(self, node: Node, target: Target) -> tuple[Config, ...]:
        """Return the configurations worth measuring, the rule's choice first."""
        return _ranked(LinearShape.of(node), target)

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of the partial sums."""
        shape, split = LinearShape.of(node), self.config(node, target)["SPLIT"]
        return 0 if split == 1 else split * shape.rows * shape.packed_rows * 4

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the product, and the sum of its parts where K is split over blocks."""
        shape, config = LinearShape.of(node), self.config(node, target)
        split = config["SPLIT"]
        blocks = -(-shape.packed_rows // config["BLOCK_N"]) * split
        stages, block_m = config["STAGES"], _block_m(shape, target)
        product = self.linear_stage(
            node, target, "" if split == 1 else "part", blocks,
            num_warps=config["SLICES"], num_stages=stages, BLOCK_M=block_m,
            BLOCK_N=config["BLOCK_N"], BLOCK_K=config["BLOCK_K"], SLICES=config["SLICES"],
            SPLIT=split, STAGES=stages, NORM_CHUNK=_norm_chunk(shape, config, block_m),
            PREFETCH=_prefetch_bytes(shape, target, config),
        )  # fmt: skip
        if split == 1:
            return (product,)
        return (product, self.finish_stage(node, target, split, skip=False))


class NormLinearDecode(LinearDecode):
    """`norm_linear` of 1 to 16 rows: every block normalises the rows for itself."""

    name = "norm_linear_decode"
    op = "norm_linear"
    reference = "norm_linear"


# Kept: a plan asks for a node's configuration each time it asks for its stages or workspace.
@cache
def _ranked(shape: LinearShape, target: Target) -> tuple[Config, ...]:
    """Return the rule's configuration, then what changes of it fit."""
    rule = _rule(shape, target)
    if shape.wide:
        return (rule,)
    found = [rule]
    for change in _changes(shape, rule):
        config = _completed(shape, target, {**rule, **change})
        if config not in found and _shared_bytes(shape, target, config) <= target.shared_bytes:
            found.append(config)
    return tuple(found)


def _rule(shape: LinearShape, target: Target) -> Config:
    """Return the configuration that the sizes suggest."""
    block_n = 8 if shape.packed_rows < 16 * target.cores else 16
    tiles = shape.packed_rows // block_n
    slices, block_k = _step(shape)
    steps = -(-shape.inner // (slices * block_k))
    split = max(1, min(target.cores // tiles, steps // 2, 8)) if 2 * tiles < target.cores else 1
    if shape.wide:
        return _config(block_n, min(block_k, 32), slices, split, 2, 0)
    early = min(block_n, block_n * PREFETCH_BYTES // shape.weight_bytes)
    tried = [
        _completed(shape, target, _config(block_n, width, slices, split, 0, early))
        for width in (2 * block_k, block_k, block_k // 2)
        if width >= _MIN_BLOCK_K and (width == block_k or shape.inner >= 6 * slices * width)
    ]
    deep = [c for c in tried if c["STAGES"] >= _GOOD_STAGES]
    return deep[0] if deep else max(tried, key=lambda c: c["STAGES"])


def _config(
    block_n: int, block_k: int, slices: int, split: int, stages: int, prefetch_rows: int
) -> dict[str, int]:
    return {
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "SLICES": slices,
        "SPLIT": split,
        "STAGES": stages,
        "PREFETCH_ROWS": prefetch_rows,
    }


def _changes(shape: LinearShape, rule: Config) -> list[dict[str, int]]:
    """Return what the candidates change in the rule's configuration; STAGES 0 is chosen anew."""
    half = {"SLICES": max(2, rule["SLICES"] // 2), "STAGES": 0}
    return [
        {"PREFETCH_ROWS": 0},
        {"PREFETCH_ROWS": rule["BLOCK_N"]},
        {"BLOCK_N": 16, "BLOCK_K": max(64, rule["BLOCK_K"] // 2), "STAGES": 0},
        {"BLOCK_N": 16, "STAGES": 0},
        {"BLOCK_N": 8, "PREFETCH_ROWS": 8, "STAGES": 0},
        {"BLOCK_N": 32, "PREFETCH_ROWS": 0, "STAGES": 0},
        {"BLOCK_K": min(256, rule["BLOCK_K"] * 2), "STAGES": 0},
        {"SLICES": 8, "STAGES": 0},
        half,
        {"STAGES": rule["STAGES"] + 1},
        {"STAGES": max(2, rule["STAGES"] - 1)},
    ]


def _completed(shape: LinearShape, target: Target, config: Config) -> Config:
    """Return the configuration with stages chosen where they are 0, and a legal prefetch."""
    made = dict(config)
    if not made["STAGES"]:
        tiles = -(-shape.packed_rows // made["BLOCK_N"]) * made["SPLIT"]
        resident = max(1, -(-tiles // target.cores))
        budget = _SHARED_SHARE * target.shared_bytes / resident
        steps = -(-shape.inner // (made["SLICES"] * made["BLOCK_K"] * made["SPLIT"]))
        most = 2 if target.kind == "hip" else min(_MAX_STAGES, max(2, steps + 1))
        fitting = [
            s
            for s in range(2, most + 1)
            if _shared_bytes(shape, target, {**made, "STAGES": s}) <= budget
        ]
        made["STAGES"] = max(fitting, default=2)
    row_bytes = shape.inner * 2
    whole = shape.packed_rows % made["BLOCK_N"] == 0 and made["SPLIT"] == 1
    rows = min(made["PREFETCH_ROWS"], made["BLOCK_N"]) if whole else 0
    while rows and rows * row_bytes % (made["SLICES"] * 32 * 16):
        rows -= 1
    made["PREFETCH_ROWS"] = rows
    return made


def _step(shape: LinearShape) -> tuple[int, int]:
    """Return slices and elements of K a slice: dividing K where they can."""
    for slices, block_k in _STEPS:
        if shape.inner % (slices * block_k) == 0 and shape.inner >= 3 * slices * block_k:
            return slices, block_k
    return (4, 64) if shape.inner > 512 else (2, 32)


def _block_m(shape: LinearShape, target: Target) -> int:
    """Return the rows of the tile; one row needs less shared memory than a padded tile."""
    if shape.rows == 1 and target.kind == "cuda":
        return 1
    return 8 if shape.rows <= 8 and target.kind == "cuda" else 16


def _norm_chunk(shape: LinearShape, config: Config, block_m: int) -> int:
    """Return the columns of x that the norm reads at a time, a power of two."""
    most = _NORM_ELEMENTS * config["SLICES"] * 32 // block_m
    return min(most, 1 << (shape.inner - 1).bit_length())


def _shared_bytes(shape: LinearShape, target: Target, config: Config) -> int:
    """Return the shared memory of a block: one buffer less than stages on NVIDIA."""
    buffers = config["STAGES"] - (1 if target.kind == "cuda" else 0)
    width = config["BLOCK_N"] + _block_m(shape, target)
    return buffers * config["SLICES"] * config["BLOCK_K"] * width * (4 if shape.wide else 2)


def _prefetch_bytes(shape: LinearShape, target: Target, config: Config) -> int:
    """Return the bytes that a block asks for early: rows of its weights."""
    return config["PREFETCH_ROWS"] * shape.inner * 2 if target.kind == "cuda" else 0


TEMPLATES = (LinearDecode(), NormLinearDecode())
