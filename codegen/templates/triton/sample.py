"""sample: one token a request, greedy or sampled, without sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from triton import next_power_of_2

from k3c.codegen.template import operand_bytes, refuse_dtype, result_bytes
from k3c.codegen.templates.triton import sample_kernel
from k3c.codegen.triton_template import TritonTemplate
from k3c.codegen.tuning import Config
from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Cost, Stage
from k3c.targets.target import Target

_WORD_BYTES = 4
_THREADS = 1024  # of the block that samples a row, which reads all of it again and again
_MOST = 8192  # logits above the cut that are copied: more than language models leave, as a rule
_WIDTH = 4  # neighbouring elements a thread: 16 bytes


class Sample(TritonTemplate):
    """`sample` for any number of requests."""

    name, op, reference = "triton_sample", "sample", "sample"
    kernels: ClassVar[Mapping[str, Any]] = dict.fromkeys(("scan", "choose"), sample_kernel.sample)

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return why this is not the template for a node, or None."""
        return refuse_dtype(node, 0, ("f32",))

    def configs(self, node: Node, target: Target) -> tuple[Config, ...]:
        """Return the logits of a block that scans: few for few rows, so that many blocks read."""
        rows, vocab = node.operands[0].type.sizes
        sizes = [
            min(next_power_of_2(vocab), n) for n in ((2048, 4096) if rows < 16 else (8192, 4096))
        ]
        return tuple({"chunk": n} for n in dict.fromkeys(sizes))

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of each chunk's largest logit, of each row's copy, and their indices."""
        rows, vocab = node.operands[0].type.sizes
        chunks = -(-vocab // self.config(node, target)["chunk"])
        return 2 * _WORD_BYTES * rows * (chunks + self._most(vocab))

    def cost(self, node: Node, target: Target) -> Cost:
        """Return bytes and operations of greedy rows."""
        operations = 3 * node.operands[0].type.elements
        return Cost(operand_bytes(node), result_bytes(node), operations)

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launches: a block a chunk, then a block a row."""
        rows, vocab = node.operands[0].type.sizes
        chunk, pdl = self.config(node, target)["chunk"], target.kind == "cuda"
        chunks = -(-vocab // chunk)
        warps = max(1, min(_THREADS, next_power_of_2(vocab) // _WIDTH) // target.lanes)
        shape = {"V": vocab, "CHUNK": chunk, "CHUNKS": next_power_of_2(chunks)}
        shape["MOST"] = self._most(vocab)
        tile = _WIDTH * warps * target.lanes
        scan = self.stage(
            node, target, "scan", (rows * chunks, 1, 1),
            pdl=pdl, STAGE="scan", TILE=tile, **shape,
        )  # fmt: skip
        choose = self.stage(
            node, target, "choose", (rows, 1, 1),
            num_warps=warps, pdl=pdl, STAGE="choose", TILE=tile, **shape,
        )  # fmt: skip
        return scan, choose

    def _most(self, vocab: int) -> int:
        """Return how many logits of a row are copied at most."""
        return min(_MOST, vocab)


TEMPLATES = (Sample(),)
