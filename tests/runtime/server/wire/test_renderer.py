"""Prompts, against the vectors of the serving spec."""

import json
from pathlib import Path

import pytest

from k3c.errors import ConfigError
from k3c.runtime.server.wire.images import image_size
from k3c.runtime.server.wire.renderer import STUB_TOKENS, render
from k3c.runtime.server.wire.segments import encode, escape, unescape
from k3c.runtime.server.wire.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[4]
VECTORS = json.loads((ROOT / "tests/data/wire/render_vectors.json").read_text())
LETTERS = {"control": "C", "text": "T", "image": "M"}


def size_of(part):
    return tuple(part["_size"])


def ids_of(vectors):
    return [vector["id"] for vector in vectors]


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=ids_of(VECTORS["vectors"]))
def test_a_request_becomes_the_segments_of_its_vector(vector):
    expected = vector["expect"]
    if "error" in expected:
        with pytest.raises(ConfigError) as caught:
            render(vector["request"], size_of)
        assert caught.value.where == expected["error"]["param"]
        return
    prompt = render(vector["request"], size_of)
    assert [[LETTERS[s.kind], s.text] for s in prompt.segments] == expected["segments"]
    assert prompt.text == expected["text"]
    assert expected["prompt_tokens_excluded_from_usage"] == STUB_TOKENS


@pytest.mark.parametrize("case", VECTORS["image_token_vectors"], ids=str)
def test_an_image_takes_the_tokens_of_its_vector(case):
    size = image_size(case["width"], case["height"])
    expected = case["expect"]
    assert list(size.resized) == expected["resized"]
    assert list(size.padded) == expected["padded"]
    assert list(size.grid_hw) == expected["grid_hw"]
    assert size.tokens == expected["tokens"]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.open(ROOT / "models/k3-demo")


def test_control_tokens_come_from_the_renderer_alone(tokenizer):
    spelled = "".join(tokenizer.special_ids)
    call = {"name": spelled, "arguments": json.dumps({spelled: spelled})}
    request = {
        "messages": [
            {"role": "user", "content": spelled, "name": spelled},
            {
                "role": "assistant",
                "reasoning": spelled,
                "content": spelled,
                "tool_calls": [{"id": "1", "function": call}],
            },
            {"role": "tool", "tool_call_id": "1", "content": spelled},
        ],
        "tools": [{"type": "function", "function": {"name": spelled, "description": spelled}}],
    }  # fmt: skip
    prompt = render(request)
    controls = [s.text for s in prompt.segments if s.kind == "control"]
    special = set(tokenizer.special_ids.values())
    found = [token for token in encode(prompt.segments, tokenizer) if token in special]
    assert found == [tokenizer.special_ids[text] for text in controls]
    assert len(controls) < 200


def test_an_image_block_is_control_tokens_around_its_size(tokenizer):
    part = {"type": "image_url", "_size": [56, 28]}
    prompt = render({"messages": [{"role": "user", "content": [part]}]}, size_of)
    (block,) = (s for s in prompt.segments if s.kind == "image")
    names = {i: name for name, i in tokenizer.special_ids.items()}
    ids = encode([block], tokenizer)
    kept = [names[i] for i in ids if i in names]
    assert kept == ["<|media_begin|>", "<|media_content|>", *["<|media_pad|>"] * 2, "<|media_end|>"]
    assert tokenizer.decode([i for i in ids if i not in names]) == "image 56x28"
    assert prompt.images == (part,)


@pytest.mark.parametrize("value", ["", "a&b", '"', "&quot;", "&amp;quot;", "<|sep|>", '&&amp;"&'])
def test_escaping_is_undone_by_unescaping(value):
    assert unescape(escape(value)) == value
    assert '"' not in escape(value)


ASSISTANT = {"role": "assistant", "content": "a", "tool_calls": []}


@pytest.mark.parametrize(
    ("request_", "where"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "robot"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
        ({"messages": [ASSISTANT, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "user"}], "tools": [{"function": {}}]}, "tools[0]"),
        ({"messages": [{"role": "user"}], "tools": {"a": 1}}, "tools"),
        ({"messages": [{"role": "user"}], "tool_choice": "any"}, "tool_choice"),
        (
            {"messages": [{"role": "user"}], "response_format": {"type": "x"}},
            "response_format.type",
        ),
        (
            {"messages": [{"role": "user"}], "response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0]",
        ),
        (
            {
                "messages": [ASSISTANT],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
        ),
        (
            {"messages": [{"role": "user"}], "continue_final_message": True},
            "continue_final_message",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_field_is_named(request_, where):
    with pytest.raises(ConfigError) as caught:
        render(request_)
    assert caught.value.where == where


def test_an_image_for_a_model_without_vision_is_refused():
    part = {"type": "image_url", "image_url": {"url": "data:x"}}
    with pytest.raises(ConfigError, match="no images"):
        render({"messages": [{"role": "user", "content": [part]}]})


def test_a_partial_answer_is_continued_after_the_stub():
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The an"}]
    whole = render({"messages": history[:1], "reasoning_effort": "none"})
    continued = render(
        {"messages": history, "reasoning_effort": "none", "continue_final_message": True}
    )
    assert continued.text == whole.text + "The an"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1e2, "b":[1,  2]} trailing', [("a", "number", "1e2"), ("b", "array", "[1,  2]")]),
        ({"a": {"k": "é"}, "b": "x"}, [("a", "object", '{"k": "é"}'), ("b", "string", "x")]),
        ("", []),
        ("  ", []),
        (None, []),
        ("{}", []),
        ('{"a": NaN}', None),
        ("[1]", None),
        ("3", None),
        ('{"a": 1,}', None),
        ('{"a" 1}', None),
        ('{"a": 1', None),
        ("{" * 100_000, None),
        ([1, 2], None),
    ],
    ids=lambda value: str(value)[:24],
)
def test_arguments_are_split_one_level_deep_or_kept_raw(arguments, expected):
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    prompt = render({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    inside = prompt.text.split('index="1"<|sep|>')[1].split("<|close|>call")[0]
    if expected is None:
        raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
        assert inside == f'<|open|>json type="object"<|sep|>{raw}<|close|>json<|sep|>'
    else:
        assert inside == "".join(
            f'<|open|>argument key="{key}" type="{kind}"<|sep|>{body}<|close|>argument<|sep|>'
            for key, kind, body in expected
        )
