"""Where a command's tokens come from: a user's JSON file, or the artifact's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from k3c.errors import ConfigError, ParseError

if TYPE_CHECKING:
    from k3c.runtime.engine import Engine
    from k3c.runtime.server.wire.tokenizer import Tokenizer


def open_tokenizer(engine: Engine) -> Tokenizer | None:
    """Return the tokenizer that the engine's artifact carries, or None where the model has none."""
    if not engine.manifest.model.has_tokenizer:
        return None
    from k3c.runtime.server.wire.tokenizer import Tokenizer

    return Tokenizer.open(engine.directory / "tokenizer")


def read_token_lists(path: Path) -> list[list[int]]:
    """Return the lists of token ids in a JSON file.

    Args:
        path: The file.

    Raises:
        ConfigError: The file does not exist or holds no list.
        ParseError: It is not JSON, or an entry is not a list of integers.
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
