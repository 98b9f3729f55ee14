"""Kimi Delta Attention: a gated delta rule with a decay for every key channel."""

from __future__ import annotations

from torch import Tensor, nn

from k3c.export.ops import library as ops
from k3c.model.config import TextConfig
from k3c.model.layers import Linear, Vector, parameter
from k3c.model.options import ModelOptions

L2_EPS = 1e-6  # of the q and k norms; fixed by the architecture, no config key


class KimiDeltaAttention(nn.Module):
    """One KDA layer. Channels are head-major everywhere."""

    def __init__(self, config: TextConfig, options: ModelOptions) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.kda_width
        self.heads, self.head_dim = config.kda_num_heads, config.kda_head_dim
        self.eps, self.lower_bound = config.rms_norm_eps, config.gate_lower_bound
        self.chunk = options.kda_chunk
        taps = config.short_conv_kernel_size
        self.q_proj = Linear(width, hidden, options)
        self.k_proj = Linear(width, hidden, options)
        self.v_proj = Linear(width, hidden, options)
        self.g_proj = Linear(width, hidden, options)
        self.f_a_proj = Linear(self.head_dim, hidden, options)
        self.f_b_proj = Linear(width, self.head_dim, options)
        self.b_proj = Linear(self.heads, hidden, options)
        self.q_conv1d = Vector(width, taps, options=options)
        self.k_conv1d = Vector(width, taps, options=options)
        self.v_conv1d = Vector(width, taps, options=options)
        self.A_log = parameter(self.heads, dtype=options.vector)
        self.dt_bias = parameter(width, dtype=options.vector)
        self.o_norm = Vector(self.head_dim, options=options)
        self.o_proj = Linear(hidden, width, options)

    def forward(
        self, y: Tensor, conv_state: Tensor, kda_state: Tensor, where: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the layer.

        Args:
            y: A[T, D], normalised layer input.
            conv_state: A[S, 3, 3P].
            kda_state: f32[S, H, K, V].
            where: seg_start, seg_tokens, slots, context, each i32[B].

        Returns:
            A[T, D], conv_state, kda_state.
        """
        q, k, v, conv_state = ops.short_conv(
            self.q_proj(y), self.k_proj(y), self.v_proj(y),
            self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight, conv_state, *where,
        )  # fmt: skip
        q = ops.l2_norm(q, self.heads, self.head_dim**-0.5, L2_EPS)
        k = ops.l2_norm(k, self.heads, 1.0, L2_EPS)
        f = self.f_b_proj(self.f_a_proj(y))
        g = ops.kda_gate(f, self.A_log, self.dt_bias, self.lower_bound)
        b = self.b_proj(y)
        o, kda_state = ops.kda_recurrence(q, k, v, g, b, kda_state, *where, self.chunk)
        o = ops.gated_rms_norm(o, self.o_norm.weight, self.g_proj(y), self.heads, self.eps)
        return self.o_proj(o), conv_state, kda_state
