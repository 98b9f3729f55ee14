"""A chat request as the prompt that the model was trained on.

Source: Kimi K3 serving spec §1.4 (order), §1.7 (messages), §1.8 (notes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3c.errors import ConfigError
from k3c.runtime.server.wire.arguments import argument_segments
from k3c.runtime.server.wire.images import image_block
from k3c.runtime.server.wire.segments import Segment, element, message, open_tag, texts
from k3c.runtime.server.wire.thinking import Thinking, thinking_of
from k3c.runtime.server.wire.tools import (
    TOOL_ROLES,
    Calls,
    declaration,
    fenced,
    name_of,
    results_of,
)

STUB_TOKENS = 3  # <|open|> think <|sep|>: fed to the model, not billed
TEXT_PARTS = ("text", "input_text")
IMAGE_PARTS = ("image", "image_url", "input_image")
_RAW = (
    "The system is invoked with `response_format={}`.\nYour response must be raw JSON data without"
    " markdown code blocks (```json) or any additional formatting."
)
_CHOICES = {
    "required": "The system is invoked with `tool_choice=required`.\n"
    "You MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message.",
}

Message = Mapping[str, Any]
PixelSize = Callable[[Message], tuple[int, int]]


@dataclass(frozen=True)
class Prompt:
    """A rendered request.

    Attributes:
        segments: The prompt, in order.
        images: The image parts, in the order of their blocks.
        thinking: Whether the answer starts in the think channel.
        tool_names: Tools that are declared, also those of later system messages.
        calls_before: Tool calls in the history.
    """

    segments: tuple[Segment, ...]
    images: tuple[Message, ...]
    thinking: bool
    tool_names: tuple[str, ...]
    calls_before: int

    @property
    def text(self) -> str:
        """The prompt's spelling, to read; never to encode."""
        return "".join(segment.text for segment in self.segments)


