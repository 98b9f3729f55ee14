"""Structured output: which answers the grammar of a request allows (spec §2.5, the table)."""

import itertools
import json
import random
import re
from pathlib import Path

import pytest

from k3c.errors import ConfigError
from k3c.runtime.server.constraint import Grammars
from k3c.runtime.server.wire.grammar import Limits, grammar_of, limits_of
from k3c.runtime.server.wire.parser import ParserOptions
from k3c.runtime.server.wire.renderer import render
from k3c.runtime.server.wire.segments import MARKERS, encode
from k3c.runtime.server.wire.streams import TokenStream
from k3c.runtime.server.wire.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[3]
MARKER = re.compile("(" + "|".join(map(re.escape, MARKERS)) + ")")
END = "<|end_of_msg|>"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.open(ROOT / "models/k3-demo")


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, tokenizer.special_ids[END])


def ids_of(text, tokenizer):
    ids = []
    for piece in filter(None, MARKER.split(text)):
        ids += [tokenizer.special_ids[piece]] if piece in MARKERS else tokenizer.encode(piece)
    return ids


def accepts(limits, text, tokenizer, grammars):
    """Whether the answer may be `text` and end there.

    Where only one text can follow, a mask has its usual tokens alone, though others are accepted.
    """
    constraint = grammars.compile(grammar_of(limits))
    masked = True
    for token in ids_of(text, tokenizer):
        allowed = bool(constraint.mask()[token])
        accepted = constraint.accept(token)
        assert accepted or not allowed
        masked = masked and allowed
        if not accepted:
            return False
    ends = bool(constraint.mask()[tokenizer.special_ids[END]])
    assert ends == constraint.may_end
    assert masked or not ends, "an answer of the grammar that no mask leads to"
    return ends


def tool(name="f", strict=True, **properties):
    required = [key for key in properties if key in ("city", "n")]
    parameters = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    function = {"name": name, "strict": strict, "parameters": parameters}
    return {"type": "function", "function": function}


CITY = {"type": "string", "maxLength": 5}
COUNT = {"type": "integer", "minimum": 1}
UNIT = {"type": "string", "enum": ["c", "f"]}
TOOL = tool(city=CITY, n=COUNT, unit=UNIT)


def argument(key, value, kind="string"):
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def call(body, name="f", index=1):
    return f'<|open|>call tool="{name}" index="{index}"<|sep|>{body}<|close|>call<|sep|>'


def tools(*calls):
    return f"<|open|>tools<|sep|>{''.join(calls)}<|close|>tools<|sep|>"


OSLO, TWO = argument("city", "Oslo"), argument("n", "2", "number")
RESPONSE = "<|open|>response<|sep|>ok<|close|>response<|sep|>"
CLOSED = "<|close|>message<|sep|>"
VALID = RESPONSE + tools(call(OSLO + TWO))

TABLE = [
    ("valid", VALID, True),
    ("valid and closed", VALID + CLOSED, True),
    (
        "with the optional argument",
        RESPONSE + tools(call(OSLO + TWO + argument("unit", "c"))),
        True,
    ),
    ("no response before the tools", tools(call(OSLO + TWO)), True),
    ("no opening of the response", "ok<|close|>response<|sep|>" + tools(call(OSLO + TWO)), True),
    ("two calls", RESPONSE + tools(call(OSLO + TWO), call(OSLO + TWO, index=2)), True),
    ("arguments in other order", RESPONSE + tools(call(TWO + OSLO)), False),
    ("a required argument is missing", RESPONSE + tools(call(OSLO)), False),
    ("an argument twice", RESPONSE + tools(call(OSLO + OSLO + TWO)), False),
    ("string too long", RESPONSE + tools(call(argument("city", "Bergen") + TWO)), False),
    ("bad enum", RESPONSE + tools(call(OSLO + TWO + argument("unit", "k"))), False),
    ("n is 0", RESPONSE + tools(call(OSLO + argument("n", "0", "number"))), False),
    ("n is no integer", RESPONSE + tools(call(OSLO + argument("n", "1.5", "number"))), False),
    ("wrong type", RESPONSE + tools(call(OSLO + argument("n", "2", "string"))), False),
    ("null", RESPONSE + tools(call(OSLO + argument("n", "null", "null"))), False),
    ("undeclared tool", RESPONSE + tools(call(OSLO + TWO, name="g")), False),
    ("undeclared argument", RESPONSE + tools(call(OSLO + TWO + argument("x", "1"))), False),
    ("no tools element", RESPONSE + call(OSLO + TWO), False),
]


@pytest.mark.parametrize(("why", "text", "expected"), TABLE, ids=[row[0] for row in TABLE])
@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_a_strict_tool_is_called_as_its_schema_says(
    choice, why, text, expected, tokenizer, grammars
):
    named = "f" if choice == "named" else None
    limits = Limits([TOOL], choice, named)
    assert accepts(limits, text, tokenizer, grammars) == expected, why


