"""A step of KDA on random data: operands, node, and what must stay as it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3c.ir.graph import Node
from tests.support.nodes import node

CONV_STATE, KDA_STATE = 12, 13


@dataclass(frozen=True)
class KdaCase:
    """Shapes and segments of a step.

    Attributes:
        heads: H.
        key: K.
        value: V.
        rows: T, padding included.
        tokens: Tokens of each segment; 0 is a padded segment.
        context: Tokens already in each segment's state; 0 reads no state.
        act: Activation dtype.
        lower_bound: Bound of the gate or "none".
        seed: Of the random data.
    """

    heads: int
    key: int
    value: int
    rows: int
    tokens: tuple[int, ...]
    context: tuple[int, ...]
    act: torch.dtype = torch.bfloat16
    lower_bound: float | str = -5.0
    seed: int = 0

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes of the node."""
        return {
            "heads": self.heads,
            "lower_bound": self.lower_bound,
            "scale": self.key**-0.5,
            "l2_eps": 1e-6,
            "eps": 1e-5,
            "chunk": 0,
        }

    @property
    def slots(self) -> list[int]:
        """Slot of each segment: live ones descend, so that order and slot differ; padded have 0."""
        live = len([n for n in self.tokens if n])
        ranks = iter(range(live, 0, -1))
        return [next(ranks) if n else 0 for n in self.tokens]

    def operands(self) -> list[Tensor]:
        """Return operands: slots that must not be read, and padding rows, hold NaN."""
        gen = torch.Generator().manual_seed(self.seed)
        keys, values = self.heads * self.key, self.heads * self.value

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=gen) * scale

        rows = [random(self.rows, n).to(self.act) for n in (keys, keys, values, values, keys)]
        rows.append(random(self.rows, self.heads).to(self.act))
        weights = [random(n, 4, scale=0.5) for n in (keys, keys, values)]
        small = [random(self.heads), random(keys), 1 + random(self.value, scale=0.1)]
        starts = [sum(self.tokens[:i]) for i in range(len(self.tokens))]
        for tensor in rows:
            tensor[sum(self.tokens) :] = torch.nan
        slots = self.slots
        history = random(max(slots) + 2, 3, 2 * keys + values).to(self.act)
        state = random(max(slots) + 2, self.heads, self.key, self.value, scale=0.3)
        for pool in (history, state):
            used = [s for s, n, c in zip(slots, self.tokens, self.context, strict=True) if n and c]
            unread = [s for s in range(len(pool)) if s not in used]
            pool[unread] = torch.nan
        indices = [torch.tensor(x, dtype=torch.int32) for x in
                   (starts, self.tokens, slots, self.context)]  # fmt: skip
        return [*rows, *weights, *small, history, state, *indices]

    def node(self, operands: list[Tensor]) -> Node:
        """Return the node."""
        act = "bf16" if self.act == torch.bfloat16 else "f32"
        states = [
            ("f32" if i == KDA_STATE else act, *operands[i].shape) for i in (CONV_STATE, KDA_STATE)
        ]
        return node("kda", operands, [(act, *operands[2].shape), *states], **self.attrs)
