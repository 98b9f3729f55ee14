"""One tool call while it is read: its arguments as a JSON text that only grows.

Source: Kimi K3 serving spec §2.2 (values), §2.3 (fragments).
"""

from __future__ import annotations

import json

from k3c.runtime.server.wire.arguments import NotAnObject, split_object, strict_json
from k3c.runtime.server.wire.output import ToolCall


class CallReader:
    """Collects a call; every method returns the fragment of its arguments that became final."""

    def __init__(self, name: str) -> None:
        """Start a call; without a name it will be dropped."""
        self.name = name
        self._written = ""
        self._raw: str | None = None
        self._key, self._type = "", "string"
        self._body = ""
        self._in_block = False

    def open_argument(self, key: str, kind: str) -> str:
        """Start an argument; a type that is missing is `string`."""
        self._key, self._type, self._body, self._in_block = key, kind or "string", "", False
        if self._type != "string":
            return ""
        return self._write(f'{self._separator()}{_quoted(key)}:"')

    def open_block(self) -> None:
        """Start a raw block, which holds all arguments at once."""
        self._body, self._in_block = "", True

    def text(self, piece: str) -> str:
        """Add to the argument that is open."""
        if not self._in_block and self._type == "string":
            return self._write(_quoted(piece)[1:-1])
        self._body += piece
        return ""

    def close_argument(self) -> str:
        """End the argument or the block."""
        if self._in_block:
            return self._close_block()
        if self._type == "string":
            return self._write('"')
        return self._write(f"{self._separator()}{_quoted(self._key)}:{_value(self._body)}")

    def close(self) -> str:
        """End the call."""
        if self._raw is not None:
            return ""
        return self._write("}" if self._written else "{}")

    @property
    def call(self) -> ToolCall:
        """The call, once it is closed."""
        return ToolCall(self.name, self._written if self._raw is None else self._raw)

    def _close_block(self) -> str:
        """Take a block's members; a block that is no object is the arguments as it stands."""
        try:
            members = list(split_object(self._body))
        except NotAnObject:
            return self._unreadable()
        fragment = ""
        for member in members:
            text = _quoted(member.body) if member.type == "string" else member.body
            fragment += self._write(f"{self._separator()}{_quoted(member.key)}:{text}")
        return fragment

    def _unreadable(self) -> str:
        if self._written:
            # Arguments before it are out already: keep its text as one more of them.
            return self._write(f"{self._separator()}{_quoted('json')}:{_quoted(self._body)}")
        self._raw = (self._raw or "") + self._body
        return self._body

    def _separator(self) -> str:
        return "," if self._written else "{"

    def _write(self, text: str) -> str:
        self._written += text
        return text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _value(body: str) -> str:
    """Return a body that is JSON as it stands, another one as a string."""
    try:
        strict_json(body)
    except ValueError:
        return _quoted(body)
    return body.strip()
