"""What stands before the first block and after the last: embedding, readout, logits, sampling."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from k3c.export.ops import library as ops
from k3c.model.attention_residual import attention_residual
from k3c.model.config import TextConfig
from k3c.model.layers import Embedding, Linear, RMSNorm, Vector
from k3c.model.options import ModelOptions


class Prologue(nn.Module):
    """Token ids to the first `pending`."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("pending",)

    def __init__(self, config: TextConfig, options: ModelOptions) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, options)

    def forward(self, ids: Tensor) -> tuple[Tensor]:
        """Return pending A[T, D] for ids i32[T]."""
        return (self.embed_tokens(ids),)


class Readout(nn.Module):
    """The final AttnRes site and the final norm."""

    def __init__(self, config: TextConfig, options: ModelOptions) -> None:
        super().__init__()
        hidden, self.eps = config.hidden_size, config.rms_norm_eps
        self.output_attn_res_norm = Vector(hidden, options=options)
        self.output_attn_res_proj = Vector(1, hidden, options=options)
        self.norm = RMSNorm(hidden, self.eps, options)

    def readout(
        self, prefix: Tensor, pending: Tensor, bank: Tensor, restart: Tensor, rows: Tensor
    ) -> Tensor:
        """Return the normalised final mixture A[T, D]."""
        prefix = ops.residual_join(prefix, pending, restart)
        norm, proj = self.output_attn_res_norm, self.output_attn_res_proj
        mixed = attention_residual(prefix, bank, rows, norm=norm, proj=proj, eps=self.eps)
        return self.norm(mixed)


class Head(Readout):
    """Readout, logits of the sampled rows, and their tokens."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("tokens", "logits")

    def __init__(self, config: TextConfig, options: ModelOptions) -> None:
        super().__init__(config, options)
        self.lm_head = Linear(config.vocab_size, config.hidden_size, options, wide=True)

    def forward(
        self, prefix: Tensor, pending: Tensor, bank: Tensor, sample_rows: Tensor,
        temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor,
        position: Tensor, attn_restart: Tensor, attn_rows: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return tokens i32[B] and logits f32[B, V]."""
        y = self.readout(prefix, pending, bank, attn_restart, attn_rows)
        logits = self.lm_head(ops.gather_rows(y, sample_rows))
        tokens = ops.sample(logits, temperature, top_k, top_p, min_p, seed, position)
        return tokens, logits


class ScoreHead(Readout):
    """Readout and the log probability of every row's target."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("logprobs",)

    def __init__(self, config: TextConfig, options: ModelOptions) -> None:
        super().__init__(config, options)
        self.lm_head = Linear(config.vocab_size, config.hidden_size, options, wide=True)

    def forward(
        self, prefix: Tensor, pending: Tensor, bank: Tensor, targets: Tensor,
        attn_restart: Tensor, attn_rows: Tensor,
    ) -> tuple[Tensor]:  # fmt: skip
        """Return logprobs f32[T]; 0 where a target is negative."""
        y = self.readout(prefix, pending, bank, attn_restart, attn_rows)
        return (ops.token_logprob(self.lm_head(y), targets),)
