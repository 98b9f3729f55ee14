"""The draft's bytes come from its own configuration, and from nothing else."""

import json
from pathlib import Path

import pytest

from k3c.errors import ConfigError
from k3c.model.config import load_config
from k3c.planner.draft import draft_weight_bytes, load_draft, record_bytes
from tests.support.drafts import PUBLISHED

K3 = load_config(Path(__file__).parents[1] / "data/configs/kimi-k3-config.json")


@pytest.fixture
def draft_file(tmp_path):
    def write(**changes):
        folder = tmp_path / "draft"
        folder.mkdir(exist_ok=True)
        values = {k: v for k, v in {**PUBLISHED, **changes}.items() if v is not None}
        (folder / "config.json").write_text(json.dumps(values))
        return folder

    return write


def test_the_published_draft_has_its_published_parameters(draft_file):
    draft = load_draft(draft_file(), K3)
    # 3,562,312,961 parameters in its file, of which a copy of the target's embedding is not kept.
    assert draft_weight_bytes(draft, 1) == 2 * (3_562_312_961 - 163_840 * 7_168)
    assert draft.width == 8


def test_a_draft_of_5_layers_keeps_tokens_for_5_layers_whatever_the_target_has(draft_file):
    # k3_serving 4.1: 5,760 bytes a token.
    assert load_draft(draft_file(), K3).token_bytes == 5_760
    assert load_draft(draft_file(num_hidden_layers=2), K3).token_bytes == 2 * 576 * 2


def test_a_draft_with_grouped_heads_keeps_keys_and_values(draft_file):
    # k3_serving 4.1: 20,480 bytes a token (16 key and value heads of 64).
    grouped = draft_file(kv_lora_rank=None, num_key_value_heads=16, head_dim=64)
    assert load_draft(grouped, K3).token_bytes == 20_480


def test_heads_and_columns_of_the_draft_are_shared_where_they_divide(draft_file):
    draft = load_draft(draft_file(), K3)
    whole, half = draft_weight_bytes(draft, 1), draft_weight_bytes(draft, 2)
    split = 5 * (64 * (192 * 1536 + 256 * 512) + 7168 * 64 * 128 + 3 * 7168 * 14336)
    assert whole - half == split  # two bytes each, half of them
    # 64 heads do not divide by 12, nor do 14,336 columns.
    assert draft_weight_bytes(draft, 12) == whole


def test_verification_keeps_records_of_8_rows_and_one_state(draft_file):
    # k3_serving 5.5: keys and corrected values of a request at TP8; here decays are kept too.
    row = 12 * 128 * 4 * 3 + 3 * 12 * 128 * 2
    assert record_bytes(K3, 8, 69, 8, 2) == 69 * 8 * row


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_hidden_size": 256}, ("width 256", "7168")),
        ({"target_layer_ids": [2, 93]}, ("layer 93", "0..92")),
        ({"vocab_size": 2048}, ("2048 tokens", "163840")),
        ({"block_size": None}, ("missing key 'block_size'",)),
        ({"target_layer_ids": []}, ("target_layer_ids",)),
    ],
)
def test_a_draft_for_another_target_is_refused(draft_file, changes, words):
    with pytest.raises(ConfigError) as caught:
        load_draft(draft_file(**changes), K3)
    assert [word for word in words if word not in caught.value.message] == []
