"""Scores answers by their words and citations, and tests whether a difference of two ways is significant."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import numpy as np

from ...server.search.retrieve import BRACKETS, NAME

ID_LIKE = re.compile(r"[0-9a-f]{6,}")
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))
ROUNDS = 2000  # samples of the bootstrap
NARROW, FEWEST = 0.05, 20  # nats per token; conversations: docs/benchmarks.md explains the rule


def words(text: str) -> list[str]:
    """Return the words of an answer as in SQuAD's metrics, without case, articles and punctuation, and without cited ids."""
    plain = BRACKETS.sub(lambda found: " " if cited(found[0]) else found[0], text)
    return ARTICLES.sub(" ", plain.casefold().translate(PUNCTUATION)).split()


def token_f1(answer: str, expected: str) -> float:
    """Return the F1 score of an answer's words (the harmonic mean of precision and recall); 1 if both answers are empty."""
    ours, theirs = words(answer), words(expected)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs)) if ours or theirs else 1.0


def cited(answer: str) -> list[str]:
    """Return the texts in an answer's brackets that look like ids of documents, in order and without repetition."""
    names = (name for bracket in BRACKETS.finditer(answer) for name in NAME.findall(bracket[1]))
    return list(dict.fromkeys(name for name in names if ID_LIKE.fullmatch(name)))


@dataclass(frozen=True, slots=True)
class Effect:
    """A mean difference and its 95 % interval. conversations, turns: the numbers of compared conversations and turns."""

    mean: float
    low: float
    high: float
    conversations: int
    turns: int

    @property
    def verdict(self) -> str:
        """The verdict of the rule for log-likelihoods."""
        if self.conversations < FEWEST:
            return "unknown"
        if self.low > 0 or self.high < 0:
            return "better" if self.low > 0 else "worse"
        return "no effect" if self.high - self.low < NARROW else "unknown"

    def shown(self) -> str:
        interval = f" [{self.low:+.3f}, {self.high:+.3f}]" if self.conversations > 1 else ""
        return f"{self.mean:+.3f}{interval}" if self.turns else "-"


def bootstrap(conversations: Sequence[Sequence[tuple[float, float]]], seed: int = 0) -> Effect:
    """Return the mean over all turns, and its interval by resampling conversations.

    conversations: the turns of each conversation. A turn is a sum and its number of items, such as an answer's tokens.
    Conversations without turns do not count. With fewer than two conversations, there is no interval.
    """
    groups = [turns for turns in conversations if turns]
    num_turns = sum(map(len, groups))
    if not groups:
        return Effect(nan, nan, nan, 0, 0)
    sums = np.array([np.sum(turns, axis=0) for turns in groups])
    total, weight = sums.sum(axis=0)
    if len(groups) < 2:
        return Effect(total / weight, nan, nan, 1, num_turns)
    drawn = np.random.default_rng(seed).integers(0, len(groups), (ROUNDS, len(groups)))
    totals, weights = sums[drawn].sum(axis=1).T
    low, high = np.percentile(totals / weights, (2.5, 97.5))
    return Effect(float(total / weight), float(low), float(high), len(groups), num_turns)
