"""From checkpoint tensors to packed weights: read, concatenate, convert, pack, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from k3c.artifact import WeightEntry
from k3c.artifact_ranks import weight_of_rank
from k3c.artifact_writer import WeightsWriter
from k3c.codegen.template import pack
from k3c.ir.types import DTYPES, Layout, TensorType
from k3c.model.checkpoint import Checkpoint
from k3c.model.tensor_part import Part
from k3c.placement.expert_map import expert_map
from k3c.placement.placement import Placement

MAP_SOURCE = "placement.*.expert_map"  # made from the placement, not read
_TORCH_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True)
class WeightPacker:
    """Packs the weights of a plan from a checkpoint.

    Attributes:
        checkpoint: Where the tensors come from.
        mesh: Axes and sizes of the ranks that share the model.
        rank: Which of them to pack for.
        advance: Called with the bytes of each packed weight.
        placement: Which logical expert each physical one is; None: no weight is placed.
    """

    checkpoint: Checkpoint
    mesh: Mapping[str, int]
    rank: int
    advance: Callable[[int], None] = lambda _: None
    placement: Placement | None = None

    def write(self, entries: Sequence[WeightEntry], out: WeightsWriter) -> None:
        """Write every entry in ascending order of offset; at most one weight is held.

        Raises:
            CheckpointError: A tensor cannot be read or holds a forbidden value.
        """
        for entry in sorted(entries, key=lambda e: e.offset):
            kind = TensorType(DTYPES[entry.dtype], entry.shape, Layout(entry.layout))
            data = pack(kind, self.arrays(weight_of_rank(entry, self.mesh, self.rank)))
            assert data.nbytes == entry.nbytes, (
                f"{entry.name} packs to {data.nbytes} bytes, planned {entry.nbytes}"
            )
            out.write_at(entry.offset, data.data)
            self.advance(entry.nbytes)

    def arrays(self, entry: WeightEntry) -> tuple[np.ndarray[Any, Any], ...]:
        """Return what `pack` takes: (packed, scale) of an mxfp4 weight, one array of another."""
        if entry.sources == (MAP_SOURCE,):
            table = expert_map(self._placed(), entry.layer)
            return (table[entry.ranges[0].start : entry.ranges[0].stop],)
        if entry.dtype == "mxfp4":
            pairs = [
                self._placed_experts(source, entry.layer, part)
                if part is not None and entry.ranges[0].placed
                else self.checkpoint.load_experts(source, entry.layer, part)
                for source, part in _parts(entry)
            ]
            packed, scale = (torch.cat(parts, dim=1) for parts in zip(*pairs, strict=True))
            return packed.numpy(), scale.numpy()
        dtype = _TORCH_DTYPES[entry.dtype]
        parts = [(s.replace("*", str(entry.layer), 1), part) for s, part in _parts(entry)]
        rows = torch.cat([self.checkpoint.load(name, part).to(dtype) for name, part in parts])
        if dtype == torch.bfloat16:
            # numpy has no bfloat16: the bits travel as uint16.
            return (rows.view(torch.uint16).numpy(),)
        return (rows.numpy(),)

    def _placed(self) -> Placement:
        assert self.placement is not None, "experts are placed, nobody said where"
        return self.placement

    def _placed_experts(
        self, source: str, layer: int, physical: Part
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (packed, scale) of some physical experts, in their order."""
        logical = [expert for rank in self._placed().layers[layer] for expert in rank]
        pairs = [
            self.checkpoint.load_experts(source, layer, Part(0, expert, expert + 1))
            for expert in logical[physical.start : physical.stop]
        ]
        packed, scale = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return packed, scale


def _parts(entry: WeightEntry) -> list[tuple[str, Part | None]]:
    """Return each source of an entry and what the rank reads of it."""
    whole = (None,) * len(entry.sources)
    ranges = [None if r.dim < 0 else Part(r.dim, r.start, r.stop) for r in entry.ranges]
    return list(zip(entry.sources, ranges or whole, strict=True))
