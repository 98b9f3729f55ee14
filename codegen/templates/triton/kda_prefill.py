"""kda_fb of prefill buckets: all of a KDA layer between its projections, in two or three launches.

`kda_chunk` prepares every chunk of 64 tokens of every head by itself; `kda_scan` walks the chunks
of a segment in order; `kda_norm` norms the outputs where several blocks share a head's columns.
"""

from __future__ import annotations

from typing import Any, ClassVar

import triton

from k3c.codegen.template import operand_bytes, padded, result_bytes
from k3c.codegen.templates.triton.kda_chunk import kda_chunk
from k3c.codegen.templates.triton.kda_node import kda_constexprs, operand, refuse_kda
from k3c.codegen.templates.triton.kda_scan import kda_norm, kda_scan
from k3c.codegen.triton_template import TritonTemplate
from k3c.codegen.tuning import Config
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Cost, Scalar, Stage
from k3c.targets.target import Target

CHUNK = 64
_F32_BYTES = 4
# Sums of 32 log decays, halved to either side, fit float32's exponents down to this bound.
_DIRECT_BOUND = -5.0
# Widths that dots take and that pairs of rows of the convolution fill.
_HEAD_DIMS = (32, 64, 128)
_NORM_TILE = 32
_CONFIGS = 12


class KdaPrefill(TritonTemplate):
    """`kda_fb` for buckets with more rows than segments."""

    name = "kda_prefill_gpu"
    op = "kda_fb"
    reference = "kda_fb"
    kernels: ClassVar = {"chunk": kda_chunk, "scan": kda_scan, "norm": kda_norm}

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        rows, segments = operand(node, "q").sizes[0], _segments(node)
        if rows <= segments:
            found = f"{rows} rows in {segments} segments"
            return Refusal("kda_prefill takes more rows than segments", found)
        keys = operand(node, "kda_state").sizes[2]
        if keys not in _HEAD_DIMS:
            return Refusal("kda_prefill takes head dims of 32, 64 or 128", str(keys))
        forget = operand(node, "f_a").sizes[1]
        if forget != triton.next_power_of_2(forget) or forget < 16:
            return Refusal("f_a's width must be a power of two of at least 16", str(forget))
        return refuse_kda(node)

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: rows, segments."""
        return (("rows", node.results[0].type.sizes[0]), ("segments", _segments(node)))

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of every chunk's matrices, decays and scale, for every head."""
        return _chunks(node) * node.attrs["heads"] * _block(node) * _F32_BYTES

    def cost(self, node: Node, target: Target) -> Cost:
        """Return operands and results once, the workspace twice, and the products."""
        rows, heads = node.results[0].type.sizes[0], node.attrs["heads"]
        width, forget = operand(node, "kda_state").sizes[2], operand(node, "f_a").sizes[1]
        a_token = width * (forget + 7 * CHUNK + 3 * width) + 8 * CHUNK * CHUNK
        scratch = self.workspace_bytes(node, target)
        return Cost(
            operand_bytes(node) + scratch, result_bytes(node) + scratch, 2 * rows * heads * a_token
        )

    def configs(self, node: Node, target: Target) -> tuple[Config, ...]:
        """Return the configurations worth measuring, the rule's choice first."""
        values = operand(node, "kda_state").sizes[3]
        found = [
            {"width": width, "scan_warps": warps, "scan_stages": stages, "part": part}
            for width in (128, 64, 32, 16)
            for warps in (4, 8)
            for stages in (3, 2, 1)
            for part in (64, 32)
            if width <= values and _scan_bytes(node, width, stages) <= target.shared_bytes
        ]

        def rank(config: Config) -> tuple[float, int, int, int]:
            # Few blocks walk slowly; many read the same chunks again.
            blocks = node.attrs["heads"] * values // config["width"]
            unlike = abs(blocks / target.cores - 0.5)
            return (unlike, -config["part"], config["scan_warps"], -config["scan_stages"])

        return tuple(sorted(found, key=rank)[:_CONFIGS])

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launches in order."""
        config = self.config(node, target)
        pdl = target.kind == "cuda"
        of_node = kda_constexprs(node)
        heads, width, eps = of_node["H"], of_node["K"], of_node.pop("EPS")
        sizes: dict[str, Any] = {
            "H": heads, "K": width, "V": width, "BLOCK": _block(node),
            "SCALE_AT": _block(node) - 16, "SEGMENTS": triton.next_power_of_2(_segments(node)),
        }  # fmt: skip
        chunk = self.stage(
            node, target, "chunk", (_chunks(node) * heads, 1, 1), pdl=pdl,
            PART=min(width, config["part"]), **{**of_node, **sizes, **_products(node, target)},
        )  # fmt: skip
        splits = width // config["width"]
        scan = self.stage(
            node, target, "scan", (_segments(node) * heads * splits, 1, 1), pdl=pdl,
            num_warps=config["scan_warps"], num_stages=config["scan_stages"],
            WIDTH=config["width"], EPS=eps, STAGES=config["scan_stages"], **sizes,
        )  # fmt: skip
        if splits == 1:
            return (chunk, scan)
        tiles = -(-node.results[0].type.sizes[0] * heads // _NORM_TILE)
        norm = self.stage(
            node, target, "norm", (tiles, 1, 1), pdl=pdl, H=heads, V=width, TILE=_NORM_TILE, EPS=eps
        )
        return (chunk, scan, norm)


def _segments(node: Node) -> int:
    return operand(node, "seg_start").sizes[0]


def _chunks(node: Node) -> int:
    """Most chunks that the rows can have: the last one of each segment may be short."""
    return (node.results[0].type.sizes[0] + _segments(node) * (CHUNK - 1)) // CHUNK


def _dot_bytes(node: Node) -> int:
    return 4 if operand(node, "q").dtype.name == "f32" else 2


def _block(node: Node) -> int:
    """f32 elements of a chunk in the workspace: matrices, decays, scale; a multiple of 64 bytes."""
    width = operand(node, "kda_state").sizes[2]
    matrices = 4 * CHUNK * width + CHUNK * CHUNK
    return padded(matrices * _dot_bytes(node) // _F32_BYTES + width, 16) + 16


def _scan_bytes(node: Node, width: int, stages: int) -> int:
    """Shared memory of the scan: the chunks in flight, the state and the errors."""
    keys = operand(node, "kda_state").sizes[2]
    matrices = 3 * CHUNK * keys + CHUNK * width + CHUNK * CHUNK
    return _dot_bytes(node) * (stages * matrices + (keys + CHUNK) * width)


def _products(node: Node, target: Target) -> dict[str, Any]:
    """Constexprs that say how a chunk multiplies keys of one group of rows."""
    bound = node.attrs["lower_bound"]
    bounded = not isinstance(bound, str) and bound is not None and bound >= _DIRECT_BOUND
    narrow = _dot_bytes(node) == 2
    return {
        "DIRECT": int(bounded and narrow),
        "DIAGONAL": "tf32" if narrow and target.kind == "cuda" else "ieee",
    }


TEMPLATES = (KdaPrefill(),)