def no_images(part: Message) -> tuple[int, int]:
    """Refuse an image: the served model has no vision tower.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError("this model reads no images", f"content part {part.get('type')!r}")


def render(request: Mapping[str, Any], pixel_size: PixelSize = no_images) -> Prompt:
    """Render a chat request in the form of OpenAI's.

    Args:
        request: `messages`, and where they are there `tools`, `tool_choice`, `response_format`,
            `reasoning_effort`, `chat_template_kwargs`, `add_generation_prompt`,
            `continue_final_message`.
        pixel_size: Gives the original width and height of an image part.

    Raises:
        ConfigError: A field is wrong; `where` names it.
    """
    return _Renderer(request, pixel_size).run()


@dataclass
class _Renderer:
    """Renders one request."""

    request: Mapping[str, Any]
    pixel_size: PixelSize
    images: list[Message] = field(default_factory=list[Message])
    tool_names: list[str] = field(default_factory=list[str])
    calls: Calls = field(default_factory=Calls)
    calls_before: int = 0

    def run(self) -> Prompt:
        thinking = thinking_of(self.request)
        messages = self._messages()
        prefix, stub = self._prefix(messages)
        found = self._declared(self.request.get("tools") or (), "tools")
        found += _note("thinking-effort", thinking.note)
        found += [
            s for part in self._history(messages[: len(messages) - prefix], thinking) for s in part
        ]
        found += self._notes()
        if stub:
            found += open_tag("message", {"role": "assistant"})
            found += open_tag("think" if thinking.on else "response")
        if prefix:
            found += self._content(messages[-1].get("content"), f"messages[{len(messages) - 1}]")
        names = tuple(dict.fromkeys(self.tool_names))
        return Prompt(tuple(found), tuple(self.images), thinking.on, names, self.calls_before)

    def _messages(self) -> Sequence[Message]:
        messages = self.request.get("messages")
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise ConfigError("expected a list of at least one message", "messages")
        for index, item in enumerate(messages):
            if not isinstance(item, Mapping):
                raise ConfigError("a message must be an object", f"messages[{index}]")
        return messages

    def _prefix(self, messages: Sequence[Message]) -> tuple[int, bool]:
        """Return how many last messages are continued, none or one, and whether to add the stub."""
        stub = self.request.get("add_generation_prompt")
        if not self.request.get("continue_final_message"):
            return 0, stub is None or bool(stub)
        if stub:
            hint = "set one of the two"
            raise ConfigError("add_generation_prompt is set too", "continue_final_message", hint)
        if messages[-1].get("role") != "assistant":
            what = f"the last message is of {messages[-1].get('role')!r}, not of the assistant"
            raise ConfigError(what, "continue_final_message")
        return 1, True

    def _declared(self, tools: Any, where: str, extended: bool = False) -> list[Segment]:
        if not isinstance(tools, Sequence) or isinstance(tools, str):
            raise ConfigError("expected a list of tools", where)
        if not tools:
            return []
        self.tool_names += [name_of(tool, f"{where}[{i}]") for i, tool in enumerate(tools)]
        return _note("tool-declare", declaration(tools, where, extended))

    def _history(self, messages: Sequence[Message], thinking: Thinking) -> Iterator[list[Segment]]:
        at = 0
        while at < len(messages):
            where, item = f"messages[{at}]", messages[at]
            role = item.get("role")
            if role in TOOL_ROLES:
                run = _run_of_results(messages, at)
                yield from self._results(run)
                at += len(run)
                continue
            if role == "assistant":
                yield self._assistant(item, where, thinking)
            elif role in ("system", "developer") and item.get("tools"):
                yield self._declared(item["tools"], f"{where}.tools", extended=True)
            elif role in ("user", "system", "developer"):
                yield message(_sender(item), self._content(item.get("content"), where))
            else:
                hint = "user, system, developer, assistant or tool"
                raise ConfigError(f"found {role!r}", f"{where}.role", hint)
            at += 1

    def _results(self, run: Sequence[tuple[str, Message]]) -> Iterator[list[Segment]]:
        for result in results_of(run, self.calls):
            attributes = {"role": "tool", "tool": result.tool, "index": str(result.index)}
            yield message(attributes, self._content(result.message.get("content"), result.where))

    def _assistant(self, item: Message, where: str, thinking: Thinking) -> list[Segment]:
        body: list[Segment] = []
        if thinking.on:
            body += element("think", texts(_reasoning(item)))
        body += element("response", self._content(item.get("content"), where))
        calls = item.get("tool_calls") or ()
        self.calls = Calls()
        made = [self._call(call, i, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
        if made:
            body += element("tools", [segment for call in made for segment in call])
        return message({"role": "assistant"}, body)

    def _call(self, call: Any, index: int, where: str) -> list[Segment]:
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise ConfigError("a call without a function's name", where)
        self.calls.ids.append((str(call.get("id")), name))
        self.calls_before += 1
        attributes = {"tool": name, "index": str(index + 1)}
        return element("call", argument_segments(function.get("arguments")), attributes)

    def _content(self, content: Any, where: str) -> list[Segment]:
        """Return the parts of a message one after another, without anything between them."""
        if content is None:
            return []
        if isinstance(content, str):
            return texts(content)
        if not isinstance(content, Sequence):
            raise ConfigError("expected a text or a list of parts", f"{where}.content")
        found: list[Segment] = []
        for index, part in enumerate(content):
            found += self._part(part, f"{where}.content[{index}]")
        return found

    def _part(self, part: Any, where: str) -> list[Segment]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            return texts(part)
        if kind in TEXT_PARTS and isinstance(part.get("text"), str):
            return texts(part["text"])
        if kind in IMAGE_PARTS:
            self.images.append(part)
            return [image_block(*self.pixel_size(part))]
        hint = f"one of {', '.join((*TEXT_PARTS, *IMAGE_PARTS))}"
        raise ConfigError(f"found a part of type {kind!r}", where, hint)

    def _notes(self) -> list[Segment]:
        choice, wanted = self.request.get("tool_choice"), self.request.get("response_format") or {}
        found: list[Segment] = []
        if isinstance(choice, str) and choice not in ("auto", *_CHOICES):
            raise ConfigError(
                f"found {choice!r}", "tool_choice", "auto, none, required or a function"
            )
        if isinstance(choice, str) and (choice == "required" or self.tool_names):
            found += _note("tool-choice", _CHOICES.get(choice, ""))
        kind = wanted.get("type") if isinstance(wanted, Mapping) else None
        if kind in ("json_object", "json_schema"):
            found += _note("response-format", _RAW.format(kind) + _schema(wanted))
        elif kind not in (None, "text"):
            hint = "text, json_object or json_schema"
            raise ConfigError(f"found {kind!r}", "response_format.type", hint)
        return found


def _note(kind: str, text: str) -> list[Segment]:
    return message({"role": "system", "type": kind}, texts(text)) if text else []


def _schema(wanted: Mapping[str, Any]) -> str:
    if wanted["type"] == "json_object":
        return ""
    outer = wanted.get("json_schema")
    schema = outer.get("schema") if isinstance(outer, Mapping) else None
    if not isinstance(schema, Mapping | bool):
        raise ConfigError("no schema", "response_format.json_schema.schema")
    return f"\nThe JSON data must match the following schema:\n{fenced(schema)}"


def _sender(item: Message) -> dict[str, str]:
    role = "user" if item["role"] == "user" else "system"
    name = item.get("name")
    return {"role": role, "name": name} if isinstance(name, str) and name else {"role": role}


def _reasoning(item: Message) -> str:
    """Return the thoughts of an earlier turn; blank ones are none."""
    for key in ("reasoning_content", "reasoning"):
        text = item.get(key)
        if isinstance(text, str):
            return text if text.strip() else ""
    return ""


def _run_of_results(messages: Sequence[Message], start: int) -> list[tuple[str, Message]]:
    run: list[tuple[str, Message]] = []
    for index in range(start, len(messages)):
        if messages[index].get("role") not in TOOL_ROLES:
            break
        run.append((f"messages[{index}]", messages[index]))
    return run
