"""A draft model: what it does for the engine, how often its tokens are right, and how long they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .costs import Costs
from .job import Job
from .lookup import Score
from .scope import Scope
from .slot import Slot

GoesOn = Callable[[int, Sequence[float]], bool]
"""Takes a request's index and the confidences of its draft so far. Returns whether the draft gets one more token."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelDraft:
    """A guess at the next tokens by a draft model.

    tokens: int32.
    confidences: the probability that the draft model gave to each token.
    """

    tokens: np.ndarray
    confidences: tuple[float, ...]


class Drafter(Protocol):
    """A draft model, with its own KV and one sequence for each slot. It computes in the engine's thread.

    A draft model never changes an answer: it only proposes tokens, which the main model checks.

    costs: the costs of the draft model.
    batch: most tokens of one batch.
    num_tokens: tokens computed since the start.
    num_passes: passes for drafts since the start; each pass adds a token to each stream's draft, or ends the draft.
    is_off: whether the model drafts nothing, because it failed repeatedly or was not loaded.
    """

    costs: Costs
    batch: int
    num_tokens: int
    num_passes: int
    is_off: bool

    def lacking(self, job: Job) -> int:
        """Return how many of a job's tokens before the last one the draft model has not read; -1: it cannot read them."""
        ...

    def read(self, job: Job, most: int) -> bool:
        """Read at most `most` of a job's unread tokens. Return False, with none read, if a new request aborts this."""
        ...

    def read_ahead(self, slot: Slot, cached: int, most: int) -> bool:
        """Compute up to `most` tokens of an idle slot's history with the draft model, for the slot's next turn.

        Return False if no token is left, or after an abort.

        cached: how many first tokens of the history may be read.
        """
        ...

    def draft(self, jobs: Sequence[Job], lengths: Sequence[int], goes_on: GoesOn) -> list[ModelDraft]:
        """Return a draft for each job, of at most its length in `lengths`; it is empty if the model cannot draft.

        The unread tokens of all jobs, and one more token of each job, must fit into one batch.
        """
        ...

    def forget(self, scope: Scope) -> None:
        """Free the KV of a scope. The tokens of running requests in it are read again later."""
        ...


# ---- The chance that a token of a draft model is the sampler's choice, learnt from the drafts that were checked. --------

EDGES = (0.3, 0.5, 0.7, 0.85, 0.95)  # confidences: tokens between two edges share one chance
FIRST = (0.3, 0.45, 0.6, 0.75, 0.85, 0.95)  # chances before any draft
FIRST_WEIGHT, FIRST_MEAN, MEAN_WEIGHT = 4.0, 0.7, 16.0
FADING, OWN_FADING, OWN_WEIGHT = 0.98, 0.8, 8.0  # as in `drafts.py`; with a model, a request has more drafts
RETURN = 0.998  # share of the difference from the first chances that a step without a draft keeps: texts change
SURE = 0.995  # no chance is higher


class ModelOdds:
    """The chance that a drafted token is right, by the draft model's confidence in it.

    The chances are learnt from all requests. A request's own drafts shift its chances.
    """

    def __init__(self) -> None:
        self._mean = Score(MEAN_WEIGHT, FIRST_MEAN * MEAN_WEIGHT)
        self._by_confidence = [Score(FIRST_WEIGHT, chance * FIRST_WEIGHT) for chance in FIRST]

    def mean(self, own: Score) -> float:
        """Return the chance of a token that is not drafted yet.

        own: the request's score.
        """
        general = self._mean.right / self._mean.tried
        return min((OWN_WEIGHT * general + own.right) / (OWN_WEIGHT + own.tried), SURE)

    def chances(self, own: Score, confidences: Sequence[float]) -> list[float]:
        """Return the chance of each token of a draft, given that all tokens before it are right."""
        lean = self.mean(own) * self._mean.tried / max(self._mean.right, 1e-9)
        scores = [self._by_confidence[_place(confidence)] for confidence in confidences]
        return [min(lean * score.right / score.tried, SURE) for score in scores]

    def learn(self, own: Score, confidences: Sequence[float], right: int) -> None:
        """Learn from a checked draft, whose first `right` tokens were right.

        Tokens after the first wrong one do not count.
        """
        checked = [_place(confidence) for confidence in confidences[: right + 1]]
        for place in set(checked):
            self._by_confidence[place].fade(FADING)
        for number, place in enumerate(checked):
            self._by_confidence[place].add(1, number < right)
        self._mean.fade(FADING)
        self._mean.add(len(checked), right)
        own.fade(OWN_FADING)
        own.add(len(checked), right)

    def forget(self) -> None:
        """Move the chances a little towards the first guess, after a step without a draft."""
        _return(self._mean, MEAN_WEIGHT, FIRST_MEAN)
        for score, chance in zip(self._by_confidence, FIRST, strict=True):
            _return(score, FIRST_WEIGHT, chance)


def _return(score: Score, weight: float, chance: float) -> None:
    score.fade(RETURN)
    score.add((1 - RETURN) * weight, (1 - RETURN) * weight * chance)


def _place(confidence: float) -> int:
    return sum(confidence >= edge for edge in EDGES)


# ---- The time of a draft model, in steps of the model that it drafts for. -----------------------------------------------

SMOOTHING = 0.2  # weight of a new time
OUTLIER = 3.0  # a time counts as at most this many times the mean: the machine causes longer ones, not the model
UNKNOWN, UNKNOWN_TOKEN = 0.2, 0.02  # shares of a step: a pass, and a read token, of a draft model without known costs


class DraftTimes:
    """The times of a draft model, learnt from its passes; before the first pass, taken from the costs of both models.

    costs: the costs of the main model.
    of_draft: the costs of the draft model.
    """

    def __init__(self, costs: Costs, of_draft: Costs) -> None:
        self._costs, self._of_draft = costs, of_draft
        self._passes: dict[int, float] = {}  # by streams: the time of a pass, divided by its time by the costs
        self._token = 0.0  # seconds to read a token; 0 before the first read

    def pass_steps(self, streams: int, depth: int, step: float) -> float:
        """Return the time to draft one more token for each stream, in steps of the main model.

        step: the seconds of a step of the main model.
        """
        by_costs = self._of_draft.step_ns(streams, depth)
        if learnt := self._passes.get(streams):
            return learnt * (by_costs or 1.0) / step
        plain = self._costs.step_ns(streams, depth)
        return by_costs / plain if plain else UNKNOWN

    def token_seconds(self, step: float) -> float:
        """Return how many seconds the draft model takes to read a token.

        step: as in `pass_steps`.
        """
        plain, row = self._costs.step_ns(1, 0), self._of_draft.row_ns
        return self._token or step * (row / plain if plain and row else UNKNOWN_TOKEN)  # a GPU's time for a row may be 0

    def learn_passes(self, streams: int, number: float, depth: int, seconds: float) -> None:
        """Learn from the time of drafts.

        number: the number of passes, as if each pass had drafted for all streams.
        """
        by_costs = self._of_draft.step_ns(streams, depth) or 1.0
        self._passes[streams] = smoothed(self._passes.get(streams), seconds / number / by_costs)

    def learn_tokens(self, number: int, seconds: float) -> None:
        """Learn from the time to read `number` tokens."""
        self._token = smoothed(self._token or None, seconds / number)


def smoothed(mean: float | None, new: float) -> float:
    """Return a running mean of times after one new time.

    mean: the mean before the new time; None: the new time is the first.
    """
    return new if mean is None else mean + SMOOTHING * (min(new, OUTLIER * mean) - mean)
