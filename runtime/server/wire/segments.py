"""A prompt as segments: control tokens, texts that are encoded each on its own, image blocks.

Never one string: joining texts would change their tokens, and a user's text that spells a control
token would become one.

Source: Kimi K3 serving spec §1.2 (segments), §1.3 (tags).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MEDIA_BEGIN, MEDIA_CONTENT = "<|media_begin|>", "<|media_content|>"
MEDIA_PAD, MEDIA_END = "<|media_pad|>", "<|media_end|>"
MARKERS = (OPEN, CLOSE, SEP, END)
_MEDIA = re.compile("|".join(map(re.escape, (MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_PAD, MEDIA_END))))


@dataclass(frozen=True)
class Segment:
    """A part of a prompt.

    Attributes:
        kind: `control`: exactly one control token; `text`: ordinary text; `image`: a block in which
            the media spellings are control tokens.
        text: Its spelling.
    """

    kind: Literal["control", "text", "image"]
    text: str


class Encoder(Protocol):
    """What encoding needs of a tokenizer."""

    special_ids: dict[str, int]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; never a control token's."""
        ...


def texts(*parts: str) -> list[Segment]:
    """Return a text segment for each part that is not empty."""
    return [Segment("text", part) for part in parts if part]


def open_tag(name: str, attributes: Mapping[str, str] | None = None) -> list[Segment]:
    """Return an opening tag; attributes in the order given, their values escaped."""
    found = [Segment("control", OPEN), *texts(name)]
    for key, value in (attributes or {}).items():
        found += texts(f" {key}", '="', escape(value), '"')
    return [*found, Segment("control", SEP)]


def close_tag(name: str) -> list[Segment]:
    """Return a closing tag."""
    return [Segment("control", CLOSE), *texts(name), Segment("control", SEP)]


def element(
    name: str, body: Iterable[Segment], attributes: Mapping[str, str] | None = None
) -> list[Segment]:
    """Return a body between its tags."""
    return [*open_tag(name, attributes), *body, *close_tag(name)]


def message(attributes: Mapping[str, str], body: Iterable[Segment]) -> list[Segment]:
    """Return a whole message with its end token."""
    return [*element("message", body, attributes), Segment("control", END)]


def escape(value: str) -> str:
    """Return an attribute's value as it is written: only ampersands and double quotes change."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """Return the value that `escape` wrote."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


def encode(segments: Iterable[Segment], tokenizer: Encoder) -> list[int]:
    """Return the ids of a prompt: of each segment on its own, one after another.

    Raises:
        KeyError: The tokenizer lacks a control token of this format.
    """
    ids: list[int] = []
    for segment in segments:
        if segment.kind == "control":
            ids.append(tokenizer.special_ids[segment.text])
        elif segment.kind == "text":
            ids += tokenizer.encode(segment.text)
        else:
            for piece in _media_pieces(segment.text):
                control = tokenizer.special_ids.get(piece) if piece.startswith("<|") else None
                ids += tokenizer.encode(piece) if control is None else [control]
    return ids


def _media_pieces(block: str) -> Iterator[str]:
    """Cut an image block into its control spellings and what stands between them."""
    end = 0
    for match in _MEDIA.finditer(block):
        if match.start() > end:
            yield block[end : match.start()]
        yield match.group()
        end = match.end()
    if end < len(block):
        yield block[end:]
