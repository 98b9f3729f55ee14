"""Whether the model thinks, and how much: from a request's fields.

Source: Kimi K3 serving spec §1.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k3c.errors import ConfigError

EFFORTS = ("low", "high", "max")
_GUIDE = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the"
    " response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)


@dataclass(frozen=True)
class Thinking:
    """How a request thinks; `effort` None: the model is not told."""

    on: bool
    effort: str | None

    @property
    def note(self) -> str:
        """The text that tells the model; empty where it is told nothing."""
        return _GUIDE.format(self.effort) if self.on and self.effort is not None else ""


def thinking_of(request: Mapping[str, Any]) -> Thinking:
    """Return how a request thinks.

    Raises:
        ConfigError: The effort is none that the model knows.
    """
    options = request.get("chat_template_kwargs") or {}
    asked = request.get("reasoning_effort")
    switch = options.get("thinking")
    if switch is None:
        switch = options.get("enable_thinking")
    if switch is None:
        chosen = options.get("reasoning_effort")
        switch = (asked if chosen is None else chosen) != "none"
    if "thinking_effort" in options:
        effort = options["thinking_effort"]
    else:
        effort = asked if asked is not None and asked != "none" else "max"
    if effort is not None and effort not in EFFORTS:
        hint = f"one of {', '.join(EFFORTS)}"
        raise ConfigError(f"found {effort!r}", "reasoning_effort", hint)
    return Thinking(bool(switch), effort)
