"""A cursor over IR text, and errors that show the line with a caret."""

from __future__ import annotations

import re

from k3c.errors import ParseError

_SPACE = re.compile(r"(?:\s+|#[^\n]*)*")


def snippet(line: str, column: int, length: int = 1) -> str:
    """Return a line of text with carets under `length` columns from the 0-based `column`."""
    return f"\n    {line}\n    {' ' * column}{'^' * max(1, length)}"


class Scanner:
    """Takes words off the front of a text; white space and comments between them do not count.

    Args:
        text: The whole text.
        where: Name of the text for messages; may be empty.
    """

    def __init__(self, text: str, where: str = "") -> None:
        """Start at the first word."""
        self.text, self.where, self.at = text, where, 0
        self.end = 0  # of the word taken last
        self._skip()

    def _skip(self) -> None:
        self.end = self.at
        found = _SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def peek(self, literal: str) -> bool:
        """Whether `literal` comes next."""
        return self.text.startswith(literal, self.at)

    def done(self) -> bool:
        """Whether the text is at its end."""
        return self.at == len(self.text)

    def accept(self, literal: str) -> bool:
        """Take `literal` if it comes next."""
        if not self.peek(literal):
            return False
        self.at += len(literal)
        self._skip()
        return True

    def expect(self, literal: str, hint: str = "") -> None:
        """Take `literal`; anything else is an error."""
        if not self.accept(literal):
            raise self.error(f"{literal!r}", hint)

    def take(self, pattern: re.Pattern[str], expected: str, hint: str = "") -> str:
        """Take what `pattern` matches; `expected` names it for the error."""
        found = pattern.match(self.text, self.at)
        if found is None or not found.group():
            raise self.error(expected, hint)
        self.at = found.end()
        self._skip()
        return found.group()

    def comment(self) -> str:
        """Return the comment behind the word taken last, on its line; empty without one."""
        line, _, _ = self.text[self.end :].partition("\n")
        return line.partition("#")[2].strip()

    def line(self, at: int | None = None) -> int:
        """Return the 1-based line of a position, or of the next word."""
        return self.text.count("\n", 0, self.at if at is None else at) + 1

    def error(self, expected: str, hint: str = "", at: int | None = None) -> ParseError:
        """Return an error at a position, or at the next word."""
        at = self.at if at is None else at
        found = _word(self.text, at)
        return self.complaint(f"found {found}, expected {expected}", hint, at)

    def complaint(self, what: str, hint: str, at: int) -> ParseError:
        """Return an error that shows the line of position `at`."""
        start = self.text.rfind("\n", 0, at) + 1
        end = self.text.find("\n", at)
        line = self.text[start : end if end >= 0 else len(self.text)]
        name = f"{self.where}, " if self.where else ""
        hint = hint or "k3c/ir/parser.py has the grammar"
        return ParseError(what, f"{name}line {self.line(at)}", hint + snippet(line, at - start))


def _word(text: str, at: int) -> str:
    if at >= len(text):
        return "the end of the text"
    found = re.compile(r"[\w.]+|\S").match(text, at)
    return repr(found.group()) if found else "the end of the line"
