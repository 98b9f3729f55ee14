"""A decoder block: attention site, attention, feed-forward site, feed-forward.

The sublayer outputs are not added where they are made: a block hands its feed-forward output on as
`pending`, and the next site joins it to the prefix, mixes and normalises in one go. What differs
between two layers of one kind arrives as layer attributes, 0-d int32 tensors.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from k3c.export.ops import library as ops
from k3c.model.attention_residual import attention_residual
from k3c.model.config import TextConfig
from k3c.model.kda import KimiDeltaAttention
from k3c.model.latent_moe import LatentMoE
from k3c.model.layers import RMSNorm, Vector
from k3c.model.mla import MultiHeadLatentAttention
from k3c.model.mlp import MLP
from k3c.model.options import ModelOptions


class Block(nn.Module):
    """What the block kinds share: the two AttnRes sites, their norms and the feed-forward."""

    STATE: ClassVar[tuple[str, ...]]
    IO: ClassVar[tuple[str, ...]]
    OUTPUTS: ClassVar[tuple[str, ...]]

    def __init__(self, config: TextConfig, *, moe: bool, options: ModelOptions) -> None:
        super().__init__()
        hidden, self.eps = config.hidden_size, config.rms_norm_eps
        self.self_attention_res_norm = Vector(hidden, options=options)
        self.self_attention_res_proj = Vector(1, hidden, options=options)
        self.input_layernorm = RMSNorm(hidden, self.eps, options)
        self.mlp_res_norm = Vector(hidden, options=options)
        self.mlp_res_proj = Vector(1, hidden, options=options)
        self.post_attention_layernorm = RMSNorm(hidden, self.eps, options)
        if moe:
            self.block_sparse_moe = LatentMoE(config, options)
        else:
            self.mlp = MLP(config, config.intermediate_size, options)
        self.moe = moe

    def attention_input(self, prefix: Tensor, bank: Tensor, rows: Tensor) -> Tensor:
        """Return the normalised attention input A[T, D]."""
        norm, proj = self.self_attention_res_norm, self.self_attention_res_proj
        mixed = attention_residual(prefix, bank, rows, norm=norm, proj=proj, eps=self.eps)
        return self.input_layernorm(mixed)

    def feed_forward(self, prefix: Tensor, bank: Tensor, rows: Tensor) -> Tensor:
        """Return the feed-forward output A[T, D]."""
        norm, proj = self.mlp_res_norm, self.mlp_res_proj
        mixed = attention_residual(prefix, bank, rows, norm=norm, proj=proj, eps=self.eps)
        y = self.post_attention_layernorm(mixed)
        return self.block_sparse_moe(y) if self.moe else self.mlp(y)


class KdaBlock(Block):
    """A block whose attention is KDA."""

    STATE = ("conv_state", "kda_state")
    IO = ("seg_start", "seg_tokens", "slots", "context")
    OUTPUTS = ("prefix", "pending", "bank", "conv_state", "kda_state")

    def __init__(self, config: TextConfig, *, moe: bool, options: ModelOptions) -> None:
        super().__init__(config, moe=moe, options=options)
        self.self_attn = KimiDeltaAttention(config, options)

    def forward(
        self, prefix: Tensor, pending: Tensor, bank: Tensor, conv_state: Tensor, kda_state: Tensor,
        seg_start: Tensor, seg_tokens: Tensor, slots: Tensor, context: Tensor,
        attn_restart: Tensor, attn_rows: Tensor, commit_row: Tensor, ffn_restart: Tensor,
        ffn_rows: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Run the block: carries, states, io and layer attributes in, `OUTPUTS` out."""
        prefix = ops.residual_join(prefix, pending, attn_restart)
        y = self.attention_input(prefix, bank, attn_rows)
        bank = ops.bank_commit(bank, prefix, commit_row)
        where = (seg_start, seg_tokens, slots, context)
        delta, conv_state, kda_state = self.self_attn(y, conv_state, kda_state, where)
        prefix = ops.residual_join(prefix, delta, ffn_restart)
        return prefix, self.feed_forward(prefix, bank, ffn_rows), bank, conv_state, kda_state


class MlaBlock(Block):
    """A block whose attention is MLA."""

    STATE = ("kv_cache",)
    IO = ("seg_start", "seg_tokens", "context", "page_table")
    OUTPUTS = ("prefix", "pending", "bank", "kv_cache")

    def __init__(self, config: TextConfig, *, moe: bool, options: ModelOptions) -> None:
        super().__init__(config, moe=moe, options=options)
        self.self_attn = MultiHeadLatentAttention(config, options)

    def forward(
        self, prefix: Tensor, pending: Tensor, bank: Tensor, kv_cache: Tensor,
        seg_start: Tensor, seg_tokens: Tensor, context: Tensor, page_table: Tensor,
        attn_restart: Tensor, attn_rows: Tensor, commit_row: Tensor, ffn_restart: Tensor,
        ffn_rows: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Run the block: carries, state, io and layer attributes in, `OUTPUTS` out."""
        prefix = ops.residual_join(prefix, pending, attn_restart)
        y = self.attention_input(prefix, bank, attn_rows)
        bank = ops.bank_commit(bank, prefix, commit_row)
        where = (seg_start, seg_tokens, context, page_table)
        delta, kv_cache = self.self_attn(y, kv_cache, where)
        prefix = ops.residual_join(prefix, delta, ffn_restart)
        return prefix, self.feed_forward(prefix, bank, ffn_rows), bank, kv_cache


def make_block(config: TextConfig, kind: str, options: ModelOptions) -> KdaBlock | MlaBlock:
    """Return a block of `kind`: kda_dense, kda_moe, mla_dense or mla_moe."""
    attention, feed_forward = kind.split("_")
    cls = {"kda": KdaBlock, "mla": MlaBlock}[attention]
    return cls(config, moe=feed_forward == "moe", options=options)
