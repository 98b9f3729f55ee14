"""Reads an answer as it comes: control tokens and texts in, deltas out, and the whole at the end.

A tag is a control token, a text and `<|sep|>`; the same spelling in ordinary tokens is text. Any
split of the texts gives the same answer.

Source: Kimi K3 serving spec §2.2 (states), §2.3 (streaming).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from k3c.runtime.server.wire.call import CallReader
from k3c.runtime.server.wire.output import Answer, Delta, FinishReason, ToolCall
from k3c.runtime.server.wire.segments import CLOSE, END, OPEN, SEP, unescape

_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')
_CHANNELS = ("think", "response", "tools")


class State(Enum):
    """Where in an answer the next token stands."""

    THINK = auto()
    BETWEEN = auto()
    RESPONSE = auto()
    AFTER = auto()
    TOOLS = auto()
    CALL = auto()
    ARGUMENT = auto()
    UNKNOWN = auto()
    DONE = auto()


@dataclass
class _Tag:
    """A tag: its control token, and the text up to `<|sep|>`."""

    marker: str
    text: str = ""

    @property
    def name(self) -> str:
        return (self.text.split() or [""])[0]

    @property
    def attributes(self) -> Mapping[str, str]:
        return {key: unescape(value) for key, value in _ATTRIBUTE.findall(self.text)}

    @property
    def spelling(self) -> str:
        return self.marker + self.text


@dataclass(frozen=True)
class ParserOptions:
    """How an answer is read.

    Attributes:
        thinking: It starts in the think channel.
        tools: Calls are wanted; else a tools channel is read and thrown away.
        whole_calls: A call is told only when it is complete.
    """

    thinking: bool = True
    tools: bool = True
    whole_calls: bool = False


@dataclass
class OutputParser:
    """Reads one answer; `state` says where it stands."""

    options: ParserOptions
    state: State = State.RESPONSE
    _tag: _Tag | None = None
    _reasoning: str = ""
    _content: str = ""
    _held: str = ""  # blank text that is content only if more follows, or nothing else does
    _skipped: bool = False
    _unknown: str = ""
    _opener: str = ""
    _call: CallReader | None = None
    _announced: int = 0
    _calls: list[ToolCall] = field(default_factory=list[ToolCall])
    _deltas: list[Delta] = field(default_factory=list[Delta])

    def __post_init__(self) -> None:
        """Start where the prompt's stub ends."""
        self.state = State.THINK if self.options.thinking else State.RESPONSE

    @property
    def in_tag(self) -> bool:
        """Whether the next text belongs to a tag."""
        return self._tag is not None

    def push_text(self, text: str) -> list[Delta]:
        """Read ordinary text."""
        if self._tag is not None:
            self._tag.text += text
        elif text:
            self._text(text)
        return self._taken()

    def push_control(self, spelling: str) -> list[Delta]:
        """Read a control token."""
        if self.state is State.DONE:
            return []
        if spelling == END:
            self._finish_message()
        elif spelling in (OPEN, CLOSE):
            self._abandon_tag()
            self._tag = _Tag(spelling)
        elif spelling == SEP and self._tag is not None:
            tag, self._tag = self._tag, None
            self._on_tag(tag)
        elif self.state is State.ARGUMENT:
            self._abandon_tag()
            self._argument_text(spelling)
        return self._taken()

    def finish(self) -> list[Delta]:
        """Return what was held back; a tag that is not complete is none."""
        self._finish_message()
        return self._taken()

    def answer(self, finish_reason: FinishReason) -> Answer:
        """Return the whole answer, after `finish`.

        Args:
            finish_reason: Why the engine stopped.
        """
        reasoning, content = self._reasoning, self._content
        if self._skipped:
            reasoning, content = "", reasoning + content
        if self._calls and not content.strip():
            content = ""
        done = self._calls and finish_reason == "stop"
        reason: FinishReason = "tool_calls" if done else finish_reason
        return Answer(reasoning or None, content or None, tuple(self._calls), reason)

    # Text

    def _text(self, text: str) -> None:
        if self.state is State.THINK:
            self._reasoning += text
            self._deltas.append(Delta("reasoning", text))
        elif self.state is State.BETWEEN and text.lstrip():
            self.state = State.RESPONSE
            self._content_text(text.lstrip())
        elif self.state is State.RESPONSE:
            self._content_text(text)
        elif self.state is State.ARGUMENT:
            self._argument_text(text)

    def _content_text(self, text: str) -> None:
        """Blank text at the start waits: beside tool calls it is no content."""
        if not self._content and not text.strip():
            self._held += text
            return
        text, self._held = self._held + text, ""
        self._content += text
        self._deltas.append(Delta("content", text))

    def _argument_text(self, text: str) -> None:
        assert self._call is not None, "an argument outside a call"
        self._arguments(self._call.text(text))

    def _abandon_tag(self) -> None:
        """Drop a tag that another control token breaks; inside a value it was text."""
        tag, self._tag = self._tag, None
        if tag is not None and self.state is State.ARGUMENT:
            self._argument_text(tag.spelling)

    # Tags

    def _on_tag(self, tag: _Tag) -> None:
        on: Callable[[_Tag], None] = {
            State.ARGUMENT: self._on_tag_in_argument,
            State.CALL: self._on_tag_in_call,
            State.TOOLS: self._on_tag_in_tools,
            State.UNKNOWN: self._on_tag_in_unknown,
        }.get(self.state, self._on_tag_in_channel)
        on(tag)

    def _on_tag_in_channel(self, tag: _Tag) -> None:
        """Read a tag of THINK, BETWEEN, RESPONSE or AFTER."""
        if tag.marker == OPEN:
            self._open_channel(tag)
        elif tag.name == "message":
            self._finish_message()
        elif tag.name == "think" and self.state is State.THINK:
            self.state = State.BETWEEN
        elif tag.name == "response" and self.state in (State.THINK, State.RESPONSE):
            self._skipped = self.state is State.THINK
            self.state = State.AFTER

    def _open_channel(self, tag: _Tag) -> None:
        if tag.name == "call":
            self._open_call(tag)
        elif tag.name in ("response", "tools"):
            self.state = State.RESPONSE if tag.name == "response" else State.TOOLS
        elif tag.name not in _CHANNELS and self.state in (State.BETWEEN, State.AFTER):
            self._unknown, self.state = tag.name, State.UNKNOWN

    def _on_tag_in_unknown(self, tag: _Tag) -> None:
        if tag.marker == OPEN and tag.name == "call":
            self._open_call(tag)
        elif tag.marker == CLOSE and tag.name == self._unknown:
            self.state = State.AFTER if self._content else State.BETWEEN
        elif tag.marker == CLOSE and tag.name == "message":
            self._finish_message()

    def _on_tag_in_tools(self, tag: _Tag) -> None:
        if tag.marker == OPEN and tag.name == "call":
            self._open_call(tag)
        elif tag.marker == CLOSE and tag.name in ("tools", "message"):
            self._finish_message()

    def _on_tag_in_call(self, tag: _Tag) -> None:
        assert self._call is not None, "no call is open"
        if tag.marker == CLOSE:
            if tag.name == "call":
                self._commit()
            elif tag.name in ("tools", "message"):
                self._finish_message()
        elif tag.name == "argument":
            self._opener, self.state = "argument", State.ARGUMENT
            attributes = tag.attributes
            kind = attributes.get("type", "string")
            self._arguments(self._call.open_argument(attributes.get("key", ""), kind))
        elif tag.name == "json":
            self._opener, self.state = "json", State.ARGUMENT
            self._call.open_block()
        elif tag.name == "call":
            # Its close is missing: losing a whole call would be worse.
            self._commit()
            self._open_call(tag)

    def _on_tag_in_argument(self, tag: _Tag) -> None:
        assert self._call is not None, "an argument outside a call"
        if tag.marker == CLOSE and tag.name in (self._opener, "call"):
            self._arguments(self._call.close_argument())
            self.state = State.CALL
            if tag.name == "call":
                self._commit()
        elif tag.marker == CLOSE and tag.name in ("tools", "message"):
            self._finish_message()
        else:
            self._argument_text(tag.spelling + SEP)

    # Calls

    def _open_call(self, tag: _Tag) -> None:
        self.state = State.CALL
        self._call = CallReader(tag.attributes.get("tool", ""))
        if self._told and not self.options.whole_calls:
            self._deltas.append(Delta("call", self._call.name, self._announced))

    def _commit(self) -> None:
        call, self.state = self._call, State.TOOLS
        assert call is not None, "no call is open"
        last = call.close()
        if self._told and self.options.whole_calls:
            self._deltas.append(Delta("call", call.name, self._announced))
            last = call.call.arguments
            self._deltas.append(Delta("arguments", last, self._announced))
        elif self._told:
            self._arguments(last)
        if self._told:
            self._calls.append(call.call)
            self._announced += 1
        self._call = None

    @property
    def _told(self) -> bool:
        """Whether the client hears of the call that is open: not of one without a name."""
        return self.options.tools and self._call is not None and bool(self._call.name)

    def _arguments(self, fragment: str) -> None:
        if fragment and self._told and not self.options.whole_calls:
            self._deltas.append(Delta("arguments", fragment, self._announced))

    # The end

    def _finish_message(self) -> None:
        """End the answer: an open call is dropped, blank content counts only without calls."""
        if self.state is State.DONE:
            return
        self.state, self._tag, self._call = State.DONE, None, None
        if self._held and not self._calls:
            self._content += self._held
            self._deltas.append(Delta("content", self._held))
        self._held = ""

    def _taken(self) -> list[Delta]:
        taken, self._deltas = self._deltas, []
        return taken
