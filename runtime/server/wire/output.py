"""What an answer consists of, whole and as pieces of a stream.

Source: Kimi K3 serving spec §2.2 (results), §2.3 (streaming).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls", "error"]


@dataclass(frozen=True)
class ToolCall:
    """A complete call. `arguments` is a JSON text, or what the model wrote where it is none."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """A whole answer; None: there is none of it."""

    reasoning: str | None
    content: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason


@dataclass(frozen=True)
class Delta:
    """A piece of a stream: its text is added to what came before; none is ever taken back.

    Attributes:
        kind: `call` starts a call: `text` is the tool's name. `arguments` goes on with it.
        text: The piece.
        call: The call's number, counted from 0, for `call` and `arguments`.
    """

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    call: int = -1
