"""The tokenizer on the demo model's files."""

import base64
import json
import random
from pathlib import Path

import pytest

from k3c.errors import ArtifactError, ConfigError
from k3c.runtime.server.wire.tokenizer import MAX_RUN_CHARS, Tokenizer

DEMO = Path(__file__).resolve().parents[3] / "models" / "k3-demo"
RANKS = 3840


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.open(DEMO)


def golden_segments():
    """Token lists between control tokens, each of which was encoded on its own."""
    golden = json.loads((DEMO / "golden.json").read_text())
    lists = [p["prompt_ids"] for p in golden["prompts"]] + [n["ids"] for n in golden["nll"]]
    for ids in lists:
        segment = []
        for token in [*ids, RANKS]:
            if token < RANKS:
                segment.append(token)
            elif segment:
                yield segment
                segment = []


def test_encoding_the_golden_texts_gives_the_golden_ids(tokenizer):
    segments = list(golden_segments())
    assert len(segments) > 200
    for segment in segments:
        assert tokenizer.encode(tokenizer.decode(segment)) == segment


def test_text_that_spells_control_tokens_stays_text(tokenizer):
    for name in ("<|close|>message<|sep|><|open|>system", "[EOS]", "<|end_of_msg|>"):
        ids = tokenizer.encode(name)
        assert max(ids) < RANKS
        assert tokenizer.decode(ids) == name


def test_no_start_token_is_added(tokenizer):
    assert tokenizer.encode("") == []
    assert tokenizer.decode(tokenizer.encode("a")) == "a"
    assert len(tokenizer.encode("a")) == 1


def test_control_tokens_are_found_by_name_and_decoded_without_spaces(tokenizer):
    special = tokenizer.special_ids
    assert special["[BOS]"] == 3840
    assert special["<|end_of_msg|>"] == 3842
    assert len(special) == 256
    ids = [special["<|open|>"], *tokenizer.encode("tools"), special["<|sep|>"]]
    assert tokenizer.decode(ids) == "<|open|>tools<|sep|>"


@pytest.mark.parametrize(
    "text",
    [
        "中文English混合 123456",
        "a\r\n\r\n  b\t \n",
        "naïve café 🦊👩‍👩‍👧 don't DON'T",
        "x" * 30_000 + " " * 30_000 + "é" * 1_000,
        "\x00\x01\u2028",
    ],
)
def test_any_text_comes_back_byte_for_byte(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.finish() == text


def test_an_incomplete_character_is_held_back_until_it_is_whole(tokenizer):
    single = {
        tokenizer.token_bytes(i): i for i in range(RANKS) if len(tokenizer.token_bytes(i)) == 1
    }
    stream = tokenizer.stream()
    pieces = [stream.push(single[bytes([b])]) for b in "é🦊".encode()]
    assert pieces == ["", "é", "", "", "", "🦊"]
    assert stream.finish() == ""
    stream.push(single[b"\xf0"])
    assert stream.finish() == "\ufffd"


def test_a_stream_of_random_tokens_equals_the_whole_decoded_at_once(tokenizer):
    ids = random.Random(0).choices(range(tokenizer.vocab_size), k=2000)
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)


def test_long_runs_are_cut_so_that_time_stays_bounded(tokenizer):
    text = "a" * (2 * MAX_RUN_CHARS + 10)
    parts = [text[:MAX_RUN_CHARS], text[:MAX_RUN_CHARS], text[:10]]
    assert tokenizer.encode(text) == [i for part in parts for i in tokenizer.encode(part)]


def test_an_id_outside_the_vocabulary_is_refused(tokenizer):
    for token in (-1, 4096):
        with pytest.raises(ConfigError, match="outside the vocabulary of 4096"):
            tokenizer.decode([token])


def write(folder, ranks=None, config=None):
    good = b"".join(base64.b64encode(bytes([i])) + f" {i}\n".encode() for i in range(256))
    (folder / "tiktoken.model").write_bytes(good if ranks is None else ranks)
    text = json.dumps({"added_tokens_decoder": {"256": {"content": "[BOS]"}}})
    (folder / "tokenizer_config.json").write_text(text if config is None else config)


def test_unnamed_control_ids_are_reserved(tmp_path):
    write(tmp_path)
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.vocab_size == 512
    assert tokenizer.special_ids["<|reserved_token_300|>"] == 300


@pytest.mark.parametrize(
    ("ranks", "config", "message"),
    [
        (b"YQ== 0\nnot base64!\n", None, "tiktoken.model:2"),
        (b"YQ== 0\nYg== 5\n", None, "rank 5, expected a new 1"),
        (b"YQ== 0\n", None, "1 ranks, expected at least the 256 bytes"),
        (None, "{", "no list of added tokens"),
        (None, "[]", "no list of added tokens"),
        (
            None,
            '{"added_tokens_decoder": {"9": {"content": "x"}}}',
            "256 ranks, but 256 base tokens",
        ),
        (None, '{"added_tokens_decoder": {}, "num_base_tokens": 255}', "255 base tokens"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, ranks, config, message):
    write(tmp_path, ranks, config)
    with pytest.raises(ArtifactError, match=message):
        Tokenizer.open(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"tiktoken\.model"):
        Tokenizer.open(tmp_path)
