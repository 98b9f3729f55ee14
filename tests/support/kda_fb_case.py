"""A step of kda_fb on random data: `KdaCase` with the forget input still a product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3c.ir.graph import Node
from tests.support.kda_case import KdaCase
from tests.support.nodes import TORCH, node

F_A, F_B, CONV_STATE, KDA_STATE = 4, 12, 13, 14
_NAMES = {v: k for k, v in TORCH.items()}


@dataclass(frozen=True)
class KdaFbCase(KdaCase):
    """Shapes and segments of a step.

    Attributes:
        rank: Width of f_a.
        state: Dtype of the KDA state.
    """

    rank: int = 32
    state: torch.dtype = torch.float32

    def operands(self) -> list[Tensor]:
        """Return operands: slots that must not be read, and padding rows, hold NaN."""
        base = super().operands()
        gen = torch.Generator().manual_seed(self.seed + 1)
        low = torch.randn((self.rows, self.rank), generator=gen).to(self.act)
        low[sum(self.tokens) :] = torch.nan
        wide = torch.randn((self.heads * self.key, self.rank), generator=gen) / self.rank**0.5
        made = [*base[:F_A], low, *base[F_A + 1 : F_B], wide.to(self.act), *base[F_B:]]
        made[KDA_STATE] = made[KDA_STATE].to(self.state)
        return made

    def node(self, operands: list[Tensor]) -> Node:
        """Return the node."""
        results = [operands[i] for i in (2, CONV_STATE, KDA_STATE)]
        types = [(_NAMES[t.dtype], *t.shape) for t in results]
        return node("kda_fb", operands, types, **self.attrs)
