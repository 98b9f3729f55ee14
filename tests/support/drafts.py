"""Configurations of speculative drafts."""

from typing import Any

# The published draft, k3_model 8.1.
PUBLISHED: dict[str, Any] = {
    "model_type": "k3_dspark",
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "target_hidden_size": 7168,
    "target_layer_ids": [2, 23, 47, 71, 89],
    "block_size": 7,
    "markov_rank": 256,
    "enable_confidence_head": True,
}
