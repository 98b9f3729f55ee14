"""Declarations of tools, and what a tool answered: which call a result belongs to.

Source: Kimi K3 serving spec §1.5 (declarations), §1.7 (results).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3c.errors import ConfigError

_DECLARED = "# Tools\nHere are the available tools, described in JSONSchema.\n"
_EXTENDED = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n"
)
TOOL_ROLES = ("tool", "function")


def declaration(tools: Sequence[Any], where: str, extended: bool = False) -> str:
    """Return the text that declares tools; their keys are sorted, so that equal ones hit a cache.

    Raises:
        ConfigError: A tool is no object with a function that has a name.
    """
    listed = [_without_nulls(tool, f"{where}[{i}]") for i, tool in enumerate(tools)]
    return f"{_EXTENDED if extended else _DECLARED}\n{fenced(listed)}"


def fenced(value: Any) -> str:
    """Return a value as compact JSON with sorted keys in a fence."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f"```json\n{text}\n```"


def _without_nulls(tool: Any, where: str) -> dict[str, Any]:
    """Drop nulls of the tool and of its function, not those of its parameters."""
    name_of(tool, where)
    kept = {key: value for key, value in tool.items() if value is not None}
    if isinstance(kept.get("function"), Mapping):
        kept["function"] = {k: v for k, v in kept["function"].items() if v is not None}
    return kept


def name_of(tool: Any, where: str) -> str:
    """Return the name of a declared tool.

    Raises:
        ConfigError: It has none.
    """
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        hint = 'write {"type": "function", "function": {"name": ..., "parameters": ...}}'
        raise ConfigError("a tool without a function that has a name", where, hint)
    return name


@dataclass
class Calls:
    """The calls of the last assistant message, and how many results have come since.

    Attributes:
        ids: Id and name of each call, in order.
        answered: Results so far.
    """

    ids: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    answered: int = 0

    def position(self, result: Mapping[str, Any]) -> int | None:
        """Return the place of the call that a result names, counted from 0; None: no such call."""
        wanted = result.get("tool_call_id", result.get("id"))
        for place, (known, name) in enumerate(self.ids):
            if wanted is not None and wanted in (known, f"{name}:{place}"):
                return place
        return None


@dataclass(frozen=True)
class ToolResult:
    """A result as it is written: the call's tool, its number from 1, and the message."""

    tool: str
    index: int
    message: Mapping[str, Any]
    where: str


def results_of(run: Iterable[tuple[str, Mapping[str, Any]]], calls: Calls) -> list[ToolResult]:
    """Return a run of results in the order in which they are written.

    Args:
        run: Consecutive tool messages, each with its place in the request.
        calls: Of the assistant message before them; `answered` is moved on.

    Raises:
        ConfigError: A result neither names a call nor a tool.
    """
    listed = list(run)
    places = [calls.position(result) for _, result in listed]
    before = calls.answered
    calls.answered += len(listed)
    known = [place for place in places if place is not None]
    if len(known) == len(listed):
        matched = sorted(zip(known, listed, strict=True), key=lambda pair: pair[0])
        return [
            ToolResult(calls.ids[place][1], place + 1, result, where)
            for place, (where, result) in matched
        ]
    return [
        ToolResult(_own_name(result, number, calls, where), number, result, where)
        for number, (where, result) in enumerate(listed, before + 1)
    ]


def _own_name(result: Mapping[str, Any], number: int, calls: Calls, where: str) -> str:
    if isinstance(result.get("name"), str) and result["name"]:
        return result["name"]
    if number <= len(calls.ids):
        return calls.ids[number - 1][1]
    what = f"result {number} answers no call: the assistant made {len(calls.ids)}"
    raise ConfigError(what, f"{where}.tool_call_id", "name a call's id, or the tool in `name`")
