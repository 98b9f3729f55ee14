"""Multi-head latent attention without positional encoding, with an output gate."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from k3c.export.ops import library as ops
from k3c.export.ops import mla_attention_expanded
from k3c.model.config import TextConfig
from k3c.model.layers import Linear, RMSNorm
from k3c.model.options import ModelOptions


class MultiHeadLatentAttention(nn.Module):
    """One MLA layer. The pe dims are content like the others: nothing is rotated."""

    def __init__(self, config: TextConfig, options: ModelOptions) -> None:
        super().__init__()
        hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        nope, value = config.qk_nope_head_dim, config.v_head_dim
        self.dims = (heads, nope, value)
        self.eps = config.mla_lora_norm_eps
        attention = mla_attention_expanded if options.expanded_mla else ops.mla_attention
        self.attention: Callable[..., Tensor] = attention
        self.q_a_proj = Linear(config.q_lora_rank, hidden, options)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, self.eps, options)
        self.q_b_proj = Linear(heads * config.qk_head_dim, config.q_lora_rank, options)
        self.kv_a_proj_with_mqa = Linear(config.kv_row, hidden, options)
        self.kv_a_layernorm = RMSNorm(latent, self.eps, options)
        self.kv_b_proj = Linear(heads * (nope + value), latent, options)
        self.g_proj = Linear(heads * value, hidden, options)
        self.o_proj = Linear(hidden, heads * value, options)

    def forward(
        self, y: Tensor, kv_cache: Tensor, where: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Args:
            y: A[T, D], normalised layer input.
            kv_cache: A[P, page, r + dr].
            where: seg_start, seg_tokens, context, each i32[B], and page_table i32[B, M].

        Returns:
            A[T, D], kv_cache.
        """
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(y)))
        kv = self.kv_a_proj_with_mqa(y)
        kv_cache = ops.mla_append(kv, self.kv_a_layernorm.weight, kv_cache, *where, self.eps)
        a = self.attention(q, self.kv_b_proj.weight, kv_cache, *where, *self.dims)
        return self.o_proj(ops.sigmoid_mul(a, self.g_proj(y))), kv_cache
