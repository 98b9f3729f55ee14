"""`k3c generate`: the JSON form, streaming, and what it refuses."""

import json
import math
import os
import subprocess
import sys

import pytest

from tests.support.compiled import ROOT, demo_golden, k3c

FIELDS = {"prompt_token_ids", "token_ids", "text", "finish_reason", "top_logprobs"}
STOPS = {3841, 3842}


@pytest.fixture(scope="module")
def golden():
    return demo_golden()


@pytest.fixture
def tokens_file(tmp_path):
    """Return a function that writes a file of token ids, or any text."""

    def write(content):
        path = tmp_path / "tokens.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def test_json_of_a_batch_has_exactly_the_promised_form(demo_f32, golden, tokens_file):
    chosen = [golden["prompts"][i] for i in (8, 20, 15)]
    file = tokens_file([p["prompt_ids"] for p in chosen])
    options = ("--max-tokens", golden["max_new_tokens"], "--top-logprobs", 3, "--json")
    done = k3c("generate", demo_f32, "--tokens", file, *options)
    report = json.loads(done.stdout)
    assert report.keys() == {"requests", "timings"}
    for wanted, found in zip(chosen, report["requests"], strict=True):
        assert found.keys() == FIELDS
        assert found["prompt_token_ids"] == wanted["prompt_ids"]
        assert found["token_ids"] == wanted["greedy_ids"]
        stopped = found["token_ids"][-1] in STOPS
        assert found["finish_reason"] == ("stop" if stopped else "length")
        check_logprobs(found)
    assert {r["finish_reason"] for r in report["requests"]} == {"stop", "length"}
    assert report["timings"]["generated_tokens"] == sum(len(p["greedy_ids"]) for p in chosen)
    check_texts(demo_f32, report)


def check_logprobs(found):
    """N pairs per output token, likeliest first; greedy takes the first one."""
    assert len(found["top_logprobs"]) == len(found["token_ids"])
    for token, pairs in zip(found["token_ids"], found["top_logprobs"], strict=True):
        assert [len(pair) for pair in pairs] == [2, 2, 2]
        assert pairs[0][0] == token
        values = [value for _, value in pairs]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) < 1 + 1e-6


def check_texts(artifact, report):
    """`text` is the output without its stop token, decoded by the artifact's own tokenizer."""
    from k3c.runtime.server.wire.tokenizer import Tokenizer

    tokenizer = Tokenizer.open(artifact / "tokenizer")
    for found in report["requests"]:
        ids = [t for t in found["token_ids"] if t not in STOPS]
        assert found["text"] == tokenizer.decode(ids)


def test_first_logits_in_log_probabilities_are_the_golden_top_five(demo_f32, golden, tokens_file):
    chosen = golden["prompts"][:13]
    file = tokens_file([p["prompt_ids"] for p in chosen])
    options = ("--tokens", file, "--max-tokens", 1, "--top-logprobs", 5, "--json")
    report = json.loads(k3c("generate", demo_f32, *options).stdout)
    for wanted, found in zip(chosen, report["requests"], strict=True):
        (pairs,) = found["top_logprobs"]
        assert [token for token, _ in pairs] == wanted["top5_ids"]
        # Log probabilities differ from logits by one constant.
        shift = wanted["top5_logits"][0] - pairs[0][1]
        for (_, value), logit in zip(pairs, wanted["top5_logits"], strict=True):
            assert abs(value + shift - logit) < 1e-4 * abs(wanted["top5_logits"][0])


