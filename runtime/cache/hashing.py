"""Chain hashes of a request's tokens: what a piece of state is the state of.

The hash of a unit covers every token up to its end, so equal hashes mean equal histories. sha256:
no two prompts that anyone finds share one, and it is the same in every process.

Source: Kimi K3 serving spec §4.2 (match unit, hash).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


class HashChain:
    """The hashes of a request's whole units, extended as its tokens come."""

    def __init__(self, unit_tokens: int, salt: bytes = b"") -> None:
        """Start with no unit.

        Args:
            unit_tokens: Tokens of a unit.
            salt: Keeps requests apart that must not share state, though their tokens are equal.
        """
        self._unit_tokens = unit_tokens
        self._last = hashlib.sha256(b"k3c prefix" + salt).digest()
        self.hashes: list[bytes] = []

    @property
    def tokens(self) -> int:
        """Tokens that are hashed."""
        return len(self.hashes) * self._unit_tokens

    def extend(self, tokens: npt.NDArray[np.int32]) -> None:
        """Hash whole units of the tokens that follow those hashed before; the rest waits.

        Args:
            tokens: i32[n], from `self.tokens` on.
        """
        size = self._unit_tokens
        for start in range(0, len(tokens) - size + 1, size):
            unit = np.ascontiguousarray(tokens[start : start + size], "<i4").tobytes()
            self._last = hashlib.sha256(self._last + unit).digest()
            self.hashes.append(self._last)
