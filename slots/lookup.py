"""Drafts by lookup: if a text's last tokens occurred earlier in it, the tokens that followed them there are the draft."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .reuse import ids_of

SHORTEST = 3  # tokens of the shortest suffix that is looked up
LONGEST = 32  # tokens before a place that are compared
MOST_PLACES = 16  # newest places of a suffix that are compared: a text that repeats one word has thousands
BITS = 21  # bits of a token in a key: more than any vocabulary needs, and three tokens fit into an int64


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A guess at the next tokens (int32), taken from a place where the text's last tokens occurred before.

    matched: how many tokens before that place equal the text's last tokens.
    """

    tokens: np.ndarray
    matched: int


@dataclass(slots=True)
class Score:
    """How many drafted tokens were checked (`tried`), and how many of these were right. Recent tokens have more weight."""

    tried: float = 0.0
    right: float = 0.0

    def fade(self, by: float) -> None:
        self.tried *= by
        self.right *= by

    def add(self, tried: float, right: float) -> None:
        self.tried += tried
        self.right += right


class Lookup:
    """Makes drafts for one request, from the request's prompt and its answer so far.

    asks_model: whether a draft model may also make drafts for the request.
    num_drafted, num_accepted: how many tokens of drafts were checked so far, and how many of these were accepted.
    score: the score of the request's drafts by lookup.
    model_score: the score of the request's drafts by the draft model.
    """

    __slots__ = (
        *("_end", "_newest", "_place", "_prompt"),
        *("asks_model", "model_score", "num_accepted", "num_drafted", "score"),
    )

    def __init__(self, *, asks_model: bool = False) -> None:
        self.asks_model = asks_model
        self.num_drafted = self.num_accepted = 0
        self.score, self.model_score = Score(), Score()
        self._prompt: Places | None = None
        self._newest: dict[int, int] = {}  # by suffix: the end of its last occurrence in the answer
        self._end = 0  # length of the text that `_learn` has seen
        self._place = 0  # where the source of the last draft continues; 0: no draft yet

    def draft(self, tokens: np.ndarray, num_prompt: int, most: int) -> Draft | None:
        """Return at most `most` tokens that may come next; None if the last tokens did not occur before.

        tokens (int32): the prompt and the answer so far. Tokens of separately read documents may be marked (`mark`).
        """
        self._learn(tokens, num_prompt)
        if len(tokens) < SHORTEST or most <= 0 or not len(places := self._places(key_of(tokens, len(tokens)))):
            return None
        lengths = matched(tokens, places)
        best = len(lengths) - 1 - int(lengths[::-1].argmax())  # of equal places, the last draft's, else the newest
        self._place = int(places[best])
        source = ids_of(tokens[self._place : self._place + most])
        return Draft(np.resize(source, most), int(lengths[best]))  # past the end of the text, the draft repeats

    def _learn(self, tokens: np.ndarray, num_prompt: int) -> None:
        """Add the text since the last call to the index: the whole prompt at first, then a few tokens in each step."""
        if self._prompt is None:
            self._prompt, self._end = Places(ids_of(tokens[:num_prompt])), num_prompt
        for stop in range(max(self._end, SHORTEST), len(tokens)):  # nothing follows the last token yet
            self._newest[key_of(tokens, stop)] = stop
        if self._place:
            self._place = min(self._place + len(tokens) - self._end, len(tokens) - 1)
        self._end = len(tokens)

    def _places(self, key: int) -> np.ndarray:
        """Return the positions where occurrences of a suffix end, as far as they are worth comparing."""
        assert self._prompt is not None
        places, newest = self._prompt.find(key), self._newest.get(key, 0)
        more = [place for place in (newest, self._place) if place]
        return np.append(places, more).astype(np.int64) if newest or (len(places) and more) else places


class Places:
    """The places where each sequence of SHORTEST tokens occurs in a text.

    The places are sorted once by numpy, in about 0.1 us for each token of the text.
    """

    def __init__(self, tokens: np.ndarray) -> None:
        wide = tokens.astype(np.int64)
        count = max(len(wide) - SHORTEST + 1, 0)
        keys = np.zeros(count, np.int64)
        for offset in range(SHORTEST):
            keys = keys << BITS | wide[offset : offset + count]
        order = np.argsort(keys, kind="stable")
        self._keys, self._stops = keys[order], (order + SHORTEST).astype(np.int32)

    def find(self, key: int) -> np.ndarray:
        """Return the positions where the newest occurrences of a suffix end, ascending; at most MOST_PLACES."""
        start = int(self._keys.searchsorted(key))
        if start == len(self._keys) or self._keys[start] != key:
            return self._stops[:0]
        stop = int(self._keys.searchsorted(key, side="right"))
        return self._stops[max(start, stop - MOST_PLACES) : stop]


def key_of(tokens: np.ndarray, stop: int) -> int:
    """Return the key of the SHORTEST tokens that end at position `stop`."""
    key = 0
    for token in ids_of(tokens[stop - SHORTEST : stop]).tolist():
        key = key << BITS | token
    return key


def matched(tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
    """For each place, return how many tokens before the place equal the last tokens of `tokens`. Shape: (places,)."""
    length = min(LONGEST, len(tokens))
    at = places[:, None] - np.arange(1, length + 1)
    same = (ids_of(tokens[np.maximum(at, 0)]) == ids_of(tokens[: -length - 1 : -1])) & (at >= 0)
    return np.where(same.all(1), length, same.argmin(1))
