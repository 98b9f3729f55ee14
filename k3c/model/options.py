"""How a model computes: element types, and which of two equal forms it uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3c.export.ops import internal_dtype

# 16 tokens bound the cumulative log decay by 80, inside the exponent range of float32.
KDA_CHUNK_TOKENS = 16


@dataclass(frozen=True)
class ModelOptions:
    """Element types and forms of a model.

    Attributes:
        act: Activations, MLA cache and convolution state.
        weight: Linear and embedding weights; a checkpoint may override one (`retype_weights`).
        kda_chunk: Tokens a chunk of the KDA recurrence; 0: token by token.
        expanded_mla: Use the expanded form of MLA; only the absorbed one can be exported.
    """

    act: torch.dtype = torch.bfloat16
    weight: torch.dtype = torch.bfloat16
    kda_chunk: int = KDA_CHUNK_TOKENS
    expanded_mla: bool = False

    @property
    def vector(self) -> torch.dtype:
        """Element type of small vectors, of the KDA state and inside the ops."""
        return internal_dtype(self.act)
