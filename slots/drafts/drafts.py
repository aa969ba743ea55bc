"""Drafts of the next tokens, checked in the step that computes the last one (speculative decoding, without a draft model).

A decoding span is [last token, draft], with logits at each of its rows. The request's own sampler chooses at the first row,
and goes on to the next one as long as its choice is the drafted token: the answer is the sampler's, whatever was drafted.

    row       last token   draft 0   draft 1   draft 2   draft 3
    choice    = draft 0    = draft 1 another   -         -
    KV        kept         kept      kept      trimmed   trimmed
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from ..budget import AIM
from ..cells import Cells
from ..costs import Costs
from ..ledger import Ledger
from ..plan import Plan, Span, Trim
from ..request import Request
from .lookup import Draft
from .odds import Odds, expected
from .pace import Pace

ROWS = (4, 8, 16, 32, 64)  # of a stream, its last token among them
MARGIN = 1.05  # the gain from which a draft is worth it: estimates are only so good
FIRST_CREDIT, MOST_CREDIT = 8.0, 32.0  # steps without drafts
EARNED = 0.005  # credit of a step without drafts: the share of time that drafts may lose in the long run
NONE: Sequence[np.ndarray] = ()


class Drafts:
    """Decides which drafts a step checks. Only steps in which every running request decodes have any.

    Each stream must gain by the step in expectation, or none drafts. The time that drafts lose is paid from a credit, which
    their gains fill and every step without them a little: where nothing is ever accepted, they cost a half percent.

    max_rows: most rows of logits that a step can have; 0: no drafts. max_stall: most seconds that the drafts of a step with
    several streams may take; it aims at less, as prefill does. ends: tokens that end an answer, which are never drafted.
    """

    def __init__(self, costs: Costs, *, max_rows: int = 0, max_stall: float = math.inf, ends: Iterable[int] = ()) -> None:
        self._max_rows, self._max_stall = max_rows, max_stall
        self._ends = frozenset(ends)
        self._odds, self._pace = Odds(), Pace(costs)
        self._credit = FIRST_CREDIT
        self._matched: dict[int, int] = {}  # of the drafts of the last step, by request
        self._multiple = 1.0  # of the last step's time
        self._is_used = False  # the step only decodes, and a request of it may have drafts

    def propose(self, requests: Sequence[Request], running: Sequence[Request], cells: Cells) -> Sequence[np.ndarray]:
        """Return a draft (int32, maybe empty) for each of these requests, which decode; nothing where none pays."""
        lookups = [request.draft for request in requests if request.draft is not None]
        if len(requests) < len(running):
            lookups.clear()
        self._is_used = bool(lookups)
        if not lookups:
            return NONE
        most = min(min(self._max_rows, cells.num_free) // len(requests), ROWS[-1]) - 1
        found = [self._look_up(request, most) for request in requests] if most > 0 else []
        length = self._length(requests, found) if any(found) else 0
        if not length:
            for lookup in lookups:
                self._odds.forget(lookup)
            return NONE
        self._matched = {request.id: draft.matched for request, draft in zip(requests, found, strict=True) if draft}
        return [draft.tokens[:length] if draft else NO_DRAFT for draft in found]

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn from the time that a step took."""
        if self._is_used:
            depth = max(span.start for span in plan.spans)
            self._multiple = self._pace.observe(len(plan.spans), plan.num_tokens, depth=depth, seconds=seconds)
            if not plan.has_drafts:
                self._credit = min(self._credit + EARNED, MOST_CREDIT)

    def settle(self, checked: list[tuple[Request, Span]], ledger: Ledger) -> None:
        """Free the cells of rejected tokens, and learn. checked: the spans with drafts of the last step that ran.

        It begins a new step, which may do without `propose`.
        """
        self._is_used = False
        if not checked:
            return
        least = math.inf
        for request, span in checked:
            accepted = request.computed - span.start - 1
            least = min(least, accepted)
            if request.computed < span.stop:
                ledger.perform(Trim(span.sequence, request.computed, span.stop))
            if request.draft is not None:
                self._odds.learn(request.draft, self._matched[request.id], accepted, span.drafted)
        self._credit = min(self._credit + 1 + least - self._multiple, MOST_CREDIT)
        checked.clear()

    def _look_up(self, request: Request, most: int) -> Draft | None:
        if request.draft is None:
            return None
        room = len(request.tokens) - request.num_tokens - 1  # the last token of an answer is sampled behind a draft
        draft = request.draft.draft(request.tokens[: request.num_tokens], request.num_prompt, min(most, room))
        if draft is None:
            return None
        end = next((place for place, token in enumerate(draft.tokens.tolist()) if token in self._ends), len(draft.tokens))
        return Draft(draft.tokens[:end], draft.matched) if end else None

    def _length(self, requests: Sequence[Request], found: Sequence[Draft | None]) -> int:
        """Return the most tokens of a draft in this step: of the lengths that pay, the one that gains most; 0: none pays."""
        streams = len(requests)
        depth = max(request.num_tokens for request in requests)
        sizes = [len(draft.tokens) if draft else 0 for draft in found]
        best, best_gain = 0, MARGIN
        for length in (rows - 1 for rows in ROWS):
            cut = [min(size, length) for size in sizes]
            multiple = self._pace.multiple(streams, streams + sum(cut), depth)
            gain = (1 + min(map(self._expected, requests, found, cut))) / multiple
            if gain > best_gain and self._may_cost(multiple - 1, streams):
                best, best_gain = length, gain
            if length >= max(sizes):
                break
        return best

    def _expected(self, request: Request, draft: Draft | None, length: int) -> float:
        """Return how many of the first tokens of a draft are right on average."""
        return expected(self._odds.chance(request.draft, draft.matched), length) if draft and request.draft else 0.0

    def _may_cost(self, steps: float, streams: int) -> bool:
        """Return whether the time of so many steps may be lost, and other streams can wait for so long."""
        most = math.inf if streams == 1 else AIM * self._max_stall
        return steps <= self._credit and steps * self._pace.seconds(streams) <= most


NO_DRAFT = np.empty(0, np.int32)
