"""The oracle's state: what a set of requests keeps between steps.

Immutable: a step returns a new state and leaves the old one valid, so a snapshot is a reference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from k3c.model.config import PAGE_TOKENS, TextConfig
from k3c.model.options import ModelOptions


@dataclass(frozen=True)
class ModelState:
    """State of `requests` requests; slot 0 and page 0 are scratch that no request owns.

    Attributes:
        layers: For each layer its tensors by input name: conv_state A[S, 3, 3P] and kda_state
            f32[S, H, K, V], or kv_cache A[P, page, r + dr].
        context: Tokens of each request that the state holds.
        slots: i32[B].
        page_table: i32[B, M].
    """

    layers: tuple[dict[str, Tensor], ...]
    context: tuple[int, ...]
    slots: Tensor
    page_table: Tensor

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.context)

    def advance(self, layers: tuple[dict[str, Tensor], ...], tokens: list[int]) -> ModelState:
        """Return the state after a step that added `tokens[s]` tokens to request s."""
        context = tuple(seen + new for seen, new in zip(self.context, tokens, strict=True))
        return replace(self, layers=layers, context=context)

    def cache_rows(self, layer: int, request: int) -> Tensor:
        """Return the MLA cache rows A[tokens, r + dr] of a request at an MLA layer."""
        pages = self.layers[layer]["kv_cache"][self.page_table[request].long()]
        return pages.flatten(0, 1)[: self.context[request]]


def new_state(
    config: TextConfig, options: ModelOptions, *, requests: int, max_tokens: int
) -> ModelState:
    """Return the state of new requests, filled with NaN: nothing may be read before it is written.

    Args:
        config: The model's configuration.
        options: Element types.
        requests: Number of requests.
        max_tokens: Largest context of one request.
    """
    pages = -(-max_tokens // PAGE_TOKENS)
    slots, taps, width = requests + 1, config.short_conv_kernel_size - 1, config.kda_width
    heads, dim = config.kda_num_heads, config.kda_head_dim
    kda = {
        "conv_state": torch.full((slots, taps, 3 * width), torch.nan, dtype=options.act),
        "kda_state": torch.full((slots, heads, dim, dim), torch.nan, dtype=options.vector),
    }
    cache = (requests * pages + 1, PAGE_TOKENS, config.kv_row)
    mla = {"kv_cache": torch.full(cache, torch.nan, dtype=options.act)}
    kinds = (config.is_kda(i) for i in range(config.num_hidden_layers))
    return ModelState(
        layers=tuple(kda if is_kda else mla for is_kda in kinds),
        context=(0,) * requests,
        slots=torch.arange(1, requests + 1, dtype=torch.int32),
        page_table=torch.arange(1, requests * pages + 1, dtype=torch.int32).view(requests, pages),
    )
