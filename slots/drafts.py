"""The drafts of a step: how many tokens pay, and which were accepted.

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

from .cells import Cells
from .costs import AIM, Costs
from .device import DeviceCells
from .lookup import Draft, Lookup
from .plan import Plan, Span, Trim
from .request import Job

# ---- The chance that a drafted token is the next one, learnt from the drafts that were checked. -------------------------

FIRST = (0.5, 0.5, 0.5, 0.6, 0.75, 0.85, 0.9)  # before any draft, by the bits of the matched length: a guess
FIRST_WEIGHT = 16.0  # tokens that the guess counts as
OWN_WEIGHT = 8.0  # tokens of all requests that count as much as the request's own
FADING = 0.98  # of what was learnt, at each draft
OWN_FADING = 0.5  # of a request's own, likewise
FORGETTING = 0.97  # of a request's own, at each step without a draft: one whose drafts were wrong has another try later


class Odds:
    """Chances by the matched length, of all requests; a request's own drafts change them for it."""

    def __init__(self) -> None:
        self._tried = [FIRST_WEIGHT] * len(FIRST)
        self._right = [FIRST_WEIGHT * chance for chance in FIRST]

    def chance(self, lookup: Lookup, matched: int) -> float:
        """Return the chance of a token if all in front of it in the draft are right."""
        place = _place(matched)
        general = self._right[place] / self._tried[place]
        return (OWN_WEIGHT * general + lookup.right) / (OWN_WEIGHT + lookup.tried)

    def learn(self, lookup: Lookup, matched: int, right: int, drafted: int) -> None:
        """Learn from a checked draft: nothing is known of its tokens behind the first wrong one."""
        place, tried = _place(matched), right + (right < drafted)
        self._tried[place] = FADING * self._tried[place] + tried
        self._right[place] = FADING * self._right[place] + right
        lookup.tried = OWN_FADING * lookup.tried + tried
        lookup.right = OWN_FADING * lookup.right + right

    @staticmethod
    def forget(lookup: Lookup) -> None:
        """Note a step without a draft."""
        lookup.tried *= FORGETTING
        lookup.right *= FORGETTING


def expected(chance: float, length: int) -> float:
    """Return how many of `length` drafted tokens are right on average, up to the first wrong one."""
    return length * chance if chance > 0.999 else chance * (1 - chance**length) / (1 - chance)


def _place(matched: int) -> int:
    return min(matched.bit_length(), len(FIRST) - 1)


# ---- The time of steps with several rows a stream, as a multiple of those with one. -------------------------------------

SMOOTHING = 0.2  # weight of a new step
UNKNOWN = 0.02  # of a step: a row more where no cost is known, until one has run
OUTLIER = 3.0  # times the mean: more is not the step's, but the machine's


