"""What a draft model does for the engine; how often its tokens are right, and what they cost."""

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
"""Returns whether the draft of a request gets one more token. Takes the request's index and the confidences so far."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelDraft:
    """tokens (int32): a guess at the next ones. confidences: the probability that the draft model gave each token."""

    tokens: np.ndarray
    confidences: tuple[float, ...]


class Drafter(Protocol):
    """A draft model with its own KV, a sequence for each slot. It computes in the engine's thread.

    A draft model never changes an answer: it only proposes tokens to check.

    costs: of the draft model. batch: most tokens of one computation. num_tokens: computed tokens, ever. num_passes: passes
    for drafts, ever; each pass brings a token to each stream, or the end of its draft. is_off: the model failed repeatedly,
    or was not loaded, and drafts nothing.
    """

    costs: Costs
    batch: int
    num_tokens: int
    num_passes: int
    is_off: bool

    def lacking(self, job: Job) -> int:
        """Return how many known tokens of a job it has not read, without the last one; -1: it cannot read them."""
        ...

    def read(self, job: Job, most: int) -> bool:
        """Read at most `most` of the lacking tokens. False: a new request has aborted it, and it read none."""
        ...

    def read_ahead(self, slot: Slot, cached: int, most: int) -> bool:
        """Read a piece of an idle slot's history, for the next turn. False: nothing is left, or a new request aborted it.

        cached: the tokens of the history that may be read.
        """
        ...

    def draft(self, jobs: Sequence[Job], lengths: Sequence[int], goes_on: GoesOn) -> list[ModelDraft]:
        """Return a draft for each job, up to its length; empty where the model could not draft.

        The lacking tokens of the jobs, and a token of each, fit into one batch.
        """
        ...

    def forget(self, scope: Scope) -> None:
        """Free the KV of a scope. Running requests have theirs read again."""
        ...


# ---- The chance that a token of a draft model is the sampler's choice, learnt from the drafts that were checked. --------

EDGES = (0.3, 0.5, 0.7, 0.85, 0.95)  # of confidence: tokens between two edges share their chance
FIRST = (0.3, 0.45, 0.6, 0.75, 0.85, 0.95)  # chances before any draft
FIRST_WEIGHT, FIRST_MEAN, MEAN_WEIGHT = 4.0, 0.7, 16.0
FADING, OWN_FADING, OWN_WEIGHT = 0.98, 0.8, 8.0  # as in `drafts.py`; a request has more drafts by a model
RETURN = 0.998  # share of the difference to the first guess that a step without a draft keeps: texts change
SURE = 0.995  # no chance is higher


class ModelOdds:
    """Chances by the draft model's confidence, over all requests; a request's own drafts shift them for it."""

    def __init__(self) -> None:
        self._mean = Score(MEAN_WEIGHT, FIRST_MEAN * MEAN_WEIGHT)
        self._by_confidence = [Score(FIRST_WEIGHT, chance * FIRST_WEIGHT) for chance in FIRST]

    def mean(self, own: Score) -> float:
        """Return the chance of a token that is not drafted yet. own: the request's score."""
        general = self._mean.right / self._mean.tried
        return min((OWN_WEIGHT * general + own.right) / (OWN_WEIGHT + own.tried), SURE)

    def chances(self, own: Score, confidences: Sequence[float]) -> list[float]:
        """Return the chance of each token of a draft, given that all tokens before it are right."""
        lean = self.mean(own) * self._mean.tried / max(self._mean.right, 1e-9)
        scores = [self._by_confidence[_place(confidence)] for confidence in confidences]
        return [min(lean * score.right / score.tried, SURE) for score in scores]

    def learn(self, own: Score, confidences: Sequence[float], right: int) -> None:
        """Learn from a checked draft: its tokens after the first wrong one say nothing."""
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
        """Note a step without a draft."""
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
OUTLIER = 3.0  # times the mean: a longer time is caused by the machine, not by the step or the model
UNKNOWN, UNKNOWN_TOKEN = 0.2, 0.02  # of a step: a pass, and a read token, of a draft model without known costs


class DraftTimes:
    """Times of a draft model, learnt from what runs; before that, from the costs of both models. costs: the main model's."""

    def __init__(self, costs: Costs, of_draft: Costs) -> None:
        self._costs, self._of_draft = costs, of_draft
        self._passes: dict[int, float] = {}  # the time of a pass over its time by the costs, by streams
        self._token = 0.0  # seconds of a read token; 0 before the first

    def pass_steps(self, streams: int, depth: int, step: float) -> float:
        """Return the time of one more token for each stream, in steps. step: seconds of a step of the main model."""
        by_costs = self._of_draft.step_ns(streams, depth)
        if learnt := self._passes.get(streams):
            return learnt * (by_costs or 1.0) / step
        plain = self._costs.step_ns(streams, depth)
        return by_costs / plain if plain else UNKNOWN

    def token_seconds(self, step: float) -> float:
        """Return the seconds of a read token."""
        plain, row = self._costs.step_ns(1, 0), self._of_draft.row_ns
        return self._token or step * (row / plain if plain and row else UNKNOWN_TOKEN)  # a GPU may time a row as nothing

    def learn_passes(self, streams: int, number: float, depth: int, seconds: float) -> None:
        """Learn from drafts. number: of passes, as if each had had all streams."""
        by_costs = self._of_draft.step_ns(streams, depth) or 1.0
        self._passes[streams] = smoothed(self._passes.get(streams), seconds / number / by_costs)

    def learn_tokens(self, number: int, seconds: float) -> None:
        """Learn from the time of read tokens."""
        self._token = smoothed(self._token or None, seconds / number)


def smoothed(mean: float | None, new: float) -> float:
    """Return a mean of times that follows new ones."""
    return new if mean is None else mean + SMOOTHING * (min(new, OUTLIER * mean) - mean)
