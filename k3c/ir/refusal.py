"""Why a rule or a kernel template does not apply: a value, not an exception."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """A reason and the value that it is about, e.g. `Refusal("K is not a multiple of 32", 48)`."""

    reason: str
    value: object = None

    def __str__(self) -> str:
        """Return the reason with its value, as the pass table and errors print it."""
        return self.reason if self.value is None else f"{self.reason} ({self.value})"
