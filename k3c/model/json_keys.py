"""Typed reading of JSON objects: what is missing, mistyped or unknown is an error with its name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from k3c.errors import ConfigError


class Keys:
    """Reads typed keys of one JSON object and remembers which were read."""

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, dict):
            raise ConfigError(f"expected a JSON object, found {type(data).__name__}", where)
        self.data: dict[str, Any] = data
        self.where = where
        self.read: set[str] = set()

    def get(self, key: str) -> Any:
        """Return the value of a required key."""
        if key not in self.data:
            hint = "k3c has no defaults for keys that change the network; add it to config.json"
            raise ConfigError(f"missing key {key!r}", self.where, hint)
        self.read.add(key)
        return self.data[key]

    def wrong(self, key: str, expected: str) -> ConfigError:
        """Build the error for a value that is not what k3c needs."""
        found = json.dumps(self.data.get(key))
        return ConfigError(f"{key} is {found:.80}, expected {expected}", self.where)

    def integer(self, key: str, low: int = 1) -> int:
        """Return an integer of at least `low`."""
        value = self.get(key)
        if type(value) is not int or value < low:
            raise self.wrong(key, f"an integer >= {low}")
        return value

    def number(self, key: str) -> float:
        """Return a finite number as a float."""
        value = self.get(key)
        if type(value) not in (int, float) or not abs(value) < float("inf"):
            raise self.wrong(key, "a finite number")
        return float(value)

    def positive(self, key: str) -> float:
        """Return a finite number above zero."""
        value = self.number(key)
        if value <= 0:
            raise self.wrong(key, "a number > 0")
        return value

    def boolean(self, key: str) -> bool:
        """Return true or false."""
        value = self.get(key)
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def layers(self, key: str) -> tuple[int, ...]:
        """Return a 1-based list of layers as 0-based indices."""
        value = self.get(key)
        if not isinstance(value, list) or any(type(i) is not int for i in value):
            raise self.wrong(key, "a list of layer numbers that count from 1")
        return tuple(i - 1 for i in value)

    def fixed(self, expected: Mapping[str, object]) -> None:
        """Check keys of which k3c implements one value only."""
        for key, want in expected.items():
            found = self.get(key)
            if found != want or type(found) is not type(want):
                raise self.wrong(key, f"{json.dumps(want)}, the only value k3c implements")

    def reject_unknown(self, ignored: Iterable[str] = ()) -> None:
        """Raise for keys that were neither read nor are ignored on purpose."""
        unknown = sorted(set(self.data) - self.read - set(ignored))
        if unknown:
            hint = "k3c does not know what it changes in the network; remove it if nothing"
            raise ConfigError(f"unknown key {', '.join(map(repr, unknown))}", self.where, hint)


def read_json(file: Path) -> object:
    """Return the JSON value in `file`.

    Raises:
        ConfigError: The file is missing, unreadable or not JSON.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "pass a Hugging Face model directory, or its config.json"
        raise ConfigError("no such file", str(file), hint) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", str(file)) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}", str(file)) from None