def test_a_prompt_streams_its_text_piece_by_piece(demo_f32):
    command = [sys.executable, "-m", "k3c", "generate", str(demo_f32), "--prompt", "def add(a, b):"]
    process = subprocess.Popen(
        [*command, "--max-tokens", "40"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    pieces = []
    while piece := os.read(process.stdout.fileno(), 4096):
        pieces.append(piece)
    notes = process.stderr.read().decode()
    process.stdout.close()
    process.stderr.close()
    assert process.wait() == 0
    # A pipe may join some pieces of 40 tokens, not all of them.
    assert len(pieces) > 3
    json_form = k3c(
        "generate", demo_f32, "--prompt", "def add(a, b):", "--max-tokens", 40, "--json"
    )
    text = json.loads(json_form.stdout)["requests"][0]["text"]
    assert b"".join(pieces).decode() == text + "\n"
    assert "tokens/s" in notes
    assert "Traceback" not in notes


def test_a_model_without_a_tokenizer_takes_and_gives_ids(tiny_f32, tokens_file, refuse):
    file = tokens_file([[1, 2, 3], [4]])
    done = k3c("generate", tiny_f32, "--tokens", file, "--max-tokens", 3, "--json")
    for found in json.loads(done.stdout)["requests"]:
        assert len(found["token_ids"]) == 3
        assert found["text"] == ""
    plain = k3c("generate", tiny_f32, "--tokens", file, "--max-tokens", 3)
    assert plain.stdout.startswith("[0] [")


def test_sampling_options_reach_the_model(demo_f32):
    base = ("generate", demo_f32, "--prompt", "import ", "--max-tokens", 12, "--json")
    sampled = ("--temperature", 1.5, "--top-k", 40, "--top-p", 0.9, "--min-p", 0.01, "--seed", 3)

    def tokens(*options):
        return json.loads(k3c(*base, *options).stdout)["requests"][0]["token_ids"]

    first = tokens(*sampled)
    assert first == tokens(*sampled)
    assert first != tokens()


@pytest.fixture
def refuse_out(demo_f32, tmp_path):
    """Run in a process of its own: these fail after the artifact's libraries are open."""

    def refuse_out(code, kind, *args):
        done = k3c("generate", demo_f32, *args, check=False)
        assert done.returncode == code, done.stderr
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"error[{kind}]: ")
        return line

    return refuse_out


def test_a_prompt_longer_than_the_plan(refuse_out, tokens_file):
    line = refuse_out(2, "ConfigError", "--tokens", tokens_file([[1] * 9000]))
    assert "9000 prompt tokens + max_tokens 128 exceed the planned 8192" in line
    assert "--max-model-len" in line


def test_a_token_outside_the_vocabulary(refuse_out, tokens_file):
    line = refuse_out(2, "ConfigError", "--tokens", tokens_file([[1, 2], [3, 4096]]))
    assert "token id 4096 at index 1 is outside the vocabulary of 4096 (request 1)" in line


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("[[1, 2", "ParseError", "not JSON"),
        ("[" * 100_000, "ParseError", "not JSON"),
        ("{}", "ParseError", "found no list"),
        ("[]", "ParseError", "found no list"),
        ("[[1, 2.5]]", "ParseError", "entry 0"),
        ("[[1], 2]", "ParseError", "entry 1"),
        ("[[true]]", "ParseError", "entry 0"),
        ("[[]]", "ConfigError", "expected at least 1"),
    ],
)
def test_a_file_of_tokens_that_is_none(demo_f32, tokens_file, refuse_out, text, kind, words):
    line = refuse_out(2, kind, "--tokens", tokens_file(text))
    assert words in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prompt", "a", "--tokens", "b.json"), "exactly one of --prompt and --tokens"),
        ((), "exactly one of --prompt and --tokens"),
        (("--tokens", "/nowhere/t.json"), "/nowhere/t.json"),
        (("--prompt", ""), "expected at least 1"),
        (("--prompt", "a", "--max-tokens", "0"), "max_tokens is 0, expected 1.."),
        (("--prompt", "a", "--temperature", "-1"), "temperature is -1.0"),
        (("--prompt", "a", "--top-p", "0"), "top_p is 0.0"),
        (("--prompt", "a", "--top-logprobs", "5000"), "top_logprobs is 5000, expected 0..4096"),
    ],
)
def test_options_that_make_no_sense(refuse_out, options, words):
    assert words in refuse_out(2, "ConfigError", *options)
