"""JSON schemas of a tool's parameters as bodies of argument elements.

A string stands in its element as it is, without quotes or escapes; every other value as JSON.

Source: Kimi K3 serving spec §2.5 (level 2).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3c.errors import ConfigError
from k3c.runtime.server.wire.arguments import type_of

Schema = Mapping[str, Any]
TYPES = ("string", "number", "boolean", "null", "object", "array")
_MAX_DEPTH = 32
_STRING_KEYS = ("pattern", "minLength", "maxLength")
# What only describes, or is checked by the alternatives themselves.
_HARMLESS = {
    "$defs", "$id", "$schema", "anyOf", "const", "default", "definitions", "deprecated",
    "description", "enum", "examples", "oneOf", "title", "type", *_STRING_KEYS,
}  # fmt: skip


@dataclass(frozen=True)
class Property:
    """One property of a tool's parameters; `root` resolves its references."""

    name: str
    schema: Any
    required: bool
    root: Schema


@dataclass(frozen=True)
class Alternative:
    """One form of an argument: the type that its element names, and its body.

    A string's body may be several regular expressions with `&` between them, all of which must
    match: only a terminal of the grammar may be that.
    """

    type: str
    body: str


def properties_of(parameters: Any, where: str) -> tuple[list[Property], bool]:
    """Return the properties in declared order, and whether others may follow.

    Raises:
        ConfigError: The parameters are no schema of an object.
    """
    schema = parameters if parameters is not None else {}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ConfigError("a strict tool needs a schema of an object", where)
    listed = schema.get("properties") or {}
    required = schema.get("required") or ()
    if not isinstance(listed, Mapping) or isinstance(required, str):
        raise ConfigError("`properties` must be an object and `required` a list", where)
    missing = [name for name in required if name not in listed]
    if missing:
        raise ConfigError(f"required property {missing[0]!r} is not declared", where)
    found = [Property(str(n), s, n in required, schema) for n, s in listed.items()]
    return found, schema.get("additionalProperties") is not False


def alternatives(schema: Any, root: Schema, where: str) -> list[Alternative]:
    """Return every form that a value may take, each with the type of its element.

    Raises:
        ConfigError: The schema says what cannot be put into a grammar.
    """
    found: dict[Alternative, None] = {}
    for part in _parts(schema, root, where, 0):
        found |= dict.fromkeys(_of_part(part, root, where))
    if not found:
        raise ConfigError("no value fits the schema", where)
    return list(found)


def _parts(schema: Any, root: Schema, where: str, depth: int) -> Iterator[Schema]:
    """Yield schemas without references and unions."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        raise ConfigError("expected a schema", where, "references must not go in circles")
    if "$ref" in schema:
        yield from _parts(_resolved(str(schema["$ref"]), root, where), root, where, depth + 1)
        return
    union = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(union, Sequence) and not isinstance(union, str):
        for member in union:
            yield from _parts(member, root, where, depth + 1)
        return
    yield schema


def _resolved(reference: str, root: Schema, where: str) -> Any:
    at: Any = root
    if not reference.startswith("#"):
        raise ConfigError(f"cannot follow {reference!r}", where, "references start with #")
    for word in filter(None, reference[1:].split("/")):
        key = word.replace("~1", "/").replace("~0", "~")
        if not isinstance(at, Mapping) or key not in at:
            raise ConfigError(f"{reference!r} names nothing", where)
        at = at[key]
    return at


def _of_part(schema: Schema, root: Schema, where: str) -> Iterator[Alternative]:
    values = schema.get("enum")
    if "const" in schema:
        values = [schema["const"]]
    if values is not None:
        yield from _of_values(values)
        return
    named = schema.get("type", list(TYPES))
    for kind in [named] if isinstance(named, str) else named:
        if kind == "string":
            _check_string(schema, where)
            yield Alternative("string", _string_body(schema, where))
        elif kind == "integer" or kind in TYPES:
            yield _json_of(kind, schema, root)
        else:
            raise ConfigError(f"unknown type {kind!r}", where, f"one of {', '.join(TYPES)}")


def _of_values(values: Sequence[Any]) -> Iterator[Alternative]:
    """Yield one alternative for each type among some values."""
    kinds: dict[str, list[Any]] = {}
    for value in values:
        kinds.setdefault(type_of(value), []).append(value)
    for kind, members in kinds.items():
        if kind == "string":
            listed = " | ".join(json.dumps(member, ensure_ascii=False) for member in members)
            yield Alternative(kind, f"({listed})")
        else:
            yield Alternative(kind, f"%json {_dumped({'enum': members})}")


def _json_of(kind: str, schema: Schema, root: Schema) -> Alternative:
    shown = "number" if kind == "integer" else kind
    body = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
    defined = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return Alternative(shown, f"%json {_dumped({**body, **defined, 'type': kind})}")


def _check_string(schema: Schema, where: str) -> None:
    """Refuse what a raw string cannot be held to, but for formats, which only describe."""
    unknown = sorted(set(schema) - _HARMLESS - {"format"})
    unions = {"allOf", "not", "if", "$ref"} & set(unknown)
    if unions:
        hint = "write it as pattern, minLength, maxLength or enum"
        raise ConfigError(f"{sorted(unions)[0]} of a string", where, hint)


def _string_body(schema: Schema, where: str) -> str:
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    parts: list[str] = []
    if "pattern" in schema:
        parts.append(_regex(_anchored(str(schema["pattern"])), where))
    if low or high is not None:
        bound = f"{low},{'' if high is None else high}"
        parts.append(_regex(f"(?s:.{{{bound}}})", where))
    return " & ".join(parts) if parts else "TEXT"


def _anchored(pattern: str) -> str:
    """Return a pattern that matches a whole text as JSON schema's matches a part of it."""
    front, back = "(?s:.*)", "(?s:.*)"
    if pattern.startswith("^"):
        pattern, front = pattern[1:], ""
    if pattern.endswith("$") and not pattern.endswith("\\$"):
        pattern, back = pattern[:-1], ""
    return f"{front}({pattern}){back}"


def _regex(pattern: str, where: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"no regular expression: {error}", where) from None
    # A slash ends the literal, and so does the end of a line.
    escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n")
    return f"/{escaped}/"


def _dumped(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
