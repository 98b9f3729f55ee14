"""Feeds the parser: from token ids, as the engine makes them, or from text, as a proxy sees it.

Source: Kimi K3 serving spec §2.2, §2.3 (held back texts), §1.10 (reasoning tokens).
"""

from __future__ import annotations

from collections.abc import Iterable

from k3c.runtime.server.wire.output import Answer, Delta, FinishReason
from k3c.runtime.server.wire.parser import OutputParser, ParserOptions, State
from k3c.runtime.server.wire.segments import MARKERS
from k3c.runtime.server.wire.tokenizer import Tokenizer


class TokenStream:
    """Reads an answer from token ids.

    Attributes:
        reasoning_tokens: Tokens in the think channel, those of tags left out.
    """

    def __init__(self, tokenizer: Tokenizer, options: ParserOptions) -> None:
        """Start with no token."""
        self.reasoning_tokens = 0
        self._names = {token: name for name, token in tokenizer.special_ids.items()}
        self._decoder, self._tokenizer = tokenizer.stream(), tokenizer
        self._parser = OutputParser(options)

    @property
    def state(self) -> State:
        """Where the answer stands."""
        return self._parser.state

    def push(self, ids: Iterable[int]) -> list[Delta]:
        """Read tokens; any split of them into calls gives the same answer.

        Raises:
            ConfigError: An id is outside the vocabulary.
        """
        found: list[Delta] = []
        for token in ids:
            name = self._names.get(token)
            if name is None:
                thinks = self._parser.state is State.THINK and not self._parser.in_tag
                self.reasoning_tokens += thinks
                found += self._parser.push_text(self._decoder.push(token))
            else:
                found += self._parser.push_text(self._flushed())
                found += self._parser.push_control(name)
        return joined(found)

    def finish(self) -> list[Delta]:
        """Return what was held back, at the end."""
        return joined([*self._parser.push_text(self._flushed()), *self._parser.finish()])

    def answer(self, finish_reason: FinishReason) -> Answer:
        """Return the whole answer, after `finish`."""
        return self._parser.answer(finish_reason)

    def _flushed(self) -> str:
        """End the text before a control token: bytes of half a character stay half."""
        text = self._decoder.finish()
        self._decoder = self._tokenizer.stream()
        return text


class TextStream:
    """Reads an answer from text in which control tokens are spelled out.

    What may be the start of a marker is held back until it is one or is not.
    """

    def __init__(self, options: ParserOptions) -> None:
        """Start with no text."""
        self._parser = OutputParser(options)
        self._rest = ""

    def push(self, text: str) -> list[Delta]:
        """Read a piece of text."""
        self._rest += text
        found: list[Delta] = []
        while self._rest:
            at, marker = _first_marker(self._rest)
            if marker:
                found += self._parser.push_text(self._rest[:at])
                found += self._parser.push_control(marker)
                self._rest = self._rest[at + len(marker) :]
                continue
            found += self._parser.push_text(self._rest[:at])
            self._rest = self._rest[at:]
            break
        return joined(found)

    def finish(self) -> list[Delta]:
        """Return what was held back, at the end."""
        text, self._rest = self._rest, ""
        return joined([*self._parser.push_text(text), *self._parser.finish()])

    def answer(self, finish_reason: FinishReason) -> Answer:
        """Return the whole answer, after `finish`."""
        return self._parser.answer(finish_reason)


def _first_marker(text: str) -> tuple[int, str]:
    """Return where the first marker starts, and it; or where one may start at the end, and ""."""
    places = [(text.find(marker), marker) for marker in MARKERS if marker in text]
    if places:
        return min(places)
    longest = max(map(len, MARKERS)) - 1
    for at in range(max(0, len(text) - longest), len(text)):
        if any(marker.startswith(text[at:]) for marker in MARKERS):
            return at, ""
    return len(text), ""


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Join neighbours that say the same kind of thing; empty ones go."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if last and delta.kind != "call" and (last.kind, last.call) == (delta.kind, delta.call):
            found[-1] = Delta(delta.kind, last.text + delta.text, delta.call)
        elif delta.text or delta.kind == "call":
            found.append(delta)
    return found
