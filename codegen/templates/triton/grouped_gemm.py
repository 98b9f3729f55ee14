"""Templates of `grouped_gemm` on MXFP4 experts: a few rows an expert, and many.

Both are the same kernel. With few rows it is a stream of weights, and the configuration is chosen
for bytes in flight; with many rows its tiles are wide, so that decoding a weight pays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from k3c.codegen.template import operand_bytes, padded, refuse_dtype, result_bytes
from k3c.codegen.templates.triton.grouped_kernel import grouped_gemm
from k3c.codegen.templates.triton.mxfp4_gpu_layout import CHUNK, TILE_ROWS, Mxfp4GpuLayout
from k3c.codegen.triton_template import INT32_LIMIT, TritonTemplate
from k3c.codegen.tuning import Config
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.ir.types import MX_BLOCK
from k3c.targets.catalogue import Cost, Stage
from k3c.targets.target import Target

_EPILOGUES = ("none", "situ")
# Tokens of a step up to which an expert of a sparse model has few rows.
DECODE_TOKENS = 512
# Tiles of x that pass over an expert's weights together: with 128 rows each, 7 MB of x.
_GROUP = 8
_CODE_BITS = 4


def _config(
    block: int, slices: int, chunks: int, tokens: tuple[int, ...], depth: int, resident: int,
    warps: int = 4, registers: int = 0,
) -> Config:  # fmt: skip
    """Return a configuration.

    Args:
        block: Weight rows of a product.
        slices: Parts of K in a product.
        chunks: Chunks of 128 columns a step.
        tokens: Widths of tiles of x, up to three, ascending.
        depth: Stages of the pipeline.
        resident: Blocks that a core is given.
        warps: Warps of a block.
        registers: Most registers of a thread; 0: as many as the compiler likes.
    """
    narrow, middle, wide = (0,) * (3 - len(tokens)) + tokens
    return {
        "block": block, "slices": slices, "chunks": chunks, "narrow": narrow, "middle": middle,
        "wide": wide, "depth": depth, "resident": resident, "warps": warps, "registers": registers,
    }  # fmt: skip


# f32 checks results; it is not measured.
_F32_CONFIG = _config(64, 1, 1, (16,), 2, 2)


class _Grouped(TritonTemplate):
    """What both templates answer alike."""

    op = "grouped_gemm"
    reference = "grouped_gemm"
    kernels: ClassVar[Mapping[str, Any]] = {"": grouped_gemm}

    def layouts(self, node: Node, target: Target) -> Mapping[int, str]:
        """Return the layout of the experts."""
        return {1: _layout(node).name}

    def scalars(self, node: Node) -> tuple[()]:
        """Return the run-time integers: none, offsets say how many rows there are."""
        return ()

    def cost(self, node: Node, target: Target) -> Cost:
        """Return bytes and operations of one launch where rows choose experts evenly."""
        weight = node.operands[1].type
        experts, rows, inner = weight.sizes
        total = node.attrs.get("total_experts") or experts
        assert isinstance(total, int), f"total_experts {total!r} is no integer"
        # Of a rank's experts, where others have the rest: its part of the rows.
        flat = max(1, node.operands[3].type.elements * experts // total)
        x = node.operands[0].type
        packed = _layout(node).nbytes(experts, inner)
        elsewhere = x.nbytes - x.nbytes * experts // total if len(x.shape) == 3 else 0
        read = operand_bytes(node) - elsewhere - packed + packed * min(experts, flat) // experts
        written = result_bytes(node) * experts // total
        return Cost(read, written, 2 * flat * rows * inner)

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the one launch: as many blocks as run at a time, fewer where work is less."""
        config = self.config(node, target)
        layout, experts = _layout(node), node.operands[1].type.sizes[0]
        tokens = tuple(t for t in (config["narrow"], config["middle"], config["wide"]) if t)
        own = config["block"] // config["slices"]
        blocks = -(-layout.source_rows // own)
        flat = node.operands[3].type.elements
        items = (min(experts, flat) + flat // tokens[-1]) * blocks
        grid = min(items, target.cores * config["resident"])
        x = node.operands[0].type
        stage = self.stage(
            node, target, "", (grid, 1, 1),
            num_warps=config["warps"], num_stages=config["depth"], pdl=target.kind == "cuda",
            max_registers=config["registers"],
            E=experts, E_PADDED=_power_of_two(experts), K=x.sizes[-1], WIDTH=layout.width,
            CHOICES=node.operands[3].type.sizes[1], PER_CHOICE=int(len(x.sizes) == 3),
            SITU=int(layout.situ), BETA=_number(node, "beta", layout.situ),
            LINEAR_BETA=_number(node, "linear_beta", layout.situ), BLOCK=config["block"],
            SLICES=config["slices"], CHUNKS=config["chunks"], TOKENS=tokens, GROUP=_GROUP,
            WARPS=config["warps"], NVIDIA=int(target.kind == "cuda"),
        )  # fmt: skip
        return (stage,)


class GroupedGemmDecode(_Grouped):
    """`grouped_gemm` for steps of up to 512 tokens."""

    name = "grouped_gemm_decode"

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        refusal = _refuse(node)
        tokens = node.operands[3].type.sizes[0]
        if refusal is None and tokens > DECODE_TOKENS:
            return Refusal(f"{self.name} takes {DECODE_TOKENS} tokens", tokens)
        return refusal

    def configs(self, node: Node, target: Target) -> tuple[Config, ...]:
        """Return ways to stream weights; the fewer the rows, the smaller the blocks."""
        tokens = node.operands[3].type.sizes[0]
        if node.operands[0].type.dtype.name == "f32":
            return (_F32_CONFIG,)
        wide = (8,) if tokens <= 64 else (8, 16) if tokens <= 128 else (16, 32)
        # Few rows: small blocks, so that every core has one; many: large ones, for less work a
        # weight. Block, slices, chunks, depth, resident, registers.
        small = ((64, 4, 1, 4, 3, 168), (64, 4, 1, 6, 3, 168), (64, 2, 1, 4, 3, 168))
        large = ((64, 1, 1, 4, 4, 128), (64, 2, 1, 6, 3, 168), (64, 1, 1, 6, 4, 128))
        large = ((128, 1, 1, 4, 3, 168), (64, 1, 2, 3, 2, 0), (128, 1, 1, 3, 2, 0), *large)
        shapes = (*small, *large) if tokens <= 4 else (*large, *small)
        return tuple(
            _config(block, slices, chunks, wide, depth, resident, registers=registers)
            for block, slices, chunks, depth, resident, registers in shapes
        )


class GroupedGemmPrefill(_Grouped):
    """`grouped_gemm` for any number of tokens."""

    name = "grouped_gemm_prefill"

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        return _refuse(node)

    def configs(self, node: Node, target: Target) -> tuple[Config, ...]:
        """Return tilings; the widest that shared memory and registers hold comes first."""
        if node.operands[0].type.dtype.name == "f32":
            return (_F32_CONFIG,)
        depth = 3 if target.shared_bytes >= 200 * 1024 else 2
        return (
            _config(128, 1, 1, (32, 128), depth, 1, warps=8),
            _config(128, 1, 1, (64, 128), depth, 1, warps=8),
            _config(128, 1, 1, (32, 64), depth, 2, warps=8),
            _config(128, 1, 1, (64,), depth, 2, warps=8),
            _config(128, 1, 1, (128,), depth, 1, warps=8),
            _config(64, 1, 1, (64,), depth, 3),
            _config(64, 1, 1, (128,), depth, 2),
        )


def _layout(node: Node) -> Mxfp4GpuLayout:
    situ = node.attrs.get("epilogue", "none") == "situ"
    return Mxfp4GpuLayout(node.results[0].type.sizes[-1], situ)


def _number(node: Node, name: str, used: bool) -> float:
    """Return a number of the epilogue, 0 where it has none."""
    value = node.attrs.get(name, "none")
    return float(value) if used and isinstance(value, int | float) else 0.0


def _power_of_two(count: int) -> int:
    return max(2, 1 << (count - 1).bit_length())


def _refuse(node: Node) -> Refusal | None:
    """Return why no grouped kernel implements a node, or None."""
    epilogue = node.attrs.get("epilogue", "none")
    if epilogue not in _EPILOGUES:
        return Refusal(f"epilogue must be {' or '.join(_EPILOGUES)}", epilogue)
    if (len(node.operands), len(node.results)) != (4, 1):
        return Refusal("grouped_gemm takes 4 operands to 1 result", len(node.results))
    wrong = refuse_dtype(node, 0, ("f32", "bf16")) or refuse_dtype(node, 1, ("mxfp4",))
    if wrong is not None:
        return wrong
    if node.results[0].type.dtype != node.operands[0].type.dtype:
        return Refusal("the result must have the dtype of x", node.results[0].type.dtype.name)
    return _refuse_sizes(node)


def _refuse_sizes(node: Node) -> Refusal | None:
    _, rows, inner = node.operands[1].type.sizes
    used = _layout(node).source_rows
    if rows != used:
        return Refusal(f"the epilogue uses {used} rows an expert", rows)
    if inner % MX_BLOCK:
        return Refusal(f"columns must be a multiple of {MX_BLOCK}", inner)
    # An expert's codes are counted in 32 bits, in words of eight.
    if padded(rows, TILE_ROWS) * padded(inner, CHUNK) * _CODE_BITS // 32 >= INT32_LIMIT:
        return Refusal("an expert's matrix must have less than 2^34 elements", rows * inner)
    # Items are counted in 32 bits too; a tile of x has at least 8 rows.
    if node.operands[3].type.elements * padded(rows, TILE_ROWS) // TILE_ROWS >= INT32_LIMIT:
        return Refusal("rows times tiles of weights must be less than 2^31", rows)
    return None


TEMPLATES = (GroupedGemmDecode(), GroupedGemmPrefill())
