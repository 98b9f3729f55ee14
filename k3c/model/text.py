"""The whole text model, step by step: the numerical oracle.

It runs the same blocks that are exported, for several requests in chunks of any length, and keeps
every row's logits. The carries start as NaN: nothing may read a prefix or a bank row too early.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from k3c.export.ops import routing_weights
from k3c.model.block import KdaBlock, MlaBlock, make_block
from k3c.model.checkpoint import Checkpoint
from k3c.model.config import TextConfig, load_config
from k3c.model.ends import Readout
from k3c.model.latent_moe import Router
from k3c.model.layers import Embedding, Linear
from k3c.model.options import ModelOptions
from k3c.model.state import ModelState, new_state

_ROOT = "language_model."
_EXPERTS = "block_sparse_moe.experts"


@dataclass
class Probe:
    """What to watch and to force during a step; rows stand in the step's order.

    Attributes:
        prefix_after_layer: Filled: A[T, D] for each layer, feed-forward output included.
        routing: Filled: experts i32[T, k] for each MoE layer.
        forced_routing: Read: experts [T, k] that replace the router's choice, by layer.
    """

    prefix_after_layer: dict[int, Tensor] = field(default_factory=dict)
    routing: dict[int, Tensor] = field(default_factory=dict)
    forced_routing: Mapping[int, Tensor] = field(default_factory=dict)

    def watch_router(self, layer: int, router: Router, y: Tensor, result: Any) -> Any:
        """Forward hook of a router: apply the forced choice, and note the choice made."""
        weights, experts = result
        if layer in self.forced_routing:
            experts = self.forced_routing[layer].to(torch.int32)
            scores = torch.sigmoid(router.logits(y)).gather(-1, experts.long())
            weights = routing_weights(scores, router.renormalize, router.scale)
        self.routing[layer] = experts
        return weights, experts


@dataclass(frozen=True)
class Step:
    """The packed rows of one step.

    Attributes:
        ids: i32[T].
        tokens: Rows of each request.
        embeddings: A[T, D] that replaces the looked-up rows, or None.
    """

    ids: Tensor
    tokens: list[int]
    embeddings: Tensor | None = None

    @classmethod
    def pack(cls, chunks: Sequence[Sequence[int]], padding_rows: int) -> Step:
        """Pack one chunk of token ids a request, then padding rows with id 0."""
        flat = [token for chunk in chunks for token in chunk] + [0] * padding_rows
        return cls(torch.tensor(flat, dtype=torch.int32), [len(chunk) for chunk in chunks])

    def io(self, state: ModelState) -> dict[str, Tensor]:
        """Return the segment inputs of the blocks, by name."""
        starts = [sum(self.tokens[:s]) for s in range(len(self.tokens))]
        return {
            "seg_start": torch.tensor(starts, dtype=torch.int32),
            "seg_tokens": torch.tensor(self.tokens, dtype=torch.int32),
            "context": torch.tensor(state.context, dtype=torch.int32),
            "slots": state.slots,
            "page_table": state.page_table,
        }


def _scalar(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int32)


class Backbone(Readout):
    """Embedding, blocks and readout, under the names of the checkpoint."""

    def __init__(self, config: TextConfig, options: ModelOptions) -> None:
        super().__init__(config, options)
        self.config, self.options = config, options
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, options)
        kinds = (config.kind(i) for i in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(make_block(config, kind, options) for kind in kinds)

    def _start(self, step: Step) -> dict[str, Tensor]:
        pending = self.embed_tokens(step.ids) if step.embeddings is None else step.embeddings
        bank = pending.new_full((self.config.num_blocks, *pending.shape), torch.nan)
        return {"prefix": torch.full_like(pending, torch.nan), "pending": pending, "bank": bank}

    def forward(self, step: Step, state: ModelState, probe: Probe) -> tuple[Tensor, ModelState]:
        """Run one step.

        Args:
            step: The rows.
            state: State of the requests.
            probe: Told the prefix after each layer.

        Returns:
            The normalised readout A[T, D] and the new state.
        """
        carry, io = self._start(step), step.io(state)
        states: list[dict[str, Tensor]] = []
        for i, block in enumerate(self.layers):
            assert isinstance(block, KdaBlock | MlaBlock)
            attrs = {name: _scalar(v) for name, v in self.config.layer_attrs(i).items()}
            inputs = {**carry, **state.layers[i], **attrs, **{name: io[name] for name in block.IO}}
            results = dict(zip(block.OUTPUTS, block(**inputs), strict=True))
            states.append({name: results.pop(name) for name in block.STATE})
            carry = results
            probe.prefix_after_layer[i] = carry["prefix"] + carry["pending"]
        y = self.readout(**carry, restart=_scalar(0), rows=_scalar(self.config.num_blocks))
        return y, state.advance(tuple(states), step.tokens)


class TextModel(nn.Module):
    """The text model of a checkpoint."""

    def __init__(self, config: TextConfig, options: ModelOptions) -> None:
        super().__init__()
        self.config, self.options = config, options
        self.model = Backbone(config, options)
        self.lm_head = Linear(config.vocab_size, config.hidden_size, options, wide=True)

    @classmethod
    def from_checkpoint(
        cls, directory: str | Path, dtype: torch.dtype, options: ModelOptions | None = None
    ) -> TextModel:
        """Read a model.

        Args:
            directory: Hugging Face model directory.
            dtype: float32, float64 or bfloat16 activations.
            options: Forms to use; its dtypes are replaced by `dtype`.

        Raises:
            ConfigError: The configuration is not one that k3c implements.
            CheckpointError: The checkpoint is damaged or does not match its configuration.
        """
        config = load_config(directory)
        forms = options or ModelOptions()
        options = ModelOptions(dtype, dtype, forms.kda_chunk, forms.expanded_mla)
        with torch.device("meta"):
            model = cls(config, options)
        tensors = _read_tensors(model, Checkpoint(directory, config))
        model.load_state_dict(tensors, strict=True, assign=True)
        return model

    def new_state(self, requests: int, max_tokens: int) -> ModelState:
        """Return the state of `requests` new requests of up to `max_tokens` tokens each."""
        return new_state(self.config, self.options, requests=requests, max_tokens=max_tokens)

    @torch.no_grad()
    def run(self, step: Step, state: ModelState, probe: Probe) -> tuple[Tensor, ModelState]:
        """Run one packed step; returns logits f32[T, V] of every row and the new state."""
        with ExitStack() as stack:
            for i, block in enumerate(self.model.layers):
                if block.moe:
                    router = block.get_submodule("block_sparse_moe.gate")
                    stack.callback(router.register_forward_hook(_hook(probe, i)).remove)
            y, state = self.model(step, state, probe)
            return self.lm_head(y), state

    def forward(
        self,
        chunks: Sequence[Sequence[int]],
        state: ModelState,
        *,
        probe: Probe | None = None,
        padding_rows: int = 0,
    ) -> tuple[list[Tensor], ModelState]:
        """Add a chunk of tokens to each request.

        Args:
            chunks: Token ids for each request of the state, possibly none for some.
            state: State of the requests; stays valid.
            probe: What to watch and to force.
            padding_rows: Rows without a request at the end of the step.

        Returns:
            For each request its logits f32[tokens, V], and the new state.
        """
        step = Step.pack(chunks, padding_rows)
        logits, state = self.run(step, state, probe or Probe())
        return list(logits[: sum(step.tokens)].split(step.tokens)), state

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Return the logits f32[T, V] of one sequence, run in one piece."""
        (logits,), _ = self([ids], self.new_state(1, len(ids)))
        return logits

    def greedy(self, ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int]) -> list[int]:
        """Continue one sequence greedily; a stop token ends it and is part of the result."""
        (logits,), state = self([ids], self.new_state(1, len(ids) + max_tokens))
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < max_tokens and tokens[-1] not in stop_ids:
            (logits,), state = self([tokens[-1:]], state)
            tokens.append(int(logits[-1].argmax()))
        return tokens


