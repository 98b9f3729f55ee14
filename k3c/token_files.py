"""Read a user's file of prompts: a JSON list of lists of token ids."""

from __future__ import annotations

import json
from pathlib import Path

from k3c.errors import ConfigError, ParseError


def read_token_lists(path: Path) -> list[list[int]]:
    """Return the lists of token ids in a JSON file.

    Args:
        path: The file.

    Raises:
        ConfigError: The file does not exist.
        ParseError: It is not JSON, holds no list, or an entry is not a list of integers.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ConfigError("no such file", str(path), "give a JSON list of token id lists") from exc
    except (ValueError, RecursionError) as exc:
        raise ParseError(f"not JSON: {exc}", str(path), "give [[1, 2, 3], [4, 5]]") from exc
    if not isinstance(raw, list) or not raw:
        raise ParseError("found no list of token id lists", str(path), "give [[1, 2, 3], [4, 5]]")
    for index, tokens in enumerate(raw):
        if not isinstance(tokens, list) or any(type(t) is not int for t in tokens):
            raise ParseError("not a list of integers", f"{path}, entry {index}", "give token ids")
    return raw