class Pace:
    """Multiples are learnt from the steps that run, by their size up to a power of two. For a size that has not run, the
    costs tell it, corrected by as much as they were wrong about those that have.

    A multiple stays true where another process slows the machine, and nearly so where the context grows.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._plain: dict[int, float] = {}  # seconds of a step, by streams
        self._multiples: dict[tuple[int, int], float] = {}  # by streams, and bits of the number of rows
        self._correction: float | None = None  # of the time that the costs tell for drafted rows

    def multiple(self, streams: int, rows: int, depth: int) -> float:
        """Return the time of a step of `rows` rows over that of one with a row a stream. depth: cells that a row sees."""
        learnt = self._multiples.get((streams, _size(rows)))
        if learnt is not None:
            return learnt
        return 1 + (1.0 if self._correction is None else self._correction) * self._told(streams, rows, depth)

    def _told(self, streams: int, rows: int, depth: int) -> float:
        """Return the time of drafted rows by the costs, over that of a step without them."""
        plain = self._costs.step_ns(streams, depth)
        return max(self._costs.step_ns(rows, depth) / plain - 1, 0.0) if plain else UNKNOWN * (rows - streams)

    def seconds(self, streams: int) -> float:
        """Return the time of a step with a row a stream; 0 before the first."""
        return self._plain.get(streams, 0.0)

    def observe(self, streams: int, rows: int, *, depth: int, seconds: float) -> float:
        """Learn from a step; return its multiple, 1 for one without drafts."""
        plain = self._plain.get(streams)
        if rows == streams:
            self._plain[streams] = seconds if plain is None else _smoothed(plain, seconds)
            return 1.0
        if plain is None:
            return 1.0
        key, multiple = (streams, _size(rows)), seconds / plain
        known = self._multiples.get(key)
        self._multiples[key] = multiple if known is None else _smoothed(known, multiple)
        if told := self._told(streams, rows, depth):
            new = max(multiple - 1, 0.0) / told
            self._correction = new if self._correction is None else _smoothed(self._correction, new)
        return multiple


def _size(rows: int) -> int:
    return (rows - 1).bit_length()


def _smoothed(mean: float, new: float) -> float:
    return mean + SMOOTHING * (min(new, OUTLIER * mean) - mean)


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

    def propose(self, jobs: Sequence[Job], running: Sequence[Job], cells: Cells) -> Sequence[np.ndarray]:
        """Return a draft (int32, maybe empty) for each of these requests, which decode; nothing where none pays."""
        lookups = [job.request.draft for job in jobs if job.request.draft is not None]
        if len(jobs) < len(running):
            lookups.clear()
        self._is_used = bool(lookups)
        if not lookups:
            return NONE
        most = min(min(self._max_rows, cells.num_free) // len(jobs), ROWS[-1]) - 1
        found = [self._look_up(job, most) for job in jobs] if most > 0 else []
        length = self._length(jobs, found) if any(found) else 0
        if not length:
            for lookup in lookups:
                self._odds.forget(lookup)
            return NONE
        self._matched = {job.request.id: draft.matched for job, draft in zip(jobs, found, strict=True) if draft}
        return [draft.tokens[:length] if draft else NO_DRAFT for draft in found]

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn from the time that a step took."""
        if self._is_used:
            depth = max(span.start for span in plan.spans)
            self._multiple = self._pace.observe(len(plan.spans), plan.num_tokens, depth=depth, seconds=seconds)
            if not plan.has_drafts:
                self._credit = min(self._credit + EARNED, MOST_CREDIT)

    def settle(self, checked: list[tuple[Job, Span]], device: DeviceCells) -> None:
        """Free the cells of rejected tokens, and learn. checked: the spans with drafts of the last step that ran.

        It begins a new step, which may do without `propose`.
        """
        self._is_used = False
        if not checked:
            return
        least = math.inf
        for job, span in checked:
            accepted = job.computed - span.start - 1
            least = min(least, accepted)
            if job.computed < span.stop:
                device.perform(Trim(span.sequence, job.computed, span.stop))
            if job.request.draft is not None:
                self._odds.learn(job.request.draft, self._matched[job.request.id], accepted, span.drafted)
        self._credit = min(self._credit + 1 + least - self._multiple, MOST_CREDIT)
        checked.clear()

    def _look_up(self, job: Job, most: int) -> Draft | None:
        if job.request.draft is None:
            return None
        room = len(job.tokens) - job.num_tokens - 1  # the last token of an answer is sampled behind a draft
        draft = job.request.draft.draft(job.tokens[: job.num_tokens], job.num_prompt, min(most, room))
        if draft is None:
            return None
        end = next((place for place, token in enumerate(draft.tokens.tolist()) if token in self._ends), len(draft.tokens))
        return Draft(draft.tokens[:end], draft.matched) if end else None

    def _length(self, jobs: Sequence[Job], found: Sequence[Draft | None]) -> int:
        """Return the most tokens of a draft in this step: of the lengths that pay, the one that gains most; 0: none pays."""
        streams = len(jobs)
        depth = max(job.num_tokens for job in jobs)
        sizes = [len(draft.tokens) if draft else 0 for draft in found]
        best, best_gain = 0, MARGIN
        for length in (rows - 1 for rows in ROWS):
            cut = [min(size, length) for size in sizes]
            multiple = self._pace.multiple(streams, streams + sum(cut), depth)
            gain = (1 + min(map(self._expected, jobs, found, cut))) / multiple
            if gain > best_gain and self._may_cost(multiple - 1, streams):
                best, best_gain = length, gain
            if length >= max(sizes):
                break
        return best

    def _expected(self, job: Job, draft: Draft | None, length: int) -> float:
        """Return how many of the first tokens of a draft are right on average."""
        return expected(self._odds.chance(job.request.draft, draft.matched), length) if draft and job.request.draft else 0.0

    def _may_cost(self, steps: float, streams: int) -> bool:
        """Return whether the time of so many steps may be lost, and other streams can wait for so long."""
        most = math.inf if streams == 1 else AIM * self._max_stall
        return steps <= self._credit and steps * self._pace.seconds(streams) <= most


NO_DRAFT = np.empty(0, np.int32)
