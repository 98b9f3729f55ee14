"""Arguments of a tool call, between a JSON text and one element for each.

Source: Kimi K3 serving spec §1.7 (writing), §2.2 (reading).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from k3c.runtime.server.wire.segments import Segment, element, texts

_SPACE = " \t\n\r"


@dataclass(frozen=True)
class Argument:
    """One argument: its key, the type that its element names, and the body of the element."""

    key: str
    type: str
    body: str


class NotAnObject(ValueError):
    """A text is no JSON object."""


def argument_segments(arguments: Any) -> list[Segment]:
    """Return the body of a call.

    Args:
        arguments: A JSON text, an object, or nothing. What is no object becomes one raw block: an
            agent may replay a call that it could not read.
    """
    if (
        arguments is None
        or arguments == ""
        or (isinstance(arguments, str) and not arguments.strip())
    ):
        return []
    if isinstance(arguments, dict):
        found = [Argument(str(key), type_of(v), _body(v)) for key, v in arguments.items()]
    else:
        text = arguments if isinstance(arguments, str) else _compact(arguments)
        try:
            found = list(split_object(text))
        except NotAnObject:
            return element("json", texts(text), {"type": "object"})
    return [segment for argument in found for segment in _element(argument)]


def _element(argument: Argument) -> list[Segment]:
    attributes = {"key": argument.key, "type": argument.type}
    return element("argument", texts(argument.body), attributes)


def split_object(text: str) -> Iterator[Argument]:
    """Yield the members of a JSON object; values other than strings keep their source text.

    What follows the closing brace is ignored.

    Raises:
        NotAnObject: The text does not start with an object.
    """
    try:
        yield from _members(text)
    except (ValueError, IndexError, RecursionError) as error:
        raise NotAnObject(text) from error


def _members(text: str) -> list[Argument]:
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    at = _skip(text, 0)
    if text[at] != "{":
        raise NotAnObject(text)
    found: list[Argument] = []
    at = _skip(text, at + 1)
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        at = _skip(text, at)
        if not isinstance(key, str) or text[at] != ":":
            raise NotAnObject(text)
        start = _skip(text, at + 1)
        value, at = decoder.raw_decode(text, start)
        body = value if isinstance(value, str) else text[start:at]
        found.append(Argument(key, type_of(value), body))
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
            if text[at] == "}":
                raise NotAnObject(text)
        elif text[at] != "}":
            raise NotAnObject(text)
    return found


def _skip(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at


def type_of(value: Any) -> str:
    """Return the type that an argument's element names."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return {str: "string", dict: "object", list: "array"}[type(value)]


def _body(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def strict_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is none; NaN and Infinity are none.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
