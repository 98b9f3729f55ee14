"""mla_attend: causal attention in the latent space over the paged cache.

The rows of a tile are (token, head) pairs of one request: all of them read the same cached rows.
Where there are too few tiles to fill the device, a tile's keys are split over several blocks into
a workspace, and a second launch merges the splits in order; else a second launch only clears the
padding rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from k3c.codegen.template import refuse_dtype
from k3c.codegen.templates.triton.mla_attend_kernel import attend
from k3c.codegen.templates.triton.mla_merge_kernel import clear_padding, merge_splits
from k3c.codegen.triton_template import TritonTemplate
from k3c.codegen.tuning import Config
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Cost, Scalar, Stage
from k3c.targets.target import Target

_CACHE, _PAGE_TABLE = 1, 5
_INTEGERS = (2, 3, 4, 5)
_CACHE_DTYPES = ("f32", "bf16", "f8e4m3")
_F32_BYTES = 4
_BF16_BYTES = 2
_STATS = 2  # a maximum and a sum a split
_WORKSPACE_LIMIT = 64 << 20
_MAX_SHARE = 32  # blocks of a split, at most, that short contexts are not split below
_MERGE_COLUMNS = 64
_CLEAR_COLUMNS = 1024
_MIN_DOT = 16  # shortest sum of a matrix product


@dataclass(frozen=True)
class AttendShape:
    """The facts of a node that its kernels and their configurations depend on.

    Attributes:
        rows: T.
        heads: n.
        latent: r.
        rope: dr.
        segments: B.
        table: M.
        page: Positions of a page.
        cache: Dtype of the cache.
    """

    rows: int
    heads: int
    latent: int
    rope: int
    segments: int
    table: int
    page: int
    cache: str

    @staticmethod
    def of(node: Node) -> AttendShape:
        """Return the shape of a node."""
        rows, heads, width = node.operands[0].type.sizes
        cache, latent = node.operands[_CACHE].type, node.results[0].type.sizes[2]
        segments, table = node.operands[_PAGE_TABLE].type.sizes
        page = cache.sizes[1]
        rope = width - latent
        return AttendShape(rows, heads, latent, rope, segments, table, page, cache.dtype.name)

    @property
    def latent_pad(self) -> int:
        """The latent width padded to a power of two."""
        return max(_power(self.latent), _MIN_DOT)

    @property
    def rope_pad(self) -> int:
        """The width of the shared key dims padded to a power of two."""
        return max(_power(self.rope), _MIN_DOT)

    @property
    def segment_lines(self) -> int:
        """(token, head) pairs of a segment when all segments have the same number of tokens."""
        return max(1, self.rows // self.segments) * self.heads

    def tiles(self, tile: int) -> int:
        """Return the tiles of a step whose segments are alike."""
        return self.segments * -(-self.segment_lines // tile)

    def most_tiles(self, tile: int) -> int:
        """Return an upper bound of the tiles of any step."""
        return self.rows * self.heads // tile + self.segments

    def splits(self, config: Config, target: Target) -> int:
        """Return the most splits of a tile: `spread` items a program, for contexts that differ."""
        blocks = -(-self.table * self.page // config["BN"])
        tiles = self.tiles(config["BM"])
        items = config["spread"] * target.cores * config["per_core"]
        line_bytes = (self.latent + _STATS) * _F32_BYTES
        affordable = _WORKSPACE_LIMIT // (self.rows * self.heads * line_bytes)
        return max(1, min(-(-items // tiles), affordable, blocks))


class MlaAttend(TritonTemplate):
    """`mla_attend` for decode, verification and prefill."""

    name: ClassVar[str] = "mla_attend"
    op: ClassVar[str] = "mla_attend"
    reference: ClassVar[str] = "mla_attend"
    kernels: ClassVar[Mapping[str, Any]] = {
        "": attend,
        "merge": merge_splits,
        "clear": clear_padding,
    }

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        for index in _INTEGERS:
            if refusal := refuse_dtype(node, index, ("i32",)):
                return refusal
        width, cached = node.operands[0].type.sizes[2], node.operands[_CACHE].type.sizes[2]
        if width != cached:
            return Refusal(f"cache rows must be {width} wide", cached)
        return refuse_dtype(node, 0, ("f32",)) or refuse_dtype(node, _CACHE, _CACHE_DTYPES)

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: rows, segments, pages of a table row."""
        shape = AttendShape.of(node)
        return ("rows", shape.rows), ("segments", shape.segments), ("table", shape.table)

    def tuning_key(self, node: Node) -> str:
        """Return what names a node in the tuning table: its sizes without those of the cache."""
        s = AttendShape.of(node)
        return f"{s.cache} rows {s.rows} of {s.segments} heads {s.heads} width {s.latent}+{s.rope}"

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of the splits of all rows and heads: none where nothing is split."""
        shape = AttendShape.of(node)
        splits = shape.splits(self.config(node, target), target)
        if splits == 1:
            return 0
        return shape.rows * shape.heads * splits * (shape.latent + _STATS) * _F32_BYTES

    def cost(self, node: Node, target: Target) -> Cost:
        """Return the cost when every request's context is as long as its table allows.

        A request's cache is read once; each row and head has a dot product and a sum a position.
        """
        shape, cache = AttendShape.of(node), node.operands[_CACHE].type
        positions = shape.table * shape.page
        row_bytes = cache.nbytes // (cache.sizes[0] * cache.sizes[1])
        read = sum(v.type.nbytes for i, v in enumerate(node.operands) if i != _CACHE)
        read += shape.segments * positions * row_bytes
        flops = 2 * shape.rows * shape.heads * positions * (2 * shape.latent + shape.rope)
        return Cost(read, node.results[0].type.nbytes, flops)

    def configs(self, node: Node, target: Target) -> tuple[Config, ...]:
        """Return the configurations worth measuring, the rule's choice first."""
        shape = AttendShape.of(node)
        if shape.cache == "f32":
            return (_config(shape, (16, 16), 0, 4, 2),)
        found = _amd_configs(shape) if target.kind == "hip" else _nvidia_configs(shape)
        fitting = tuple(c for c in found if _shared_bytes(shape, c) <= target.shared_bytes)
        # Wide latents: fewer keys at a time always fit.
        return fitting or (_config(shape, (16, 16), 0, 4, 2),)

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the walk over the keys, then the merge of its splits or the padding's zeros."""
        shape, config = AttendShape.of(node), self.config(node, target)
        splits, pdl = shape.splits(config, target), target.kind == "cuda"
        items = shape.most_tiles(config["BM"]) * splits
        programs = items if splits == 1 else min(items, target.cores * config["per_core"])
        sizes = _sizes(shape, config, splits)
        scale = node.attrs["scale"]
        assert isinstance(scale, int | float), f"scale {scale!r} is no number"
        walk = self.stage(
            node, target, "", (programs, 1, 1),
            num_warps=config["warps"], num_stages=config["stages"], pdl=pdl,
            ROPE=shape.rope, LATENT_PAD=shape.latent_pad, ROPE_PAD=shape.rope_pad,
            PAGE=shape.page, SCALE=float(scale) * math.log2(math.e),
            KEYS_FIRST=config["KEYS_FIRST"], **sizes,
            **({"parts": 0} if splits == 1 else {}),
        )  # fmt: skip
        return walk, self._finish(node, target, sizes)

    def _finish(self, node: Node, target: Target, sizes: dict[str, Any]) -> Stage:
        shape, splits, pdl = AttendShape.of(node), sizes["SPLITS"], target.kind == "cuda"
        if splits == 1:
            return self.stage(
                node, target, "clear", (shape.rows, 1, 1), num_warps=4, pdl=pdl,
                WIDTH=shape.heads * shape.latent, SEGMENTS=sizes["SEGMENTS"],
                COLUMNS=_CLEAR_COLUMNS,
            )  # fmt: skip
        columns = min(_MERGE_COLUMNS, shape.latent_pad)
        programs = shape.rows * shape.heads * -(-shape.latent // columns)
        return self.stage(
            node, target, "merge", (programs, 1, 1), num_warps=4, pdl=pdl,
            COLUMNS=columns, STEP=min(64, _power(splits)), **sizes,
        )  # fmt: skip


def _sizes(shape: AttendShape, config: Config, splits: int) -> dict[str, Any]:
    """Return the constexprs that both stages of a split walk share."""
    return {
        "HEADS": shape.heads,
        "LATENT": shape.latent,
        "SEGMENTS": _power(shape.segments),
        "BM": config["BM"],
        "BN": config["BN"],
        "SPLITS": splits,
        "MIN_SHARE": config["share"] if splits > 1 else 1,
    }


def _nvidia_configs(shape: AttendShape) -> tuple[Config, ...]:
    """Keys first for few rows, whose blocks of 64 keys fill the matrix unit's first dimension."""
    lines = shape.segment_lines
    if lines <= 8:
        narrow = _config(shape, (8, 64), 1, 4, 3)
        return (
            narrow,
            narrow | {"spread": 1},
            narrow | {"share": 2 * narrow["share"]},
            narrow | {"share": 4 * narrow["share"]},
            narrow | {"stages": 2},
            narrow | {"warps": 8},
            _config(shape, (16, 32), 0, 4, 3, per_core=2),
            _config(shape, (16, 32), 0, 4, 3, per_core=2) | {"spread": 1},
            _config(shape, (16, 32), 0, 4, 4),
        )
    if lines <= 16:
        wide = _config(shape, (16, 32), 0, 4, 3, per_core=2)
        return (
            wide,
            wide | {"spread": 1},
            wide | {"share": 2 * wide["share"]},
            wide | {"stages": 4, "per_core": 1},
            _config(shape, (16, 64), 1, 4, 2),
            _config(shape, (16, 64), 1, 8, 2),
        )
    if lines <= 32:
        return (
            _config(shape, (32, 64), 1, 4, 2),
            _config(shape, (32, 64), 1, 8, 2),
            _config(shape, (32, 32), 0, 4, 3),
        )
    return (
        _config(shape, (64, 64), 0, 8, 2),
        _config(shape, (64, 64), 1, 8, 2),
        _config(shape, (32, 64), 1, 4, 2),
        _config(shape, (64, 32), 0, 8, 3),
    )


def _amd_configs(shape: AttendShape) -> tuple[Config, ...]:
    if shape.segment_lines <= 16:
        return (_config(shape, (16, 32), 0, 4, 2), _config(shape, (16, 64), 1, 4, 2))
    return (_config(shape, (64, 32), 0, 4, 2), _config(shape, (32, 32), 0, 4, 2))


def _config(
    shape: AttendShape, tile: tuple[int, int], keys_first: int, warps: int, stages: int,
    per_core: int = 1,
) -> dict[str, int]:  # fmt: skip
    """Return a configuration for tiles of (rows, keys); `per_core` programs share a processor.

    With many tiles short contexts need no splits; one tile has no others to balance with.
    """
    tiles = shape.tiles(tile[0])
    return {
        "BM": tile[0], "BN": tile[1], "KEYS_FIRST": keys_first, "warps": warps, "stages": stages,
        "per_core": per_core, "share": min(max(1, tiles // 2), _MAX_SHARE),
        "spread": 1 if tiles == 1 else 4,
    }  # fmt: skip


def _shared_bytes(shape: AttendShape, config: Config) -> int:
    """Return an upper bound of the shared memory of a block: keys, queries and weights."""
    width = (shape.latent_pad + shape.rope_pad) * _BF16_BYTES
    rows, keys = config["BM"], config["BN"]
    return (config["stages"] * keys + rows) * width + keys * rows * _BF16_BYTES


def _power(count: int) -> int:
    """Return the smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


TEMPLATES = (MlaAttend(),)
