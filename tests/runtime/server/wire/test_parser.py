"""Answers, against the vectors of the serving spec, in every split."""

import json
import random
import re
from pathlib import Path

import pytest

from k3c.runtime.server.wire.output import Answer, ToolCall
from k3c.runtime.server.wire.parser import ParserOptions
from k3c.runtime.server.wire.renderer import render
from k3c.runtime.server.wire.segments import MARKERS, encode
from k3c.runtime.server.wire.streams import TextStream, TokenStream
from k3c.runtime.server.wire.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[4]
VECTORS = json.loads((ROOT / "tests/data/wire/parse_vectors.json").read_text())["vectors"]
MARKER = re.compile("(" + "|".join(map(re.escape, MARKERS)) + ")")
CHUNKED = [vector for vector in VECTORS if "chunks" in vector]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.open(ROOT / "models/k3-demo")


def name(vector):
    return vector["id"]


def options_of(vector, **more):
    wanted = vector["request"]
    tools = wanted["tools_declared"] and wanted["tool_choice"] != "none"
    return ParserOptions(wanted["thinking"], tools, **more)


def ids_of(vector, tokenizer):
    pieces = vector.get("tokens") or [
        ["C" if piece in MARKERS else "T", piece] for piece in MARKER.split(vector["output_text"])
    ]
    ids = []
    for kind, text in pieces:
        ids += [tokenizer.special_ids[text]] if kind == "C" else tokenizer.encode(text)
    return ids


def as_expected(answer):
    calls = [{"name": c.name, "arguments": json.loads(c.arguments)} for c in answer.tool_calls]
    return {
        "reasoning": answer.reasoning,
        "content": answer.content,
        "tool_calls": calls,
        "finish_reason": answer.finish_reason,
    }


def put_together(deltas, answer):
    """Return what a client has that adds up a stream; calls that the end dropped are not done."""
    texts = {"reasoning": "", "content": ""}
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.kind == "call":
            assert delta.call == len(calls)
            calls.append(ToolCall(delta.text, ""))
        elif delta.kind == "arguments":
            assert delta.call == len(calls) - 1
            calls[-1] = ToolCall(calls[-1].name, calls[-1].arguments + delta.text)
        else:
            texts[delta.kind] += delta.text
    done = tuple(calls[: len(answer.tool_calls)])
    return Answer(texts["reasoning"] or None, texts["content"] or None, done, answer.finish_reason)


def run(stream, groups, reason):
    deltas = [delta for group in groups for delta in stream.push(group)] + stream.finish()
    return deltas, stream.answer(reason)


def groups_of(items, seed):
    draw, found, at = random.Random(seed), [], 0
    while at < len(items):
        size = draw.randint(1, 7)
        found.append(items[at : at + size])
        at += size
    return found


def check(vector, stream, groups):
    deltas, answer = run(stream, groups, vector["engine_finish_reason"])
    assert as_expected(answer) == vector["expect"]
    expected = vector.get("expect_streaming_alternative", vector["expect"])
    assert as_expected(put_together(deltas, answer)) == expected
    assert not any(marker in delta.text for delta in deltas for marker in MARKERS) or (
        "control tokens" in vector["title"] or "ordinary tokens" in vector["title"]
    )


@pytest.mark.parametrize("vector", VECTORS, ids=name)
@pytest.mark.parametrize("whole_calls", [False, True])
@pytest.mark.parametrize("split", ["one by one", "at once", 1, 2, 3])
def test_tokens_give_the_answer_of_the_vector_in_every_split(vector, whole_calls, split, tokenizer):
    ids = ids_of(vector, tokenizer)
    groups = {"one by one": [[i] for i in ids], "at once": [ids]}.get(split)
    groups = groups or groups_of(ids, split)
    check(vector, TokenStream(tokenizer, options_of(vector, whole_calls=whole_calls)), groups)


@pytest.mark.parametrize("vector", [v for v in VECTORS if "tokens" not in v], ids=name)
@pytest.mark.parametrize("split", ["one by one", "at once", 1, 2, 3])
def test_text_gives_the_same_answer_in_every_split(vector, split):
    text = vector["output_text"]
    groups = {"one by one": list(text), "at once": [text]}.get(split) or groups_of(text, split)
    check(vector, TextStream(options_of(vector)), groups)


@pytest.mark.parametrize("vector", CHUNKED, ids=name)
def test_text_in_the_chunks_of_the_vector_gives_its_answer(vector):
    check(vector, TextStream(options_of(vector)), vector["chunks"])


def parse(text, tokenizer, reason="stop", **options):
    vector = {"output_text": text}
    stream = TokenStream(tokenizer, ParserOptions(**options))
    deltas, answer = run(stream, [[i] for i in ids_of(vector, tokenizer)], reason)
    return stream, deltas, answer


def test_reasoning_tokens_leave_the_tags_out(tokenizer):
    text = "one two<|close|>think<|sep|><|open|>response<|sep|>three<|close|>response<|sep|>"
    stream, _, _ = parse(text, tokenizer)
    assert stream.reasoning_tokens == len(tokenizer.encode("one two"))


CALL = '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>{}<|close|>call<|sep|>'
CLOSED = "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"


