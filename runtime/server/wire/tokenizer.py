"""The tokenizer of the K3 family: a tiktoken ranks file and control tokens placed after the ranks.

Text never becomes a control token, whatever it spells: `encode` knows ranks only. Control ids come
from `special_ids` by name. Decoding is exact in bytes and keeps control tokens.

Source: Kimi K3 serving spec §1.1 (vocabulary, pre-tokenisation, long inputs).
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from k3c.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    import llguidance
    import tiktoken

RANKS_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
CONTROL_TOKENS = 256  # ids after the ranks; unnamed ones are reserved
MAX_PIECE_CHARS = 400_000  # longer texts are encoded in pieces
MAX_RUN_CHARS = 25_000  # longer runs without a border make BPE take quadratic time

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, encoding: tiktoken.Encoding, special_ids: dict[str, int]) -> None:
        """Wrap an encoding; `open` makes one from files."""
        self._encoding = encoding
        self.special_ids = special_ids
        self.vocab_size = encoding.n_vocab

    @classmethod
    def open(cls, folder: Path) -> Tokenizer:
        """Read `tiktoken.model` and `tokenizer_config.json`.

        Raises:
            ConfigError: A file is missing.
            ArtifactError: A file is damaged, or the two disagree.
        """
        # 0.1 s that loading an artifact does not need.
        import tiktoken

        ranks = _read_ranks(folder / RANKS_FILE)
        special_ids = _read_special_ids(folder / CONFIG_FILE, len(ranks))
        encoding = tiktoken.Encoding(
            folder.name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special_ids
        )
        return cls(encoding, special_ids)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; never a control id, and no start token."""
        ids: list[int] = []
        for piece in _pieces(text):
            ids.extend(self._encoding.encode_ordinary(piece))
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the exact bytes of token ids, control tokens spelled out.

        Raises:
            ConfigError: An id is outside the vocabulary.
        """
        return b"".join(self.token_bytes(token) for token in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD.

        Raises:
            ConfigError: An id is outside the vocabulary.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token.

        Raises:
            ConfigError: The id is outside the vocabulary.
        """
        if not 0 <= token < self.vocab_size:
            raise ConfigError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        return self._encoding.decode_single_token_bytes(token)

    def for_grammars(self, stop_id: int) -> llguidance.LLTokenizer:
        """Return the vocabulary as llguidance takes it; `stop_id` ends an answer."""
        from llguidance.tiktoken import lltokenizer_from_encoding

        return lltokenizer_from_encoding(self._encoding, n_vocab=self.vocab_size, eos_token=stop_id)

    def stream(self) -> StreamDecoder:
        """Return a decoder for one request's tokens as they come."""
        return StreamDecoder(self)


class StreamDecoder:
    """Decodes token by token; holds back the bytes of a character that is not complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start with no text."""
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Return the text that one more token completes; may be empty."""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """Return what was held back, as U+FFFD; call once, at the end."""
        return self._utf8.decode(b"", final=True)


def _pieces(text: str) -> Iterator[str]:
    """Cut a text so that no call of BPE takes more than bounded time."""
    for start in range(0, len(text), MAX_PIECE_CHARS):
        piece = text[start : start + MAX_PIECE_CHARS]
        # A run cannot be too long in a text that is not.
        yield from _cut_runs(piece) if len(piece) > MAX_RUN_CHARS else (piece,)


def _cut_runs(text: str) -> Iterator[str]:
    """Cut after every 25,000 characters of a run of whitespace or of anything else."""
    start, run, in_space = 0, 0, False
    for index, char in enumerate(text):
        if char.isspace() != in_space:
            run, in_space = 0, not in_space
        elif run == MAX_RUN_CHARS:
            yield text[start:index]
            start, run = index, 0
        run += 1
    yield text[start:]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        what = "the tokenizer lacks a file"
        raise ConfigError(what, str(path), "token ids still work") from None


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Read lines of `<base64 bytes> <rank>`; ranks count up from 0."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            piece = base64.b64decode(encoded, validate=True)
            found = int(rank)
        except (ValueError, binascii.Error):
            raise ArtifactError("not a line of base64 and rank", f"{path}:{number}") from None
        if found != len(ranks) or piece in ranks:
            raise ArtifactError(f"rank {found}, expected a new {len(ranks)}", f"{path}:{number}")
        ranks[piece] = found
    if len(ranks) < 256:
        raise ArtifactError(f"{len(ranks)} ranks, expected at least the 256 bytes", str(path))
    return ranks


def _read_special_ids(path: Path, num_ranks: int) -> dict[str, int]:
    """Return control token names and ids; ids that the file does not name are reserved ones."""
    ids = range(num_ranks, num_ranks + CONTROL_TOKENS)
    try:
        config = json.loads(_read(path))
        named = {int(i): str(t["content"]) for i, t in config["added_tokens_decoder"].items()}
        stated = config.get("num_base_tokens", num_ranks)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ArtifactError(f"no list of added tokens: {exc!r}", str(path)) from exc
    outside = sorted(named.keys() - set(ids))
    if outside or stated != num_ranks:
        raise ArtifactError(
            f"{num_ranks} ranks, but {stated} base tokens and control ids {outside[:3]} stated",
            str(path),
            f"both files must be of one model; control ids are {ids.start}..{ids.stop - 1}",
        )
    special = {named.get(i, f"<|reserved_token_{i}|>"): i for i in ids}
    if len(special) != CONTROL_TOKENS:
        raise ArtifactError("two control tokens have the same spelling", str(path))
    return special
