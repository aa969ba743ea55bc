"""The drafts of a step: how many tokens to draft, and which drafted tokens were accepted.

A decoding span consists of the request's last token and its draft. The model computes a row of logits for each token of the
span. The sampler chooses a token from the first row. If the token chosen from the first row equals the first drafted token,
the sampler goes on to the second row, and so on. The sampler stops at the first choice that differs from the draft, so a
draft never changes the answer.

    row       last token   draft 0     draft 1   draft 2   draft 3
    choice    = draft 0    = draft 1   another   -         -
    KV        kept         kept        kept      trimmed   trimmed
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from time import perf_counter

import numpy as np

from .cells import Cells, cut
from .costs import AIM, Costs
from .device import DeviceCells
from .drafter import OUTLIER, Drafter, DraftTimes, ModelDraft, ModelOdds, smoothed
from .job import Job
from .lookup import Draft, Lookup, Score
from .plan import Plan, Span
from .scope import Scope
from .slot import Slot
from .swap import USUAL_ANSWER

# ---- The chance that a drafted token is the next one, learnt from the drafts that were checked. -------------------------

FIRST = (0.5, 0.5, 0.5, 0.6, 0.75, 0.85, 0.9)  # chances before any draft, by the bits of the matched length: a guess
FIRST_WEIGHT = 16.0  # tokens that the guess counts as
OWN_WEIGHT = 8.0  # tokens that the score of all requests counts as, when a request's own score is added
FADING = 0.98  # share of the score of all requests that a draft keeps
OWN_FADING = 0.5  # share of a request's own score that a draft keeps
FORGETTING = 0.97  # share of a request's own score that a step without a draft keeps: it tries again later


class Odds:
    """The chance that a token drafted by lookup is right, for each length of the match.

    The chances are learnt from the drafts of all requests, and adjusted for each request by its own earlier drafts.
    """

    def __init__(self) -> None:
        self._by_length = [Score(FIRST_WEIGHT, FIRST_WEIGHT * chance) for chance in FIRST]

    def chance(self, own: Score, matched: int) -> float:
        """Return the chance that a token of a draft is right, if all tokens before it are right.

        own: the score of the request's own drafts.
        matched: the length of the draft's match.
        """
        general = self._by_length[_place(matched)]
        return (OWN_WEIGHT * general.right / general.tried + own.right) / (OWN_WEIGHT + own.tried)

    def learn(self, own: Score, matched: int, right: int, drafted: int) -> None:
        """Learn from a checked draft of `drafted` tokens, of which the first `right` ones were right."""
        for score, fading in ((self._by_length[_place(matched)], FADING), (own, OWN_FADING)):
            score.fade(fading)
            score.add(right + (right < drafted), right)

    @staticmethod
    def forget(own: Score) -> None:
        """Fade a request's score after a step without a draft."""
        own.fade(FORGETTING)


def expected(chance: float, length: int) -> float:
    """Return how many of `length` drafted tokens are expected to be accepted.

    chance: the chance that a token is right, if all tokens before it are right.
    """
    return length * chance if chance > 0.999 else chance * (1 - chance**length) / (1 - chance)


@dataclass(frozen=True, slots=True, eq=False)
class Guess:
    """A draft, and for each of its tokens the chance that it is right, if all tokens before it are right."""

    draft: Draft | ModelDraft
    chances: Sequence[float]

    def __len__(self) -> int:
        return len(self.chances)

    def expected(self, length: int) -> float:
        """Return how many tokens are expected to be accepted if only the draft's first `length` tokens are used."""
        return sum(accumulate(self.chances[:length], mul))


def _place(matched: int) -> int:
    return min(matched.bit_length(), len(FIRST) - 1)


# ---- The time of steps with several rows per stream, as a multiple of steps with one row. -------------------------------

