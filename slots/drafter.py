"""A draft model: the protocol of its class, the chance that its tokens are right, and the time that they take."""

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
    """A draft model's guess at the next tokens of an answer.

    tokens: int32.
    confidences: the probability that the draft model gave to each token.
    """

    tokens: np.ndarray
    confidences: tuple[float, ...]


class Drafter(Protocol):
    """A draft model, with its own KV and one sequence for each slot. The draft model computes in the engine's thread.

    A draft model never changes an answer: it only proposes tokens, which the main model checks. To *read* a token means to
    compute the draft model's KV of it.

    costs: the costs of the draft model.
    batch: the most tokens of one batch of the draft model.
    num_tokens: how many tokens the draft model has computed since the start.
    num_passes: how many passes the model has made for drafts since the start. Each pass adds one token to the draft of each
        stream, or ends that draft.
    is_off: whether the model makes no drafts, because it failed repeatedly or was not loaded.
    """

    costs: Costs
    batch: int
    num_tokens: int
    num_passes: int
    is_off: bool

    def lacking(self, job: Job) -> int:
        """Return how many of a job's tokens, without the last one, the model has still to read; -1: it cannot read them."""
        ...

    def read(self, job: Job, most: int) -> bool:
        """Read at most `most` of a job's unread tokens.

        If a new request aborts the reading, no token is read, and the result is False.
        """
        ...

    def read_ahead(self, slot: Slot, cached: int, most: int) -> bool:
        """Read up to `most` tokens of an idle slot's history, so that they need not be read in the slot's next turn.

        Return False if no token is left to read, or if a new request aborts the reading.

        cached: the length of the history's prefix that may be read.
        """
        ...

    def draft(self, jobs: Sequence[Job], lengths: Sequence[int], goes_on: GoesOn) -> list[ModelDraft]:
        """Return a draft for each job. A draft is empty if the model cannot draft for its job.

        lengths: the most tokens of each job's draft.

        The unread tokens of all jobs, plus one token for each job, must fit into one batch.
        """
        ...

    def forget(self, scope: Scope) -> None:
        """Free the KV of a scope.

        If requests of the scope are running, the tokens of these requests are read again later.
        """
        ...


# ---- The chance that a token of a draft model is the sampler's choice, learnt from the drafts that were checked. --------

EDGES = (0.3, 0.5, 0.7, 0.85, 0.95)  # confidences: tokens between two edges share one chance
FIRST = (0.3, 0.45, 0.6, 0.75, 0.85, 0.95)  # chances before any draft
FIRST_WEIGHT, FIRST_MEAN, MEAN_WEIGHT = 4.0, 0.7, 16.0
FADING, OWN_FADING, OWN_WEIGHT = 0.98, 0.8, 8.0  # as in `drafts.py`; with a model, a request has more drafts
RETURN = 0.998  # share of the difference from the first chances that a step without a draft keeps: texts change
SURE = 0.995  # no chance is higher


class ModelOdds:
    """The chance that a token drafted by a draft model is right, for each level of the model's confidence in the token.

    The chances are learnt from the drafts of all requests, and adjusted for each request by its own earlier drafts.
    """

    def __init__(self) -> None:
        self._mean = Score(MEAN_WEIGHT, FIRST_MEAN * MEAN_WEIGHT)
        self._by_confidence = [Score(FIRST_WEIGHT, chance * FIRST_WEIGHT) for chance in FIRST]

    def mean(self, own: Score) -> float:
        """Return the chance that the next token to draft will be right.

        The draft model's confidence in this token is not known yet.

        own: the score of the request's own drafts.
        """
        general = self._mean.right / self._mean.tried
        return min((OWN_WEIGHT * general + own.right) / (OWN_WEIGHT + own.tried), SURE)

    def chances(self, own: Score, confidences: Sequence[float]) -> list[float]:
        """Return the chance that each token of a draft is right, if all tokens before it are right."""
        lean = self.mean(own) * self._mean.tried / max(self._mean.right, 1e-9)
        scores = [self._by_confidence[_place(confidence)] for confidence in confidences]
        return [min(lean * score.right / score.tried, SURE) for score in scores]

    def learn(self, own: Score, confidences: Sequence[float], right: int) -> None:
        """Learn from a checked draft, whose first `right` tokens were right.

        The draft's tokens after its first wrong token do not count, since they were not checked.
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
        """After a step without a draft, move the chances a little back towards their initial values."""
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
    """The times of a draft model.

    The times are learnt from the model's passes, and estimated from `Costs` before the first pass.

    costs: the costs of the main model.
    of_draft: the costs of the draft model.
    """

    def __init__(self, costs: Costs, of_draft: Costs) -> None:
        self._costs, self._of_draft = costs, of_draft
        self._passes: dict[int, float] = {}  # by streams: the time of a pass, divided by its time by the costs
        self._token = 0.0  # seconds to read a token; 0 before the first read

    def pass_steps(self, streams: int, depth: int, step: float) -> float:
        """Return the time to draft one more token for each stream, as a multiple of the time of a step of the main model.

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
        """Learn from the time that the drafts of a step took.

        number: the number of passes. Each pass counts as a pass for all streams.
        """
        by_costs = self._of_draft.step_ns(streams, depth) or 1.0
        self._passes[streams] = smoothed(self._passes.get(streams), seconds / number / by_costs)

    def learn_tokens(self, number: int, seconds: float) -> None:
        """Learn from the time to read `number` tokens."""
        self._token = smoothed(self._token or None, seconds / number)


def smoothed(mean: float | None, new: float) -> float:
    """Return the running mean of times, updated with one new time.

    mean: the mean so far; None: no time was measured before `new`.
    """
    return new if mean is None else mean + SMOOTHING * (min(new, OUTLIER * mean) - mean)
