"""The speculative draft's own configuration, and the bytes that it adds to a rank.

A draft has its own depth, widths and cache: nothing of it is read from the target's config. Two
kinds are in use: one whose attention keeps a latent (MLA), one with grouped key and value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from k3c.errors import ConfigError
from k3c.model.config import TextConfig
from k3c.model.json_keys import Keys, read_json

BF16_BYTES = 2


@dataclass(frozen=True)
class DraftConfig:
    """The draft, as its `config.json` says.

    Attributes:
        name: Its folder.
        layers: Its layers.
        hidden: Width of its residual stream.
        inner: Width of its feed-forward.
        heads: Query heads.
        kv_heads: Key and value heads; 0 where the cache keeps a latent.
        head_dim: Columns of a head of a draft with `kv_heads`; else 0.
        q_rank: Latent of the queries; 0 without.
        kv_rank: Latent of keys and values; 0 without.
        nope_dim: Columns of a head's part without position.
        rope_dim: Columns of a head's part with position.
        v_dim: Columns of a head's values.
        vocabulary: Its vocabulary.
        target_layers: Layers of the target that it reads.
        target_hidden: Width of the target's residual stream.
        block: Tokens that it proposes for a step.
        markov_rank: Rank of the head that chains its proposals; 0 without.
        confidence: It has a head that estimates acceptance.
    """

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    vocabulary: int
    target_layers: tuple[int, ...]
    target_hidden: int
    block: int
    markov_rank: int
    confidence: bool

    @property
    def width(self) -> int:
        """Rows of a verified request: the last token and all proposals."""
        return self.block + 1

    @property
    def token_bytes(self) -> int:
        """Bytes that one token of context adds to the draft's cache, on every rank alike."""
        if self.kv_rank:
            return self.layers * (self.kv_rank + self.rope_dim) * BF16_BYTES
        return self.layers * 2 * self.kv_heads * self.head_dim * BF16_BYTES


def load_draft(path: Path, target: TextConfig) -> DraftConfig:
    """Read a draft's configuration and check it against its target.

    Args:
        path: The draft's folder, or its config.json.
        target: The model that it drafts for.

    Raises:
        ConfigError: It is missing, incomplete, or made for another target.
    """
    file = path / "config.json" if path.is_dir() else path
    keys = Keys(read_json(file), str(file))
    draft = _parse(keys, file.resolve().parent.name)
    if draft.target_hidden != target.hidden_size:
        what = f"the draft reads a target of width {draft.target_hidden}"
        hint = f"this model has {target.hidden_size}: take the draft that was made for it"
        raise ConfigError(what, str(file), hint)
    deepest = max(draft.target_layers)
    if deepest >= target.num_hidden_layers:
        what = f"the draft reads layer {deepest}, the target has 0..{target.num_hidden_layers - 1}"
        raise ConfigError(what, str(file), "take the draft that was made for this model")
    if draft.vocabulary != target.vocab_size:
        what = f"the draft proposes {draft.vocabulary} tokens, the target has {target.vocab_size}"
        raise ConfigError(what, str(file), "take the draft that was made for this model")
    return draft


def _parse(keys: Keys, name: str) -> DraftConfig:
    latent = "kv_lora_rank" in keys.data
    taps = keys.get("target_layer_ids")
    if not isinstance(taps, list) or not taps or any(type(i) is not int or i < 0 for i in taps):
        raise keys.wrong("target_layer_ids", "a list of layers of the target, counted from 0")
    hidden = keys.integer("hidden_size")
    return DraftConfig(
        name=name,
        layers=keys.integer("num_hidden_layers"),
        hidden=hidden,
        inner=keys.integer("intermediate_size"),
        heads=keys.integer("num_attention_heads"),
        kv_heads=0 if latent else keys.integer("num_key_value_heads"),
        head_dim=0 if latent else keys.integer("head_dim"),
        q_rank=keys.integer("q_lora_rank") if latent else 0,
        kv_rank=keys.integer("kv_lora_rank") if latent else 0,
        nope_dim=keys.integer("qk_nope_head_dim") if latent else 0,
        rope_dim=keys.integer("qk_rope_head_dim") if latent else 0,
        v_dim=keys.integer("v_head_dim") if latent else 0,
        vocabulary=keys.integer("vocab_size"),
        target_layers=tuple(taps),
        target_hidden=keys.integer("target_hidden_size") if "target_hidden_size" in keys.data
        else hidden,
        block=keys.integer("block_size"),
        markov_rank=keys.integer("markov_rank") if "markov_rank" in keys.data else 0,
        confidence=bool(keys.data.get("enable_confidence_head", False)),
    )  # fmt: skip


def draft_weight_bytes(draft: DraftConfig, tp: int) -> int:
    """Return the bytes of the draft's bf16 weights on a rank.

    Heads and columns of the feed-forward go over tp where they divide, everything else is on every
    rank; embedding and head are the target's.

    Source: the tensors of the published draft (5 layers: 3,562,312,961 parameters, of which
    163,840 x 7,168 are a copy of the target's embedding).
    """
    split_heads = tp if draft.heads % tp == 0 else 1
    split_columns = tp if draft.inner % tp == 0 else 1
    per_layer = 2 * draft.hidden + _attention(draft, split_heads)
    per_layer += 3 * draft.hidden * draft.inner // split_columns
    ends = draft.hidden * len(draft.target_layers) * draft.target_hidden + 2 * draft.hidden
    chain = 2 * draft.vocabulary * draft.markov_rank
    confidence = draft.hidden + draft.markov_rank + 1 if draft.confidence else 0
    return BF16_BYTES * (draft.layers * per_layer + ends + chain + confidence)


def _attention(draft: DraftConfig, split: int) -> int:
    """Return the parameters of one layer's attention on a rank."""
    heads = draft.heads // split
    if not draft.kv_rank:
        queries = 2 * draft.hidden * heads * draft.head_dim
        return queries + 2 * draft.hidden * draft.kv_heads * draft.head_dim
    rows = draft.kv_rank + draft.rope_dim
    latent = draft.hidden * (draft.q_rank + rows) + draft.q_rank + draft.kv_rank
    queries = heads * (draft.nope_dim + draft.rope_dim) * draft.q_rank
    values = heads * (draft.nope_dim + draft.v_dim) * draft.kv_rank
    return latent + queries + values + draft.hidden * heads * draft.v_dim


def record_bytes(config: TextConfig, tp: int, layers: int, width: int, act_bytes: int) -> int:
    """Return the bytes that verification keeps of one request beside its state slot, on a rank.

    Of each verified row: normalised keys, log decays and corrected values in f32, raw rows of the
    short convolution in the activation type. The state slot itself is kept once and folded after
    acceptance, so a request with a draft needs one slot, not one for each proposal.

    Args:
        config: The target.
        tp: Ranks that share its heads.
        layers: KDA layers of the rank's stage.
        width: Verified rows.
        act_bytes: Bytes of an activation.
    """
    columns = config.kda_width // tp
    return layers * width * columns * (3 * 4 + 3 * act_bytes)
