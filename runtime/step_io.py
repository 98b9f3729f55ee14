"""The io fields of one bucket, written whole before every step: nothing stale is replayed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy.typing as npt

from k3c.artifact import Plan
from k3c.errors import ArtifactError
from k3c.runtime.cache.state import State
from k3c.runtime.request import Request
from k3c.runtime.sampler import NEUTRAL, clear_sampling, fill_sampling
from k3c.runtime.scheduler import Step

SEGMENT_FIELDS = ("seg_tokens", "context")
# Only where the model has the layers: KDA keeps slots, MLA keeps pages.
STATE_FIELDS = (("state_slots", "slots"), ("kv_pages", "page_table"))
SAMPLE_FIELDS = ("sample_rows", *(name for name, _ in NEUTRAL), "tokens", "logits")
SCORE_FIELDS = ("targets", "logprobs")
ADVANCED_FIELDS = {"ids", "context", "position"}
NO_TARGET = -1  # a row whose log probability is not asked for


class StepIo:
    """Fills a bucket's input fields from a scheduled step."""

    def __init__(self, plan: Plan, fields: Mapping[str, npt.NDArray]) -> None:
        """Check that all fields are there; nothing is written before `fill`.

        Args:
            plan: The plan.
            fields: The host's side of the input fields, by name.

        Raises:
            ArtifactError: A field of the plan is missing.
        """
        self.fields = fields
        self.scores = plan.bucket.phase == "score"
        # What a step leaves on the device is the input of the next with the same rows.
        written = {name for cs in plan.commands.values() for c in cs for name in c.writes}
        self.advances = {f.name for f in plan.io if f.buffer in written} >= ADVANCED_FIELDS
        self._state = tuple(f for space, f in STATE_FIELDS if plan.space_bytes.get(space, 0) > 0)
        needed = ("ids", "seg_start", *SEGMENT_FIELDS, *self._state)
        needed += SCORE_FIELDS if self.scores else SAMPLE_FIELDS
        named = {field.name for field in plan.io}
        missing = [name for name in needed if name not in named]
        if missing:
            what = f"io fields {', '.join(missing)} are missing"
            raise ArtifactError(what, f"plan {plan.bucket.name}", "compile again")

    def fill(self, step: Step, state: State) -> None:
        """Write every row of every input field: the step's requests first, then neutral values.

        Args:
            step: The requests and how many tokens of each.
            state: Where their slots and pages are; not changed.
        """
        row = 0
        for segment, (request, tokens) in enumerate(step.chunks):
            self._fill_ids(row, request, tokens)
            self._fill_segment(segment, row, request, tokens, state)
            row += tokens
        self._clear(row, len(step.chunks))

    def _fill_ids(self, row: int, request: Request, tokens: int) -> None:
        """Write a chunk's token ids, and in a score step the tokens that follow them."""
        ids, first = self.fields["ids"], request.context_tokens
        if tokens == 1 and request.pending_tokens == 1 and request.output:
            ids[row] = request.output[-1]
            return
        ids[row : row + tokens] = request.tokens(first, first + tokens)
        if self.scores:
            following = request.prompt[first + 1 : first + tokens + 1]
            targets = self.fields["targets"]
            targets[row : row + len(following)] = following
            targets[row + len(following) : row + tokens] = NO_TARGET

    def _fill_segment(
        self, segment: int, row: int, request: Request, tokens: int, state: State
    ) -> None:
        io = self.fields
        io["seg_start"][segment] = row
        io["seg_tokens"][segment] = tokens
        io["context"][segment] = request.context_tokens
        if "slots" in self._state:
            io["slots"][segment] = state.slot(request.id)
        if "page_table" in self._state:
            io["page_table"][segment] = state.page_row(request.id)
        if not self.scores:
            io["sample_rows"][segment] = row + tokens - 1
            fill_sampling(io, segment, request, request.context_tokens + tokens)

    def _clear(self, row: int, segment: int) -> None:
        """Write neutral values past the live rows and segments: scratch slot and page, no rows."""
        io = self.fields
        io["ids"][row:] = 0
        # Not 0: the starts stay in ascending order.
        io["seg_start"][segment:] = row
        for name in (*SEGMENT_FIELDS, *self._state):
            io[name][segment:] = 0
        if self.scores:
            io["targets"][row:] = NO_TARGET
        else:
            io["sample_rows"][segment:] = 0
            clear_sampling(io, segment)
