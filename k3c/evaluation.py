"""`k3c eval`: mean negative log likelihood of given tokens, in nats."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import k3c
from k3c.errors import ConfigError, DeviceFault, ParseError
from k3c.token_files import read_token_lists

if TYPE_CHECKING:
    from k3c.runtime.engine import Engine


def evaluate(artifact: Path, text: Path | None, tokens: Path | None, as_json: bool) -> None:
    """Score a text or lists of tokens and print `{"tokens", "mean_nll"}`.

    Args:
        artifact: The artifact directory.
        text: A UTF-8 file, scored as one list of tokens.
        tokens: A JSON file of token id lists; each list is scored on its own.
        as_json: Print JSON instead of a sentence.

    Raises:
        ConfigError: Not exactly one source, or a list is too short or too long.
        ParseError: The text is not UTF-8, or the file holds no lists of ids.
        DeviceFault: A log probability is not finite.
    """
    if (text is None) == (tokens is None):
        raise ConfigError("give exactly one of --text and --tokens", "k3c eval")
    engine = k3c.load(artifact)
    lists = read_token_lists(tokens) if tokens is not None else [_encode(engine, text)]
    logprobs = [float(v) for row in engine.score(lists) for v in row]
    if not logprobs:
        raise ConfigError("nothing to predict: every list has fewer than 2 tokens", "k3c eval")
    mean_nll = -math.fsum(logprobs) / len(logprobs)
    if not math.isfinite(mean_nll):
        raise DeviceFault("the model gave log probabilities that are not finite", str(artifact))
    if as_json:
        print(json.dumps({"tokens": len(logprobs), "mean_nll": mean_nll}))
    else:
        print(f"{len(logprobs)} tokens, mean negative log likelihood {mean_nll:.6f} nats")


def _encode(engine: Engine, text: Path | None) -> list[int]:
    if engine.tokenizer is None:
        raise ConfigError("the artifact has no tokenizer", "--text", "give ids with --tokens")
    assert text is not None, "exactly one source is given"
    try:
        return engine.tokenizer.encode(text.read_text(encoding="utf-8"))
    except UnicodeDecodeError as exc:
        what = f"not UTF-8: byte {exc.start} is {exc.object[exc.start]:#x}"
        raise ParseError(what, str(text), "give a UTF-8 text") from exc
