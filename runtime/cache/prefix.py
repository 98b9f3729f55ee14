"""The prefix cache: what a request takes over from earlier ones, and what it leaves for later ones.

Pages are left as they fill. A snapshot of the KDA state is a copy of a whole slot, so it is left at
planned positions only: at the last one of a prompt that the same prompt could start from, where a
prompt leaves a chain that is there (a junction), where the caller says, and every so many tokens.
Another prompt with the same beginning therefore starts from it the second time it is seen.

Source: Kimi K3 serving spec §4.3 (exact multiples), §4.4 (retention), §4.5 (where chunks end).
"""

from __future__ import annotations

from dataclasses import dataclass

from k3c.errors import ConfigError
from k3c.runtime.cache.hashing import HashChain
from k3c.runtime.cache.state import Match, State
from k3c.runtime.request import Request


@dataclass(frozen=True)
class PrefixOptions:
    """How much is kept.

    Attributes:
        on: Use and keep anything at all.
        unit_tokens: Tokens of a match unit, the steps in which prompts can share; they divide a
            page's. 0: half a page.
        snapshot_every: Keep a snapshot every so many tokens of a prompt too; 0: not.
        least_tokens: Keep none at a position before this one: a short prompt is computed again
            sooner than its state is copied, and a planned position costs a step.
    """

    on: bool = True
    unit_tokens: int = 0
    snapshot_every: int = 0
    least_tokens: int = 64

    def unit(self, page_tokens: int) -> int:
        """Return the tokens of a match unit for pages of a size.

        Raises:
            ConfigError: They do not divide a page's.
        """
        if not self.unit_tokens:
            return max(1, page_tokens // 2)
        if self.unit_tokens < 0 or page_tokens % self.unit_tokens:
            what = f"a match unit of {self.unit_tokens} tokens in pages of {page_tokens}"
            raise ConfigError(what, "unit_tokens", "take a divisor of the page")
        return self.unit_tokens


class PrefixCache:
    """Starts requests with what is there, and keeps what they write.

    Attributes:
        queried_tokens: Prompt tokens of all requests that were started.
        hit_tokens: Those that did not go through the model.
        snapshots_kept: Snapshots that were taken.
        snapshots_missed: Planned ones for which no slot was free.
    """

    def __init__(self, state: State, options: PrefixOptions) -> None:
        """Keep nothing yet."""
        self._state, self._options = state, options
        self._unit_tokens = options.unit(state.page_tokens)
        self.queried_tokens = self.hit_tokens = 0
        self.snapshots_kept = self.snapshots_missed = 0

    def fits(self, request: Request, spare_pages: int) -> bool:
        """Whether a request can start now, and leave some pages free; changes no state."""
        match, hashes = self._match(request)
        tokens = request.total_tokens + spare_pages * self._page_tokens
        return self._state.fits(tokens, match, hashes)

    def start(self, request: Request) -> None:
        """Give a request its slot and pages, and what is there of its tokens.

        Raises:
            CapacityError: They are not free; nothing has changed then.
        """
        match, hashes = self._match(request)
        self._state.alloc(request.id, request.total_tokens, match, hashes)
        request.context_tokens = match.tokens
        request.stops = self._stops(request, match)
        if request.cached_tokens is None:
            request.cached_tokens = match.tokens
            self.queried_tokens += len(request.prompt)
            self.hit_tokens += match.tokens

    def fills_unit(self, request: Request) -> bool:
        """Whether a request has just come to the end of a unit: else `written` has nothing to do.

        It says nothing of chunks of several tokens.
        """
        return request.context_tokens % self._unit_tokens == 0

    def written(self, request: Request) -> None:
        """Keep what a step has just written of a request; a planned snapshot is taken here."""
        chain, context = request.chain, request.context_tokens
        if chain is None:
            return
        unit = self._unit_tokens
        if context - chain.tokens >= unit:
            chain.extend(request.tokens(chain.tokens, context))
        self._state.publish(request.id, chain.hashes, context)
        if context in request.stops and context % unit == 0:
            kept = self._state.snapshot(request.id, chain.hashes[context // unit - 1])
            self.snapshots_kept += kept
            self.snapshots_missed += not kept

    @property
    def _page_tokens(self) -> int:
        return self._state.page_tokens

    def _match(self, request: Request) -> tuple[Match, list[bytes]]:
        if not self._options.on:
            return Match(), []
        if request.chain is None:
            request.chain = HashChain(self._unit_tokens, request.options.salt)
        chain = request.chain
        chain.extend(request.tokens(chain.tokens, request.total_tokens))
        # At least one token must go through the model: its logits give the next one.
        return self._state.match(chain.hashes, request.total_tokens - 1), chain.hashes

    def _stops(self, request: Request, match: Match) -> tuple[int, ...]:
        """Return where snapshots are planned, beyond what is there."""
        if not self._options.on:
            return ()
        unit, total = self._unit_tokens, request.total_tokens
        wanted = {(total - 1) // unit * unit, match.junction}
        wanted |= {place // unit * unit for place in request.options.breakpoints}
        every = self._options.snapshot_every
        if every:
            wanted |= {place // unit * unit for place in range(every, total, every)}
        first = max(match.tokens + 1, self._options.least_tokens)
        return tuple(sorted(place for place in wanted if first <= place < total))
