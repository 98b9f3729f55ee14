"""The dense feed-forward: gate and up, SiTU, down. Layer 0 and the shared experts."""

from __future__ import annotations

from torch import Tensor, nn

from k3c.export.ops import library as ops
from k3c.model.config import TextConfig
from k3c.model.layers import Linear
from k3c.model.options import ModelOptions


class MLP(nn.Module):
    """down(SiTU(gate x, up x))."""

    def __init__(self, config: TextConfig, width: int, options: ModelOptions) -> None:
        super().__init__()
        self.caps = (config.activation_situ_beta, config.activation_situ_linear_beta)
        self.gate_proj = Linear(width, config.hidden_size, options)
        self.up_proj = Linear(width, config.hidden_size, options)
        self.down_proj = Linear(config.hidden_size, width, options)

    def forward(self, x: Tensor) -> Tensor:
        """Return A[T, D] for x A[T, D]."""
        return self.down_proj(ops.situ(self.gate_proj(x), self.up_proj(x), *self.caps))