def _hook(probe: Probe, layer: int) -> Any:
    def hook(router: Any, inputs: tuple[Tensor, ...], result: Any) -> Any:
        return probe.watch_router(layer, router, inputs[0], result)

    return hook


def _read_tensors(model: TextModel, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return every parameter by name, in the model's dtypes; stored f32 weights stay f32."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if _EXPERTS in name:
            if name.endswith("weight_packed"):
                stem = name.removesuffix(".weight_packed")
                pair = _read_experts(checkpoint, stem)
                tensors[name], tensors[f"{stem}.weight_scale"] = pair
            continue
        stored = checkpoint.load(_ROOT + name)
        # bf16 parameters are the linear weights of the bf16 mode, which keep their stored type.
        kept = parameter.dtype == torch.bfloat16
        tensors[name] = stored if kept else stored.to(parameter.dtype)
    return tensors


def _read_experts(checkpoint: Checkpoint, stem: str) -> tuple[Tensor, Tensor]:
    """Return packed and scale of the experts `model.layers.<i>.block_sparse_moe.experts.<w>`."""
    head, matrix = stem.rsplit(".", 1)
    layer = int(head.split(".")[2])
    pattern = f"{_ROOT}model.layers.*.{_EXPERTS}.*.{matrix}"
    return checkpoint.load_experts(pattern, layer)
