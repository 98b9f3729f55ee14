"""route_topk, dispatch and route_dispatch: the choice of experts, and rows sorted by expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from triton import next_power_of_2

from k3c.codegen.template import first_expert, local_experts, refuse_dtype
from k3c.codegen.templates.triton import dispatch_kernel, route_kernel
from k3c.codegen.triton_template import TritonTemplate
from k3c.codegen.tuning import Config
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Scalar, Stage
from k3c.targets.target import Target

_I32_BYTES = 4
_MOST_K = 64  # a choice keeps a token's winners in the registers of a warp
_PAIRS_LIMIT = 8192  # routed rows up to which comparing all pairs should beat three more launches
_EITHER_WAY = (2048, 32768)  # routed rows between which both ways are worth measuring
_CHUNK = 256  # routed rows of a chunk, compared pair by pair
_QUERIES = 32  # rows or experts that a block places by comparing with all rows
_PAIRS_BLOCKS = (256, 1024)  # rows compared with at once: few where there are no more
_STARTS_A_THREAD = 64  # comparisons of experts with rows, at once
_SUM_CHUNKS, _SUM_EXPERTS = 512, 8  # chunks summed at once, experts a block
_SORT_STAGES = ("pairs", "count", "sum", "start", "place")


class _Sorting(TritonTemplate):
    """What dispatch and route_dispatch share: the launches that sort by expert."""

    def chunked(self, rows: int) -> tuple[int, ...]:
        """Return whether to count in chunks: the ways worth measuring, the rule's first."""
        rule = int(rows > _PAIRS_LIMIT)
        low, high = _EITHER_WAY
        return (rule, 1 - rule) if low < rows <= high else (rule,)

    def sort_stages(self, node: Node, target: Target, rows: int) -> tuple[Stage, ...]:
        """Return the launches that sort `rows` routed rows."""
        count = self._count(node)
        if not self.config(node, target)["chunks"]:
            grid = -(-rows // _QUERIES) + -(-(count + 1) // _QUERIES)
            block = _PAIRS_BLOCKS[rows > _PAIRS_BLOCKS[0]]
            return (self._sort(node, target, "pairs", grid, A=_QUERIES, B=block),)
        bins, chunks = next_power_of_2(count + 1), -(-rows // _CHUNK)
        sums = {"A": _SUM_CHUNKS, "B": _SUM_EXPERTS}
        return (
            self._sort(node, target, "count", chunks, A=bins, B=0),
            self._sort(node, target, "sum", -(-count // _SUM_EXPERTS), **sums),
            self._sort(node, target, "start", 1, A=bins, B=0),
            self._sort(node, target, "place", chunks, A=0, B=0),
        )

    def counts_bytes(self, node: Node, target: Target, rows: int) -> int:
        """Return the bytes of the counts of each chunk and of all; at least one word."""
        chunks = -(-rows // _CHUNK) + 1 if self.config(node, target)["chunks"] else 0
        return _I32_BYTES * max(chunks * self._count(node), 1)

    def _count(self, node: Node) -> int:
        return node.results[-2].type.sizes[0] - 1

    def _sort(self, node: Node, target: Target, name: str, grid: int, **sizes: int) -> Stage:
        constants: dict[str, Any] = {
            "STAGE": name, "COUNT": self._count(node), "CHUNK": _CHUNK,
            "K": node.results[-1].type.sizes[1], **sizes,
        }  # fmt: skip
        # A thread of `place` holds a row of its own and compares it with the chunk.
        warps = _CHUNK // target.lanes if name == "place" else 4
        pdl = target.kind == "cuda"
        return self.stage(node, target, name, (grid, 1, 1), num_warps=warps, pdl=pdl, **constants)


class Dispatch(_Sorting):
    """`dispatch`: experts i32[T, k] -> offsets i32[E + 1], order i32[T, k]."""

    name, op, reference = "triton_dispatch", "dispatch", "dispatch"
    kernels: ClassVar[Mapping[str, Any]] = dict.fromkeys(
        _SORT_STAGES, dispatch_kernel.dispatch_stage
    )

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        return refuse_dtype(node, 0, ("i32",))

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: tokens, the first expert of this rank."""
        return ("rows", node.operands[0].type.sizes[0]), first_expert(node)

    def configs(self, node: Node, target: Target) -> tuple[Config, ...]:
        """Return the ways to count."""
        return tuple({"chunks": n} for n in self.chunked(node.operands[0].type.elements))

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of the counts."""
        return self.counts_bytes(node, target, node.operands[0].type.elements)

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launches."""
        return self.sort_stages(node, target, node.operands[0].type.elements)


class _Choosing(TritonTemplate):
    """What route_topk and route_dispatch share: the constants of a choice."""

    mapped: ClassVar[bool] = False  # whether the experts of this rank are found by a map

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        if (len(node.operands) > 2) != self.mapped:
            return Refusal(f"{self.name} takes {3 if self.mapped else 2} operands", node.op)
        experts, k = node.operands[0].type.sizes[1], node.results[0].type.sizes[1]
        if not 1 <= k <= min(experts, _MOST_K):
            return Refusal(f"{node.op} chooses 1 to {min(experts, _MOST_K)} experts", k)
        return refuse_dtype(node, 0, ("f32",)) or refuse_dtype(node, 1, ("f32",))

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: tokens, the first expert of this rank."""
        return ("rows", node.operands[0].type.sizes[0]), first_expert(node)

    def choice_constants(self, node: Node) -> dict[str, Any]:
        """Return the constexprs of a choice, but for how it is dealt to warps."""
        experts, k = node.operands[0].type.sizes[1], node.results[0].type.sizes[1]
        scale = node.attrs["scale"]
        assert isinstance(scale, int | float), f"scale {scale!r} is no number"
        return {
            "E": experts, "K": k, "KP": next_power_of_2(k), "COUNT": local_experts(node, experts),
            "RENORMALIZE": int(bool(node.attrs["renormalize"])), "SCALE": float(scale),
        }  # fmt: skip

    def splits(self, node: Node, target: Target) -> tuple[int, ...]:
        """Return the numbers of warps that a token's experts may be dealt to, the rule's first."""
        rows, experts = node.operands[0].type.sizes
        most = max(next_power_of_2(experts) // target.lanes, 1)
        # Dealing shortens a token's way and costs more work: good while blocks are few.
        wanted = (1, 8) if rows > 2 * target.cores else (8, 4, 1)
        return tuple(dict.fromkeys(min(n, most) for n in wanted))


class RouteTopk(_Choosing):
    """`route_topk`: logits f32[T, E], bias f32[E] -> weights f32[T, k], experts i32[T, k]."""

    name, op, reference = "triton_route_topk", "route_topk", "route_topk"
    kernels: ClassVar[Mapping[str, Any]] = {"": route_kernel.route_topk}

    def configs(self, node: Node, target: Target) -> tuple[Config, ...]:
        """Return the numbers of warps a token."""
        return tuple({"split": n} for n in self.splits(node, target))

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launch: a block a token."""
        split = self.config(node, target)["split"]
        grid, pdl = (node.operands[0].type.sizes[0], 1, 1), target.kind == "cuda"
        constants = {**self.choice_constants(node), "T": 1, "SPLIT": split}
        return (self.stage(node, target, "", grid, num_warps=split, pdl=pdl, **constants),)


class RouteDispatch(_Choosing, _Sorting):
    """`route_dispatch`: weights, and the routed rows of this rank's experts sorted by expert.

    One block does it all for very few tokens; else a block chooses for each token, and later
    launches sort.
    """

    name, op, reference = "triton_route_dispatch", "route_dispatch", "route_dispatch"
    kernels: ClassVar[Mapping[str, Any]] = {
        "few": route_kernel.route_few,
        "choose": route_kernel.route_choice,
        **dict.fromkeys(_SORT_STAGES, dispatch_kernel.route_dispatch_stage),
    }

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of the chosen experts, and of the counts."""
        rows = node.results[0].type.elements
        return _I32_BYTES * rows + self.counts_bytes(node, target, rows)

    def configs(self, node: Node, target: Target) -> tuple[Config, ...]:
        """Return warps a token; whether one block takes all tokens, `few`; the way to count."""
        rows, warps = node.operands[0].type.sizes[0], 1024 // target.lanes
        splits = self.splits(node, target)
        few = [n for n in splits if rows <= 8 and next_power_of_2(rows) * n <= min(warps, 16)]
        ways = self.chunked(node.results[0].type.elements)
        apart = [{"split": n, "few": 0, "chunks": c} for c in ways for n in splits]
        together = [{"split": n, "few": 1, "chunks": 0} for n in few]
        return tuple(together + apart if rows <= 2 else apart + together)

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launches."""
        config, rows = self.config(node, target), node.operands[0].type.sizes[0]
        split, pdl = config["split"], target.kind == "cuda"
        constants = {**self.choice_constants(node), "SPLIT": split}
        if not config["few"]:
            choose = self.stage(
                node, target, "choose", (rows, 1, 1), num_warps=split, pdl=pdl, T=1, **constants
            )
            return choose, *self.sort_stages(node, target, node.results[0].type.elements)
        tokens = next_power_of_2(rows)
        warps, routed = tokens * split, tokens * constants["KP"]
        most = _STARTS_A_THREAD * target.lanes * warps // routed
        bins = min(next_power_of_2(self._count(node) + 1), most)
        more = {**constants, "T": tokens, "BINS": bins}
        return (self.stage(node, target, "few", (1, 1, 1), num_warps=warps, pdl=pdl, **more),)


TEMPLATES = (RouteTopk(), Dispatch(), RouteDispatch())
