"""Dataclasses as JSON and back, strictly: a missing, unknown or mistyped field is an error."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from k3c.errors import ArtifactError

T = TypeVar("T")


def to_json(value: Any) -> str:
    """Return a dataclass as JSON text: sorted keys, one deterministic form, a final newline."""
    return json.dumps(asdict(value), sort_keys=True, indent=1, ensure_ascii=True) + "\n"


def from_json(kind: type[T], text: str, where: str) -> T:
    """Parse JSON text into a dataclass of type `kind`, strictly.

    Args:
        kind: The dataclass to build.
        text: The JSON text.
        where: File name for error messages.

    Raises:
        ArtifactError: The text is not JSON, a field is missing, unknown or of another type.
    """
    try:
        return _builder(kind)(json.loads(text))
    except (ValueError, RecursionError) as exc:
        raise ArtifactError(f"not valid JSON: {exc}", where, "compile again") from exc
    except _Mismatch as exc:
        raise ArtifactError(exc.what, where + exc.path, exc.hint) from None


class _Mismatch(Exception):
    """A value is not of its type; `path` grows while the exception leaves the enclosing values."""

    def __init__(self, what: str, hint: str = "compile again") -> None:
        self.what, self.hint, self.path = what, hint, ""
        super().__init__(what)


def _demand(ok: bool, raw: Any, expected: str) -> Any:
    if not ok:
        raise _Mismatch(f"found {str(raw)[:80]!r}, expected {expected}")
    return raw


# A plan holds thousands of values: what a type demands is worked out once, not for each value.
@cache
def _builder(kind: Any) -> Callable[[Any], Any]:
    """Return a function that checks one parsed JSON value and converts it to `kind`."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda raw: raw
    if is_dataclass(kind):
        return _dataclass_builder(kind)
    if origin is Literal:
        return _checked(lambda raw: raw in args, f"one of {', '.join(map(str, args))}")
    if origin is tuple:
        return _tuple_builder(_builder(args[0]))
    if origin is Mapping or origin is dict:
        return _mapping_builder(_builder(args[1]))
    if origin in (Union, types.UnionType):
        return _checked(lambda raw: type(raw) in args, f"one of {args}")
    return _checked(lambda raw: type(raw) is kind, kind.__name__)


def _checked(ok: Callable[[Any], bool], expected: str) -> Callable[[Any], Any]:
    return lambda raw: _demand(ok(raw), raw, expected)


def _tuple_builder(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def build(raw: Any) -> tuple[Any, ...]:
        values: list[Any] = []
        try:
            for each in _demand(type(raw) is list, raw, "a list"):
                values.append(item(each))
        except _Mismatch as exc:
            exc.path = f"[{len(values)}]{exc.path}"
            raise
        return tuple(values)

    return build


def _mapping_builder(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def build(raw: Any) -> dict[str, Any]:
        given: dict[str, Any] = _demand(type(raw) is dict, raw, "an object")
        key, values = "", dict[str, Any]()
        try:
            for key, each in given.items():
                values[key] = item(each)
        except _Mismatch as exc:
            exc.path = f".{key}{exc.path}"
            raise
        return values

    return build


def _dataclass_builder(kind: Any) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    items = {f.name: _builder(hints[f.name]) for f in fields(kind)}

    def build(raw: Any) -> Any:
        given: dict[str, Any] = _demand(type(raw) is dict, raw, "an object")
        if given.keys() != items.keys():
            name = min(given.keys() ^ items.keys())
            problem = "is missing" if name in items else "is unknown"
            raise _Mismatch(f"field {name} {problem}", "compile again with this version")
        name, values = "", dict[str, Any]()
        try:
            for name, item in items.items():
                values[name] = item(given[name])
        except _Mismatch as exc:
            exc.path = f".{name}{exc.path}"
            raise
        return kind(**values)

    return build
