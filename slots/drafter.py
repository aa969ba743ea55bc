"""What a draft model does for the engine, how often its tokens are right, and what they cost."""

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
"""Whether the draft of a request, by its place, shall get one more token. Takes the confidences so far."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelDraft:
    """tokens (int32): a guess at the next ones. confidences: the probability that the draft model gave each of them."""

    tokens: np.ndarray
    confidences: tuple[float, ...]


class Drafter(Protocol):
    """A draft model with KV of its own, a sequence for each slot. It computes in the engine's thread.

    Nothing that it does changes an answer: it only says which tokens are worth checking.

    costs: of the draft model. batch: most tokens that it computes at once. num_tokens: those computed, ever. num_passes:
    those of drafts, ever, each of which brings a token to each stream, or the end of its draft. is_off: it failed again and
    again, or was not loaded, and drafts nothing.
    """

    costs: Costs
    batch: int
    num_tokens: int
    num_passes: int
    is_off: bool

    def lacking(self, job: Job) -> int:
        """Return how many known tokens of a job it has not read, the last one not among them; -1: it cannot read them."""
        ...

    def read(self, job: Job, most: int) -> bool:
        """Read at most so many of these. False: a new request has ended it, and it read none."""
        ...

    def read_ahead(self, slot: Slot, cached: int, most: int) -> bool:
        """Read likewise of an idle slot's history, for the next turn. False: nothing is left, or it was ended.

        cached: the tokens of the history that may be read.
        """
        ...

    def draft(self, jobs: Sequence[Job], lengths: Sequence[int], goes_on: GoesOn) -> list[ModelDraft]:
        """Return a draft of at most so many tokens for each job; empty ones where it could not.

        What the jobs lack, and a token of each, is at most a batch.
        """
        ...

    def forget(self, scope: Scope) -> None:
        """Free the KV of a scope. What running requests have of it is read again."""
        ...


# ---- The chance that a token of a draft model is the sampler's choice, learnt from the drafts that were checked. --------

EDGES = (0.3, 0.5, 0.7, 0.85, 0.95)  # of confidence: tokens between two of them share their chance
FIRST = (0.3, 0.45, 0.6, 0.75, 0.85, 0.95)  # before any draft
FIRST_WEIGHT, FIRST_MEAN, MEAN_WEIGHT = 4.0, 0.7, 16.0
FADING, OWN_FADING, OWN_WEIGHT = 0.98, 0.8, 8.0  # as of drafts by lookup; a request has more of these
RETURN = 0.998  # of what differs from the first guess, at each step without a draft: other texts may fare better
SURE = 0.995  # no chance is higher


class ModelOdds:
    """Chances by the draft model's confidence, of all requests; a request's own drafts change them for it."""

    def __init__(self) -> None:
        self._mean = Score(MEAN_WEIGHT, FIRST_MEAN * MEAN_WEIGHT)
        self._by_confidence = [Score(FIRST_WEIGHT, chance * FIRST_WEIGHT) for chance in FIRST]

    def mean(self, own: Score) -> float:
        """Return the chance of a token that is not drafted yet. own: of the request."""
        general = self._mean.right / self._mean.tried
        return min((OWN_WEIGHT * general + own.right) / (OWN_WEIGHT + own.tried), SURE)

    def chances(self, own: Score, confidences: Sequence[float]) -> list[float]:
        """Return the chance of each token of a draft if all in front of it are right."""
        lean = self.mean(own) * self._mean.tried / max(self._mean.right, 1e-9)
        scores = [self._by_confidence[_place(confidence)] for confidence in confidences]
        return [min(lean * score.right / score.tried, SURE) for score in scores]

    def learn(self, own: Score, confidences: Sequence[float], right: int) -> None:
        """Learn from a checked draft: nothing is known of its tokens behind the first wrong one."""
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
OUTLIER = 3.0  # times the mean: more is neither the step's nor the model's, but the machine's
UNKNOWN, UNKNOWN_TOKEN = 0.2, 0.02  # of a step: a pass, and a token that is read, of a draft model without known costs


class DraftTimes:
    """Times are learnt from what runs; before that, the costs of the two models tell them. costs: of the model."""

    def __init__(self, costs: Costs, of_draft: Costs) -> None:
        self._costs, self._of_draft = costs, of_draft
        self._passes: dict[int, float] = {}  # the time of one, over what the costs tell, by streams
        self._token = 0.0  # seconds of a token that is read; 0 before the first

    def pass_steps(self, streams: int, depth: int, step: float) -> float:
        """Return the time of a token more for each stream. step: seconds of one of the model."""
        told = self._of_draft.step_ns(streams, depth)
        if learnt := self._passes.get(streams):
            return learnt * (told or 1.0) / step
        plain = self._costs.step_ns(streams, depth)
        return told / plain if plain else UNKNOWN

    def token_seconds(self, step: float) -> float:
        """Return the seconds of a token that is read."""
        plain, row = self._costs.step_ns(1, 0), self._of_draft.row_ns
        return self._token or step * (row / plain if plain and row else UNKNOWN_TOKEN)  # a GPU may time a row as nothing

    def learn_passes(self, streams: int, number: float, depth: int, seconds: float) -> None:
        """Learn from drafts. number: of the passes, as if all had had all streams."""
        told = self._of_draft.step_ns(streams, depth) or 1.0
        self._passes[streams] = smoothed(self._passes.get(streams), seconds / number / told)

    def learn_tokens(self, number: int, seconds: float) -> None:
        """Learn from tokens that were read."""
        self._token = smoothed(self._token or None, seconds / number)


def smoothed(mean: float | None, new: float) -> float:
    """Return a mean of times that follows the newer ones."""
    return new if mean is None else mean + SMOOTHING * (min(new, OUTLIER * mean) - mean)