def arguments_of(body, tokenizer):
    _, _, answer = parse(CALL.format(body) + CLOSED, tokenizer, thinking=False)
    (call,) = answer.tool_calls
    return call.arguments


def argument(key, value, kind="string"):
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def test_a_repeated_key_counts_as_it_comes_last(tokenizer):
    text = arguments_of(argument("a", "1") + argument("a", "2", "number"), tokenizer)
    assert json.loads(text) == {"a": 2}


def test_an_escaped_key_and_tool_are_read_back(tokenizer):
    text = arguments_of(argument("a&amp;&quot;b", "x"), tokenizer)
    assert json.loads(text) == {'a&"b': "x"}


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "[NaN]", "{'a': 1}", "01"])
def test_what_is_no_strict_json_stays_text(value, tokenizer):
    assert json.loads(arguments_of(argument("a", value, "number"), tokenizer)) == {"a": value}


def test_a_raw_block_that_is_no_object_is_the_arguments_as_it_stands(tokenizer):
    assert arguments_of(
        '<|open|>json type="object"<|sep|>{oops<|close|>json<|sep|>', tokenizer
    ) == ("{oops")


def test_a_call_that_is_not_closed_before_the_next_is_kept(tokenizer):
    body = argument("a", "x") + '<|open|>call tool="g" index="2"<|sep|>'
    _, _, answer = parse(CALL.format(body) + CLOSED, tokenizer, thinking=False)
    assert answer.tool_calls == (ToolCall("f", '{"a":"x"}'), ToolCall("g", "{}"))


def test_blank_content_counts_only_without_calls(tokenizer):
    blank = "<|open|>response<|sep|> \n<|close|>response<|sep|>"
    for text, content in ((CALL.format("") + CLOSED, None), ("<|close|>message<|sep|>", " \n")):
        _, deltas, answer = parse(blank + text, tokenizer, thinking=False)
        assert answer.content == content
        assert put_together(deltas, answer) == answer


def test_bytes_of_half_a_character_wait_and_come_out_as_one_replacement(tokenizer):
    half = next(i for i in range(256) if tokenizer.token_bytes(i) == "é".encode()[:1])
    stream = TokenStream(tokenizer, ParserOptions(thinking=False))
    assert stream.push([half]) == []
    (delta,) = stream.finish()
    assert delta.text == "\ufffd"


def some_text(draw):
    pieces = [
        "a",
        " ",
        "\n",
        "é",
        "😀",
        '"',
        "&",
        "<|close|>think<|sep|>",
        "{",
        "\\",
        "&quot;",
        "7",
    ]
    return "".join(draw.choice(pieces) for _ in range(draw.randint(1, 12)))


@pytest.mark.parametrize("seed", range(40))
def test_what_is_rendered_as_an_assistants_turn_is_read_back(seed, tokenizer):
    draw = random.Random(seed)
    values = [some_text(draw), 1, -2.5, True, None, {"k": [some_text(draw)]}, []]
    made = [
        {some_text(draw): draw.choice(values) for _ in range(draw.randint(0, 3))}
        for _ in range(draw.randint(0, 3))
    ]
    calls = [
        {"id": str(i), "function": {"name": f"f{i}&", "arguments": json.dumps(arguments)}}
        for i, arguments in enumerate(made)
    ]
    turn = {
        "role": "assistant",
        "reasoning": "r" + some_text(draw),
        "content": "c" + some_text(draw),
    }
    question = [{"role": "user", "content": "q"}]
    stub = render({"messages": question}).segments
    request = {
        "messages": [*question, {**turn, "tool_calls": calls}],
        "add_generation_prompt": False,
    }
    ids = encode(render(request).segments[len(stub) :], tokenizer)
    _, answer = run(TokenStream(tokenizer, ParserOptions()), groups_of(ids, seed), "stop")
    assert (answer.reasoning, answer.content) == (turn["reasoning"], turn["content"])
    assert [call.name for call in answer.tool_calls] == [f"f{i}&" for i in range(len(made))]
    assert [json.loads(call.arguments) for call in answer.tool_calls] == made


@pytest.mark.parametrize("seed", range(40))
def test_any_sequence_of_tokens_gives_one_answer_in_any_split_and_leaks_no_markup(seed, tokenizer):
    draw = random.Random(seed)
    words = ["think", "response", "tools", "message", "call", 'call tool="f"', 'call tool="g"']
    words += ['argument key="k" type="number"', 'argument key="s"', "json", "other", " x ", "\n"]
    words += ["7", '{"a": [1]}', "text", "é", '"']
    ids = []
    for _ in range(60):
        if draw.random() < 0.5:
            ids.append(tokenizer.special_ids[draw.choice(MARKERS[:3])])
        else:
            ids += tokenizer.encode(draw.choice(words))
    options = ParserOptions(thinking=seed % 2 == 0)
    whole, answer = run(TokenStream(tokenizer, options), [ids], "stop")
    for split in range(3):
        deltas, again = run(TokenStream(tokenizer, options), groups_of(ids, split), "stop")
        assert again == answer
        assert put_together(deltas, answer) == put_together(whole, answer)
    shown = (answer.reasoning or "") + (answer.content or "")
    assert not any(marker in shown for marker in MARKERS)
    for call in answer.tool_calls:
        assert call.name in ("f", "g")
