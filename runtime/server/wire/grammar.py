"""What an answer may look like after the model has thought, as a grammar for llguidance.

Texts cannot hold control tokens, so the tags of an answer are the grammar and everything between
them is free, unless a schema says otherwise. The grammar starts right behind `</think>`, or where
an answer without thinking starts; where it may end, the stop token is allowed.

Source: Kimi K3 serving spec §2.5 (levels, alternation), §1.3 (escaping).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3c.errors import ConfigError
from k3c.runtime.server.wire.grammar_schema import Alternative, alternatives, properties_of
from k3c.runtime.server.wire.segments import CLOSE, OPEN, SEP, escape

_COMMON = r"""
TEXT: /(?s:.*)/
KEY: /([^"&]|&amp;|&quot;)+/
TYPE: "string" | "number" | "boolean" | "null" | "object" | "array"
INDEX: /[1-9][0-9]*/
"""
_ANY_ARGUMENT = r'"argument key=\"" KEY "\" type=\"" TYPE "\""'
_BLOCK = 'json type="object"'
# What a JSON value of a type starts with, as a part of a class of a regular expression.
_STARTS = {"object": r"{", "array": r"\[", "string": r'"', "boolean": "tf", "null": "n"}
_ANY_START = r'{\["tfn\-0-9'


@dataclass(frozen=True)
class Limits:
    """What a request asks of the form of its answer.

    Attributes:
        tools: Declared tools, also those of later system messages.
        tool_choice: `auto`, `none`, `required`, or the name of a tool in `named`.
        named: The only tool that may be called.
        parallel: More than one call may be made.
        response_format: The request's, or None.
        thinking: The answer starts with thoughts, so that the response channel is not open yet.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    named: str | None = None
    parallel: bool = True
    response_format: Mapping[str, Any] | None = None
    thinking: bool = True


def limits_of(
    request: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], thinking: bool
) -> Limits:
    """Read the limits of a chat request.

    Raises:
        ConfigError: A tool is named that is not declared, or a call is required and there is none.
    """
    choice, named = request.get("tool_choice") or "auto", None
    if isinstance(choice, Mapping):
        function = choice.get("function")
        named = function.get("name") if isinstance(function, Mapping) else choice.get("name")
        choice = "named"
    names = [tool["function"]["name"] for tool in tools]
    if named is not None and named not in names:
        what = f"tool {named!r} is not declared"
        raise ConfigError(what, "tool_choice", f"declared: {', '.join(names) or 'none'}")
    if choice == "required" and not names:
        raise ConfigError("a call is required and no tool is declared", "tool_choice")
    parallel = request.get("parallel_tool_calls")
    wanted = request.get("response_format")
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    form = wanted if kind in ("json_object", "json_schema") else None
    return Limits(tools, choice, named, parallel is not False, form, thinking)


def grammar_of(limits: Limits) -> str | None:
    """Return the grammar of an answer; None where everything is allowed.

    Raises:
        ConfigError: A schema cannot be put into a grammar; `where` names it.
    """
    strict = any(_is_strict(tool) for tool in limits.tools)
    free = limits.tool_choice == "auto" and not limits.response_format
    if free and not (strict or (limits.tools and not limits.parallel)):
        return None
    return _Grammar(limits).text()


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


@dataclass
class _Grammar:
    """Writes one grammar, a rule a line."""

    limits: Limits
    rules: list[str] = field(default_factory=list[str])

    def text(self) -> str:
        limits = self.limits
        required = limits.tool_choice in ("required", "named")
        called = bool(limits.tools) and limits.tool_choice != "none"
        formed = limits.response_format is not None and not required
        tail = f"({_closed('message')})?"
        answer = self._response("form" if formed else "TEXT")
        forms = [] if required else [f"{answer} {tail}"]
        if called:
            # The response may be left out before calls, or, in the middle of one, must be closed.
            free = self._response("BEFORE_CALLS" if formed else "TEXT")
            before = f"({free})?" if limits.thinking else free
            forms.append(f"{before} tools {tail}")
            self._tools()
        if formed:
            self._form()
        return "\n".join([f"start: {' | '.join(forms)}", *self.rules]) + _COMMON

    def _response(self, body: str) -> str:
        opened = f"({_opened('response')})? " if self.limits.thinking else ""
        return f"{opened}{body} {_closed('response')}"

    def _form(self) -> None:
        """Add the response's form, and the text that may stand before calls instead.

        The first character tells which of the two it is: the text may not start as a value does.
        """
        wanted = self.limits.response_format or {}
        schema: Any = {"type": "object"}
        if wanted["type"] == "json_schema":
            schema = wanted["json_schema"]["schema"]
        self.rules.append(f"form: %json {json.dumps(schema, sort_keys=True)}")
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        starts = _STARTS.get(kind, _ANY_START) if isinstance(kind, str) else _ANY_START
        self.rules.append(rf"BEFORE_CALLS: /([^\s{starts}](?s:.*))?/")

    def _tools(self) -> None:
        calls: list[str] = []
        for number, tool in enumerate(self.limits.tools):
            function = tool["function"]
            if self.limits.named in (None, function["name"]):
                self._call(number, function, _is_strict(tool))
                calls.append(f"call_{number}")
        many = "+" if self.limits.parallel else ""
        body = f"({' | '.join(calls)}){many}"
        self.rules.append(f"tools: {_opened('tools')} {body} {_closed('tools')}")

    def _call(self, number: int, function: Mapping[str, Any], strict: bool) -> None:
        head = _literal(f'call tool="{escape(function["name"])}" index="')
        index = "INDEX" if self.limits.parallel else '"1"'
        arguments = self._arguments(number, function) if strict else self._free(number)
        start = f'{OPEN} {head} {index} "\\"" {SEP}'
        self.rules.append(f"call_{number}: {start} {arguments} {_closed('call')}")

    def _free(self, number: int) -> str:
        """Add arguments of any names, and the raw block."""
        name = f"free_{number}"
        argument = f"{OPEN} {_ANY_ARGUMENT} {SEP} TEXT {_closed('argument')}"
        block = f"{_opened(_BLOCK)} TEXT {_closed('json')}"
        self.rules.append(f"{name}: ({argument})* | {block}")
        return name

    def _arguments(self, number: int, function: Mapping[str, Any]) -> str:
        """Add the arguments of a strict tool: its properties in the order of its schema."""
        where = f"tools[{number}].function.parameters"
        found, extra = properties_of(function.get("parameters"), where)
        parts: list[str] = []
        for place, item in enumerate(found):
            name = f"argument_{number}_{place}"
            forms = alternatives(item.schema, item.root, f"{where}.properties.{item.name}")
            bodies = [self._argument(item.name, form) for form in forms]
            self.rules.append(f"{name}: {' | '.join(bodies)}")
            parts.append(name if item.required else f"{name}?")
        if extra:
            name = self._free(number)
            return f"{' '.join(parts)} {name}" if parts else name
        return " ".join(parts)

    def _argument(self, key: str, form: Alternative) -> str:
        head = _opened(f'argument key="{escape(key)}" type="{form.type}"')
        body = form.body
        if form.type == "string" and body != "TEXT":
            body = f"STRING_{len(self.rules)}"
            self.rules.append(f"{body}: {form.body}")
        return f"{head} {body} {_closed('argument')}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _opened(text: str) -> str:
    return f"{OPEN} {_literal(text)} {SEP}"


def _closed(name: str) -> str:
    return f"{CLOSE} {_literal(name)} {SEP}"