@pytest.mark.parametrize(("why", "text", "expected"), TABLE, ids=[row[0] for row in TABLE])
def test_a_union_elsewhere_loses_no_limit(why, text, expected, tokenizer, grammars):
    union = tool(city=CITY, n=COUNT, unit=UNIT, maybe={"type": ["string", "null"]})
    assert accepts(Limits([union], "required"), text, tokenizer, grammars) == expected, why


NULLABLE = tool(city=CITY, maybe={"anyOf": [{"type": "integer"}, {"type": "null"}]})


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [("null", "null", True), ("3", "number", True), ("x", "string", False), ("3", "null", False)],
)
def test_a_value_of_a_union_names_its_own_type(value, kind, expected, tokenizer, grammars):
    text = tools(call(OSLO + argument("maybe", value, kind)))
    assert accepts(Limits([NULLABLE], "required"), text, tokenizer, grammars) == expected


@pytest.mark.parametrize(
    ("choice", "expected"), [("auto", True), ("required", False), ("named", False), ("none", True)]
)
def test_an_answer_without_calls(choice, expected, tokenizer, grammars):
    limits = Limits([TOOL], choice, "f" if choice == "named" else None)
    assert accepts(limits, RESPONSE + CLOSED, tokenizer, grammars) == expected
    assert accepts(limits, RESPONSE, tokenizer, grammars) == expected


def test_none_forbids_tools(tokenizer, grammars):
    assert not accepts(Limits([TOOL], "none"), VALID, tokenizer, grammars)


def test_a_named_tool_is_the_only_one(tokenizer, grammars):
    limits = Limits([TOOL, tool("g")], "named", "g")
    assert not accepts(limits, VALID, tokenizer, grammars)
    assert accepts(limits, tools(call("", "g")), tokenizer, grammars)


def test_without_parallel_calls_there_is_one(tokenizer, grammars):
    limits = Limits([TOOL], "auto", parallel=False)
    two = RESPONSE + tools(call(OSLO + TWO), call(OSLO + TWO, index=2))
    assert accepts(limits, VALID, tokenizer, grammars)
    assert not accepts(limits, two, tokenizer, grammars)


def test_an_answer_without_thinking_starts_inside_the_response(tokenizer, grammars):
    limits = Limits([TOOL], "required", thinking=False)
    body = "ok<|close|>response<|sep|>" + tools(call(OSLO + TWO))
    assert accepts(limits, body, tokenizer, grammars)
    assert not accepts(limits, VALID, tokenizer, grammars)


LOOSE = {"type": "function", "function": {"name": 'a<b>"&', "parameters": {"type": "object"}}}


def test_a_tool_that_is_not_strict_takes_any_arguments_in_a_right_envelope(tokenizer, grammars):
    limits = Limits([LOOSE], "required")
    name = "a<b>&quot;&amp;"
    block = '<|open|>json type="object"<|sep|>{oops<|close|>json<|sep|>'
    for body in ("", argument("k&amp;", "v") + argument("z", "1", "number"), block):
        assert accepts(limits, tools(call(body, name)), tokenizer, grammars)
    for body in (argument("k", "v", "integer"), argument("k&", "v"), "text", block + block):
        assert not accepts(limits, tools(call(body, name)), tokenizer, grammars)
    assert not accepts(limits, tools(call("", "a<b>")), tokenizer, grammars)


SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        }
    },
}


def response(text):
    return f"<|open|>response<|sep|>{text}<|close|>response<|sep|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', True),
        ('{"a": "x"}', False),
        ("hello", False),
        ('{"b": 1}', False),
        ("[]", False),
    ],
)
def test_a_response_has_the_form_of_its_schema(text, expected, tokenizer, grammars):
    limits = Limits(response_format=SCHEMA)
    assert accepts(limits, response(text), tokenizer, grammars) == expected
    both = Limits([TOOL], response_format=SCHEMA)
    assert accepts(both, response(text), tokenizer, grammars) == expected
    # A text before calls is not the answer; it does not start as one.
    assert accepts(both, response("hm") + tools(call(OSLO + TWO)), tokenizer, grammars)


def test_a_json_object_is_any_object(tokenizer, grammars):
    limits = Limits(response_format={"type": "json_object"})
    for text, expected in (('{"x": [1, {"y": null}]}', True), ("[1]", False), ("3", False)):
        assert accepts(limits, response(text), tokenizer, grammars) == expected


def test_a_required_call_comes_before_a_response_format(tokenizer, grammars):
    limits = Limits([TOOL], "required", response_format=SCHEMA)
    assert accepts(limits, VALID, tokenizer, grammars)
    assert not accepts(limits, response('{"a": 1}'), tokenizer, grammars)


@pytest.mark.parametrize(
    ("pattern", "value", "expected"),
    [
        ("^[A-Z]{2}$", "NO", True),
        ("^[A-Z]{2}$", "NOR", False),
        ("b", "abc", True),
        ("b", "acd", False),
        ("^a/b$", "a/b", True),
        ("^a/b$", "a-b", False),
        (r"^\d+$", "12", True),
        (r"^\d+$", "1x", False),
        ("^a|b$", "a", True),
    ],
)
def test_a_string_matches_its_pattern(pattern, value, expected, tokenizer, grammars):
    limits = Limits([tool(city={"type": "string", "pattern": pattern})], "required")
    assert accepts(limits, tools(call(argument("city", value))), tokenizer, grammars) == expected