UNKNOWN = 0.02  # of a step: one more row, if its cost is unknown and no such step has run
LEAST = 0.001  # of a step: the least time of a row; a factor could not learn from 0
CLEARLY = 0.9  # of the time without drafts: a step with drafts that takes less shows a faster machine
FADING_PACE = 0.995  # share of a factor that a step without drafts keeps: slow sizes are tried again
REFRESH = 100  # steps with drafts before one without drafts, which shows how long such a step takes now
FIRST_STEPS = 4  # the same, while the time without drafts is unknown
FEW_ROWS = 8
SAMPLES = 5  # a factor is about the mean of this many recent samples


@dataclass(slots=True)
class Factor:
    """The ratio of measured to predicted times. The factor's initial value counts as one sample, like each measured time."""

    value: float = 1.0
    num_samples: int = 1

    def learn(self, new: float) -> None:
        self.num_samples = min(self.num_samples + 1, SAMPLES)
        self.value += (min(new, OUTLIER * self.value) - self.value) / self.num_samples

    def fade(self, usual: float) -> None:
        """After a step without drafts, move the factor a little towards `usual`."""
        self.value += (1 - FADING_PACE) * (usual - self.value)


class Pace:
    """The time of a step with drafts, as a multiple of the time of a step without drafts.

    `Costs` predicts the time that the drafted rows add to a step, and a factor corrects this prediction. The factor is
    learnt from measured steps. Each small number of rows has a factor of its own, and all larger numbers between two powers
    of two share one. A number of rows without a measured step uses a factor that is learnt from all steps.

    Steps without drafts may be rare. If the machine has become slower since the last step without drafts, the results of
    `multiple` and `observe` are too large until the next step without drafts.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._plain: dict[int, float] = {}  # by streams: the time of a step, divided by its time by the costs
        self._num_drafted: dict[int, int] = {}  # by streams: steps with drafts since the last one without
        self._factors: dict[int, dict[int, Factor]] = {}  # by streams and class of size
        self._factor = Factor()  # of other sizes

    def multiple(self, streams: int, rows: int, depth: int) -> float:
        """Return the time of a step of `rows` rows, divided by the time of a step with one row for each stream.

        depth: how many cells a row sees.
        """
        factor = self._factors.get(streams, {}).get(_size(rows), self._factor)
        return 1 + factor.value * self._by_costs(streams, rows, depth)

    def _by_costs(self, streams: int, rows: int, depth: int) -> float:
        """Return the predicted time that the drafted rows add, divided by the time of a step without them."""
        plain, drafted = self._costs.step_ns(streams, depth), rows - streams
        return max(self._costs.step_ns(rows, depth) / plain - 1 if plain else UNKNOWN * drafted, LEAST * drafted)

    def seconds(self, streams: int, depth: int) -> float:
        """Return the seconds of a step with one row for each stream; 0 before the first such step."""
        return self._plain.get(streams, 0.0) * self._usual(streams, depth)

    def _usual(self, streams: int, depth: int) -> float:
        return self._costs.step_ns(streams, depth) or 1.0

    def is_old(self, streams: int) -> bool:
        """Return whether the known time of a step without drafts is too old: the next step must then be such a step."""
        return self._num_drafted.get(streams, 0) >= (REFRESH if streams in self._plain else FIRST_STEPS)

    @staticmethod
    def _newer(known: float | None, new: float, *, is_late: bool) -> float:
        """Return the known time, moved towards a new time.

        is_late: whether the known time is too old (see `is_old`). If it is too old, the new time counts as much as the known
            time, which is more than usual.
        """
        return (known + min(new, OUTLIER * known)) / 2 if is_late and known is not None else smoothed(known, new)

    def observe(self, streams: int, rows: int, *, depth: int, seconds: float) -> float:
        """Learn from the time of a step. Return the time divided by the time of a step without drafts.

        The result is 1 for a step without drafts. The result is also 1 if the time of a step without drafts is unknown or
        out of date.
        """
        plain, factors = self.seconds(streams, depth), self._factors.setdefault(streams, {})
        drafted, slowness = rows - streams, seconds / self._usual(streams, depth)
        if not drafted:
            self._plain[streams] = self._newer(self._plain.get(streams), slowness, is_late=self.is_old(streams))
            self._num_drafted[streams] = 0
            self._factor.fade(1.0)
            for factor in factors.values():
                factor.fade(self._factor.value)
            return 1.0
        self._num_drafted[streams] = self._num_drafted.get(streams, 0) + 1
        if not plain:
            return 1.0
        if seconds < CLEARLY * plain:  # the machine is faster than it was
            self._plain[streams] = smoothed(self._plain[streams], slowness)
            return 1.0
        seen = max(seconds / plain - 1, LEAST * drafted) / self._by_costs(streams, rows, depth)
        factors.setdefault(_size(rows), Factor(self._factor.value)).learn(seen)
        self._factor.learn(seen)
        return max(seconds / plain, 1.0)


def _size(rows: int) -> int:
    """Return the class of a number of rows; all numbers in a class share a factor.

    Each small number has a class of its own, because a draft model chooses between lengths that differ by one row.
    """
    return rows if rows <= FEW_ROWS else FEW_ROWS + (rows - 1).bit_length()


ROWS = (4, 8, 16, 32, 64)  # rows of a stream, with the row of its last token
MODEL_ROWS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16)  # the same, if a draft model computes each token of the draft
MARGIN = 1.05  # the least expected gain of a draft: estimates have errors
FIRST_CREDIT, MOST_CREDIT = 8.0, 32.0  # in steps without drafts
FIRST_MODEL_CREDIT, MOST_MODEL_CREDIT = 16.0, 128.0  # the same with a draft model, which first has to read the prompt
EARNED = 0.005  # credit of a step without drafts: the share of time that drafts may lose in the long run
READ_ALONG = 16  # unread tokens per stream that a draft model reads in its first pass, without a separate pass before it
NONE: Sequence[np.ndarray] = ()


class Drafts:
    """Decides which drafts a step checks. A step has drafts only if all running requests decode.

    Drafts are used only if they are expected to save time for every stream of the step. If drafts lose time all the same,
    the loss is taken from a credit. Drafts that save time refill the credit, and each step without drafts adds a little to
    it. Even if no draft is ever accepted, drafts cost only half a percent of the time.

    In one step, either all drafts come from lookup, or all come from the draft model, whichever is expected to save more
    time. The time of the draft model counts as a loss, whether it drafts or reads prompts. The draft model reads a
    prompt in pieces, between the steps of the main model, once the answer's first token is sampled.

    max_rows: the most rows of logits of a step; 0: no drafts.
    max_stall: the most seconds that drafts may add to a step with several streams. Steps aim at a little less than
        `max_stall` (`AIM`).
    longest: the most tokens of a draft. The state of a recurrent model must be rolled back after a wrong token, so such a
        model limits the length of drafts.
    ends: tokens that end an answer; they are never drafted.
    drafter: the draft model, if there is one.

    With a recurrent model, all streams of a step draft the same number of tokens, because llama.cpp computes equal lengths
    in one ubatch. Unequal lengths would take several ubatches. A later ubatch moves the recurrent states of the other
    streams, but not the saved states that a rollback needs.
    """

    def __init__(
        self,
        costs: Costs,
        *,
        max_rows: int = 0,
        max_stall: float = math.inf,
        longest: float = math.inf,
        ends: Iterable[int] = (),
        drafter: Drafter | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.drafter = drafter
        self.model_seconds = 0.0  # time of the draft model in the last plan
        self._max_rows, self._max_stall, self.longest = max_rows, max_stall, longest
        self._ends, self._clock = frozenset(ends), clock
        self._odds, self._model_odds, self._pace = Odds(), ModelOdds(), Pace(costs)
        self._times = DraftTimes(costs, drafter.costs) if drafter else None
        self._credit = FIRST_MODEL_CREDIT if drafter else FIRST_CREDIT
        self._most_credit = MOST_MODEL_CREDIT if drafter else MOST_CREDIT
        self._guesses: dict[int, Guess] = {}  # drafts of the last step, by request
        self._multiple = 1.0  # the last step's time, in steps without drafts
        self._is_used = False  # whether the step only decodes, and one of its requests may have drafts

    def propose(self, jobs: Sequence[Job], running: Sequence[Job], cells: Cells) -> Sequence[np.ndarray]:
        """Return a draft (int32, may be empty) for each of `jobs`, all of which decode. Return () if no draft pays."""
        lookups = [job.request.draft for job in jobs if isinstance(job.request.draft, Lookup)]
        if len(jobs) < len(running):
            lookups.clear()
        self._is_used = bool(lookups)
        if not lookups or self._pace.is_old(len(jobs)):
            return NONE
        most = int(min(min(self._max_rows, cells.num_free) // len(jobs) - 1, ROWS[-1] - 1, self.longest))
        found = [self._look_up(job, most) for job in jobs] if most > 0 else []
        length, gain = self._length(jobs, found) if any(found) else (0, MARGIN)
        if self.drafter is not None and most > 0:
            asked = self._ask_model(jobs, lookups, most, gain)
            by_model, _ = self._length(jobs, asked, MODEL_ROWS) if any(asked) else (0, MARGIN)
            if by_model:
                found, length = asked, by_model
            else:
                self._model_odds.forget()
        if not length:
            for lookup in lookups:
                self._odds.forget(lookup.score)
            return NONE
        self._guesses = {job.request.id: guess for job, guess in zip(jobs, found, strict=True) if guess}
        return [guess.draft.tokens[:length] if guess else NO_DRAFT for guess in found]

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn from the seconds that a step took."""
        if self._is_used and (plan.has_drafts or not self.model_seconds):  # a reading draft model fills the CPU's caches
            depth = max(span.start for span in plan.spans)
            self._multiple = self._pace.observe(len(plan.spans), plan.num_tokens, depth=depth, seconds=seconds)
        if self._is_used and not plan.has_drafts:
            self._earn(EARNED)

    def settle(self, checked: list[tuple[Job, Span]], device: DeviceCells) -> None:
        """Free the cells of rejected tokens, and learn from the accepted and rejected ones.

        checked: those spans of the last step that ran which have drafts. `settle` clears this list.

        Call this at the start of each step, even of a step for which `propose` is not called.
        """
        self._is_used, self.model_seconds = False, 0.0
        if not checked:
            return
        least = math.inf
        for job, span in checked:
            accepted = job.computed - span.start - 1
            least = min(least, accepted)
            if job.sequence is not None:  # else the span was cut when the request gave up its slot
                cut(job, span, device)
            if isinstance(job.request.draft, Lookup):
                self._learn(job.request.draft, self._guesses[job.request.id].draft, accepted, span.drafted)
        self._earn(1 + least - self._multiple)
        checked.clear()

    def forget(self, scope: Scope) -> None:
        """Free the draft model's KV of a scope."""
        if self.drafter is not None:
            self.drafter.forget(scope)

    def use_idle_time(self, slots: Iterable[tuple[Slot, int]]) -> bool:
        """Let the draft model read a piece of an idle slot's history. Return False if reading more is of no use.

        slots: each slot with the number of cached tokens of its history.
        """
        drafter, step = self.drafter, self._pace.seconds(1, 0)
        if drafter is None or self._times is None or drafter.is_off or not step:
            return False
        _, gain = self._model_length(1, [self._model_odds.mean(Score())], int(min(ROWS[-1], self.longest)), 0, MARGIN)
        if gain <= MARGIN:
            return False
        most = self._piece(self._times.token_seconds(step))
        return any(drafter.read_ahead(slot, cached, most) for slot, cached in slots)

    def _earn(self, steps: float) -> None:
        """Add to the credit. The credit has a lower bound, so that a pause of the machine does not stop drafts for long."""
        self._credit = max(min(self._credit + steps, self._most_credit), -FIRST_CREDIT)

    def _learn(self, lookup: Lookup, draft: Draft | ModelDraft, accepted: int, drafted: int) -> None:
        if isinstance(draft, Draft):
            self._odds.learn(lookup.score, draft.matched, accepted, drafted)
        else:
            self._model_odds.learn(lookup.model_score, draft.confidences[:drafted], accepted)

    def _look_up(self, job: Job, most: int) -> Guess | None:
        if not isinstance(job.request.draft, Lookup):
            return None
        draft = job.request.draft.draft(job.tokens[: job.num_tokens], job.num_prompt, min(most, _room(job)))
        if draft is None:
            return None
        end = next((place for place, token in enumerate(draft.tokens.tolist()) if token in self._ends), len(draft.tokens))
        if not end:
            return None
        chance = self._odds.chance(job.request.draft.score, draft.matched)
        return Guess(Draft(draft.tokens[:end], draft.matched), (chance,) * end)

    def _length(
        self, jobs: Sequence[Job], found: Sequence[Guess | None], candidates: Sequence[int] = ROWS
    ) -> tuple[int, float]:
        """Return the draft length that has the largest gain, and that gain. The length is 0 if no length pays.

        The gain is the number of tokens that each stream is expected to get, divided by the time of the step. The unit of
        time is a step without drafts.

        candidates: the numbers of rows per stream to try.
        """
        streams = len(jobs)
        depth = max(job.num_tokens for job in jobs)
        sizes = [len(guess) if guess else 0 for guess in found]
        if self.longest < math.inf:
            sizes = [min(sizes)] * streams
        best, best_gain = 0, MARGIN
        for length in (rows - 1 for rows in candidates):
            cut = [min(size, length) for size in sizes]
            multiple = self._pace.multiple(streams, streams + sum(cut), depth)
            right = (guess.expected(size) if guess else 0.0 for guess, size in zip(found, cut, strict=True))
            gain = (1 + min(right)) / multiple
            if gain > best_gain and self._may_cost(multiple - 1, streams, depth):
                best, best_gain = min(length, max(sizes)), gain
            if length >= max(sizes):
                break
        return best, best_gain

    def _may_cost(self, steps: float, streams: int, depth: int) -> bool:
        """Return whether drafts may take the time of `steps` steps: the credit covers it, and streams can wait for it."""
        most = math.inf if streams == 1 else AIM * self._max_stall
        return steps <= self._credit and steps * self._pace.seconds(streams, depth) <= most

    # ---- by a draft model ------------------------------------------------------------------------------------------

    def _ask_model(self, jobs: Sequence[Job], lookups: Sequence[Lookup], most: int, least: float) -> Sequence[Guess | None]:
        """Return the draft model's draft for each request, or () if the gain is not expected to exceed `least`.

        If the draft model still has to read many tokens, it reads some of them instead, and the result is (). Whether the
        draft model drafts or reads, its time is taken from the credit at once.
        """
        drafter, times, streams = self.drafter, self._times, len(jobs)
        depth = max(job.num_tokens for job in jobs)
        step = self._pace.seconds(streams, depth)
        asks = len(lookups) == streams and all(lookup.asks_model for lookup in lookups)
        if drafter is None or times is None or drafter.is_off or not asks or not step:
            return ()
        most = min(most, max(map(_room, jobs)))
        length, gain = self._model_length(
            streams, [self._model_odds.mean(lookup.model_score) for lookup in lookups], most, depth, least
        )
        lacking = [drafter.lacking(job) for job in jobs] if length else [-1]
        if min(lacking) < 0:
            return ()
        if sum(lacking) > min(READ_ALONG * streams, drafter.batch - streams):
            self._read(jobs, lacking, gain, step)
            return ()
        each = times.pass_steps(streams, depth, step)
        costs = [self._cost(streams, tokens, each, depth) / streams for tokens in range(length + 1)]

        def goes_on(place: int, confidences: Sequence[float]) -> bool:
            """Return whether to draft further tokens for a request.

            Further tokens must be expected to add more to the answer, for the time that they take, than the whole step does
            on average.
            """
            score, drafted = lookups[place].model_score, len(confidences)
            reached = math.prod(self._model_odds.chances(score, confidences))
            more = expected(self._model_odds.mean(score), length - drafted)
            return reached * more > gain * (costs[length] - costs[drafted])

        began, passes = self._clock(), drafter.num_passes
        drafts = drafter.draft(jobs, [min(length, _room(job)) for job in jobs], goes_on)
        seconds = self._clock() - began
        self.model_seconds += seconds
        if passes := drafter.num_passes - passes:
            times.learn_passes(streams, passes, depth, seconds)
            self._earn(-passes * times.pass_steps(streams, depth, step))
        return [
            Guess(draft, self._model_odds.chances(lookup.model_score, draft.confidences)) if len(draft.tokens) else None
            for draft, lookup in zip(drafts, lookups, strict=True)
        ]

    def _model_length(
        self, streams: int, chances: Sequence[float], most: int, depth: int, least: float
    ) -> tuple[int, float]:
        """Return how many tokens to draft for each request, and the expected gain (see `_length`).

        The number is 0 if the gain is not expected to exceed `least`.

        chances: for each request, the chance that a drafted token is right.
        """
        assert self._times is not None
        each = self._times.pass_steps(streams, depth, self._pace.seconds(streams, depth))
        best, best_gain = 0, max(least, MARGIN)
        for length in (rows - 1 for rows in MODEL_ROWS if rows <= most + 1):
            cost = self._cost(streams, length, each, depth)
            gain = (1 + min(expected(chance, length) for chance in chances)) / cost
            if gain > best_gain and self._may_cost(cost - 1, streams, depth):
                best, best_gain = length, gain
        return best, best_gain

    def _cost(self, streams: int, length: int, each: float, depth: int) -> float:
        """Return the time of a step with `length` drafted tokens per stream, as a multiple of a step without drafts.

        each: the time of a pass of the draft model, as a multiple of a step without drafts.
        """
        return self._pace.multiple(streams, streams * (1 + length), depth) + length * each

    def _read(self, jobs: Sequence[Job], lacking: Sequence[int], gain: float, step: float) -> None:
        """Let the draft model read a piece of its unread tokens, if later drafts are likely to repay the time of reading."""
        assert self.drafter is not None and self._times is not None
        each = self._times.token_seconds(step)
        cost, left = sum(lacking) * each / step, min(min(_room(job), USUAL_ANSWER) for job in jobs)
        if cost > self._credit or cost > left / gain * (gain - 1):
            return
        job = max(zip(jobs, lacking, strict=True), key=lambda pair: pair[1])[0]
        began, read = self._clock(), self.drafter.num_tokens
        if self.drafter.read(job, self._piece(each)):
            seconds, read = self._clock() - began, self.drafter.num_tokens - read
            self.model_seconds += seconds
            self._times.learn_tokens(read, seconds)
            self._earn(-read * self._times.token_seconds(step) / step)

    def _piece(self, each: float) -> int:
        """Return how many tokens the draft model may read at once.

        While the draft model reads, streams or a new request wait.
        """
        assert self.drafter is not None
        costs = self.drafter.costs
        most = min(AIM * self._max_stall, costs.background_ns / 1e9 or math.inf)
        whole = int(min(most / each, self.drafter.batch)) // costs.chunk * costs.chunk
        return min(max(whole, costs.chunk), self.drafter.batch)


def _room(job: Job) -> int:
    """Return the most tokens of a draft for a job. After the draft, the answer must have room for one sampled token."""
    return len(job.tokens) - job.num_tokens - 1


NO_DRAFT = np.empty(0, np.int32)
