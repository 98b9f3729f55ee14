"""Masks of the tokens that an answer's grammar allows next, by llguidance.

Compiling a grammar takes milliseconds to seconds: `Grammars.compile` runs off the engine's thread,
and what was compiled is kept by its text. A mask is made between two steps.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from k3c.errors import ConfigError, DeviceFault
from k3c.runtime.server.wire.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

KEPT_GRAMMARS = 256


class Constraint:
    """One answer's grammar, and how far the answer is."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        """Start at the first token; `Grammars.compile` makes one."""
        self._matcher, self._vocab_size = matcher, vocab_size

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return bool[V]: which tokens may come next; the stop token where the answer may end."""
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(words, bitorder="little")[: self._vocab_size].astype(np.bool_)

    def accept(self, token: int) -> bool:
        """Go on by one token; False: the grammar does not allow it, and nothing changed."""
        return self._matcher.try_consume_tokens([token]) == 1

    @property
    def may_end(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()

    def fork(self) -> Constraint:
        """Return a copy that goes its own way, for drafts that may be taken back."""
        return Constraint(self._matcher.deep_copy(), self._vocab_size)


class Grammars:
    """Compiles grammars for one tokenizer; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, stop_id: int) -> None:
        """Prepare the vocabulary, which takes about a second for the full one.

        Args:
            tokenizer: The model's.
            stop_id: The token that ends an answer.

        Raises:
            DeviceFault: llguidance is not installed.
        """
        try:
            import llguidance
        except ModuleNotFoundError:
            hint = "pip install 'k3c-compiler[grammar]'"
            raise DeviceFault("structured output needs llguidance", "", hint) from None
        self._module, self._vocab_size = llguidance, tokenizer.vocab_size
        self._tokenizer = tokenizer.for_grammars(stop_id)
        self._kept: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = Lock()

    def compile(self, grammar: str) -> Constraint:
        """Return the constraint of a grammar, at its start.

        Raises:
            ConfigError: It does not compile: the request's schema is beyond the library.
        """
        key = hashlib.sha256(grammar.encode()).hexdigest()
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        if found is None:
            found = self._compiled(grammar)
            with self._lock:
                self._kept[key] = found
                while len(self._kept) > KEPT_GRAMMARS:
                    self._kept.popitem(last=False)
        return Constraint(found.deep_copy(), self._vocab_size)

    def _compiled(self, grammar: str) -> llguidance.LLMatcher:
        text = self._module.LLMatcher.grammar_from_lark(grammar)
        matcher = self._module.LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            what = matcher.get_error().splitlines()[0]
            hint = "simplify the schema of the tool or of the response format"
            raise ConfigError(f"the schema cannot be enforced: {what}", "tools", hint)
        return matcher