@pytest.mark.parametrize("value", ["", "a", "ab\n", 'x"y', "é"])
def test_lengths_and_pattern_hold_together(value, tokenizer, grammars):
    schema = {"type": "string", "pattern": "a", "minLength": 2, "maxLength": 3}
    text = tools(call(argument("city", value)))
    expected = "a" in value and 2 <= len(value) <= 3
    assert accepts(Limits([tool(city=schema)], "required"), text, tokenizer, grammars) == expected


def test_a_reference_is_followed(tokenizer, grammars):
    strict = tool(
        city={"$ref": "#/$defs/city"}, n={"type": "array", "items": {"$ref": "#/$defs/n"}}
    )
    strict["function"]["parameters"]["$defs"] = {"city": CITY, "n": COUNT}
    limits = Limits([strict], "required")
    for array, expected in (("[1, 2]", True), ("[0]", False), ("[]", True)):
        text = tools(call(OSLO + argument("n", array, "array")))
        assert accepts(limits, text, tokenizer, grammars) == expected


@pytest.mark.parametrize(
    ("parameters", "where"),
    [
        ({"type": "array"}, "parameters"),
        ({"properties": {"a": {"type": "strange"}}}, "parameters.properties.a"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "parameters.properties.a"),
        ({"properties": {"a": {"$ref": "http://x"}}}, "parameters.properties.a"),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, "parameters.properties.a"),
        ({"properties": {"a": {"type": "string", "not": {}}}}, "parameters.properties.a"),
        ({"properties": {"a": {"enum": []}}}, "parameters.properties.a"),
        ({"properties": {"a": False}}, "parameters.properties.a"),
        ({"required": ["a"]}, "parameters"),
        (
            {"properties": {"a": {"$ref": "#/properties/a"}}},
            "parameters.properties.a",
        ),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_place(parameters, where):
    function = {"name": "f", "strict": True, "parameters": parameters}
    with pytest.raises(ConfigError) as caught:
        grammar_of(Limits([{"type": "function", "function": function}], "required"))
    assert caught.value.where == f"tools[0].function.{where}"


def test_a_schema_beyond_the_library_is_refused(grammars):
    deep = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "not": {}}}}
    with pytest.raises(ConfigError, match="cannot be enforced"):
        grammars.compile(grammar_of(Limits(response_format=deep)))


def test_limits_come_from_the_request():
    request = {"tool_choice": {"type": "function", "function": {"name": "f"}}}
    assert limits_of(request, [TOOL], True) == Limits([TOOL], "named", "f")
    with pytest.raises(ConfigError, match="'g' is not declared"):
        limits_of({"tool_choice": {"function": {"name": "g"}}}, [TOOL], True)
    with pytest.raises(ConfigError, match="no tool is declared"):
        limits_of({"tool_choice": "required"}, [], True)
    assert grammar_of(limits_of({}, [LOOSE], True)) is None
    assert grammar_of(limits_of({"parallel_tool_calls": False}, [LOOSE], True)) is not None


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_mask_allows_is_read_back_as_calls_that_fit_the_schema(
    seed, tokenizer, grammars
):
    draw = random.Random(seed)
    constraint = grammars.compile(grammar_of(Limits([TOOL], "required", parallel=False)))
    stream = TokenStream(tokenizer, ParserOptions(thinking=False))
    for step in itertools.count():
        allowed = constraint.mask().nonzero()[0]
        ends = tokenizer.special_ids[END]
        # A free text would go on for long: close it as soon as that is allowed.
        closing = [t for t in allowed if t == tokenizer.special_ids["<|close|>"]]
        token = int(draw.choice(closing or list(allowed)))
        if ends in allowed or step > 400:
            break
        assert constraint.accept(token)
        stream.push([token])
    stream.finish()
    (made,) = stream.answer("stop").tool_calls
    arguments = json.loads(made.arguments)
    assert len(arguments["city"]) <= 5
    assert arguments["n"] >= 1
    assert set(arguments) <= {"city", "n", "unit"}


def test_what_the_renderer_writes_is_in_the_grammar(tokenizer, grammars):
    made = {"id": "1", "function": {"name": "f", "arguments": '{"city": "Oslo", "n": 2}'}}
    question = [{"role": "user", "content": "q"}]
    turn = {"role": "assistant", "content": "ok", "tool_calls": [made]}
    head = {"messages": question, "reasoning_effort": "none"}
    stub = render(head).segments
    whole = render({**head, "messages": [*question, turn], "add_generation_prompt": False})
    ids = encode(whole.segments[len(stub) : -1], tokenizer)
    constraint = grammars.compile(grammar_of(Limits([TOOL], "required", thinking=False)))
    assert all(constraint.accept(token) for token in ids)
    assert constraint.may_end
