"""Latent mixture of experts: the routed experts work in a narrow latent space.

Router and shared experts read the full width. Down-projection, experts, weighted sum, norm,
up-projection, then the shared experts are added.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3c.export.ops import library as ops
from k3c.model.config import TextConfig
from k3c.model.layers import Linear, Matrix, RMSNorm, parameter
from k3c.model.mlp import MLP
from k3c.model.mxfp4 import MX_BLOCK
from k3c.model.options import ModelOptions


class Router(Matrix):
    """Sigmoid router; the correction bias takes part in the choice only."""

    def __init__(self, config: TextConfig, options: ModelOptions) -> None:
        super().__init__(config.num_experts, config.hidden_size, options)
        self.e_score_correction_bias = parameter(config.num_experts, dtype=options.vector)
        self.experts_per_token = config.num_experts_per_token
        self.renormalize = config.moe_renormalize
        self.scale = config.routed_scaling_factor

    def logits(self, y: Tensor) -> Tensor:
        """Return f32[T, E] for y A[T, D]."""
        return ops.linear(y, self.weight, True)

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights f32[T, k] and experts i32[T, k] for y A[T, D]."""
        return ops.route_topk(
            self.logits(y), self.e_score_correction_bias,
            self.experts_per_token, self.renormalize, self.scale,
        )  # fmt: skip


class ExpertMatrix(nn.Module):
    """One MXFP4 matrix of every expert."""

    def __init__(self, experts: int, out_features: int, in_features: int) -> None:
        super().__init__()
        byte = torch.uint8
        self.weight_packed = parameter(experts, out_features, in_features // 2, dtype=byte)
        self.weight_scale = parameter(experts, out_features, in_features // MX_BLOCK, dtype=byte)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        """Return A[T, k, N] for x A[T, K] or A[T, k, K] and experts i32[T, k]."""
        return ops.grouped_linear(x, self.weight_packed, self.weight_scale, experts)


class Experts(nn.Module):
    """The routed experts: w1 is gate, w3 is up, w2 is down."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        count, inner = config.num_experts, config.moe_intermediate_size
        latent = config.routed_expert_hidden_size
        self.caps = (config.activation_situ_beta, config.activation_situ_linear_beta)
        self.w1 = ExpertMatrix(count, inner, latent)
        self.w3 = ExpertMatrix(count, inner, latent)
        self.w2 = ExpertMatrix(count, latent, inner)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        """Return A[T, k, L], one row for each of a token's experts, for x A[T, L]."""
        return self.w2(ops.situ(self.w1(x, experts), self.w3(x, experts), *self.caps), experts)


class LatentMoE(nn.Module):
    """One latent mixture of experts with its shared experts."""

    def __init__(self, config: TextConfig, options: ModelOptions) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Router(config, options)
        self.routed_expert_down_proj = Linear(latent, hidden, options)
        self.experts = Experts(config)
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps, options)
        self.routed_expert_up_proj = Linear(hidden, latent, options)
        self.shared_experts = MLP(config, config.shared_width, options)

    def forward(self, y: Tensor) -> Tensor:
        """Return A[T, D] for y A[T, D]."""
        weights, experts = self.gate(y)
        rows = self.experts(self.routed_expert_down_proj(y), experts)
        latent = self.routed_expert_norm(ops.combine(rows, weights))
        return self.routed_expert_up_proj(latent) + self.shared_experts(y)
