"""Refuses a prompt that is too long, before its whole text is tokenised.

A prompt of at most `MOST_COUNTED` bytes is tokenised completely, so that the error can state the number of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import numpy as np

from ...models.model import Model
from ..http.api_errors import too_long
from ..http.threads import give_way

MOST_COUNTED = 1 << 20  # bytes; tokenising this many takes about a second
SAMPLE = 1 << 18  # characters that are tokenised to estimate the number of tokens of a larger prompt


class PromptLength:
    """Counts the tokens of one prompt while it is tokenised.

    limit: the most tokens of the prompt and its answer together; None: no limit.
    """

    def __init__(self, model: Model, limit: int | None) -> None:
        self._model, self._limit = model, limit
        self._size = self._num_tokens = 0  # bytes of all texts; tokens counted so far
        self._longest = ""
        self._stops = False

    def extend(self, texts: Sequence[str], num_ids: int = 0) -> None:
        """Announce texts that will be tokenised, and the number of token ids that need no tokenising.

        Raises RequestError if the prompt is too long even at its least possible length. An id counts as one token, and a
        text as at least one. For a large prompt, the bytes of all texts are divided by the bytes of the vocabulary's
        longest token: the texts together count as at least this many tokens.
        """
        sizes = [_num_bytes(text) for text in texts]
        self._size += sum(sizes)
        self._num_tokens += num_ids
        self._longest = max(zip(sizes, texts, strict=True), key=itemgetter(0), default=(0, ""))[1] or self._longest
        self._stops = self._limit is not None and self._size > MOST_COUNTED
        if self._limit is None:
            return
        if num_ids and (least := num_ids + sum(map(bool, sizes))) >= self._limit:
            raise too_long(max(num_ids + self._estimate(), least), self._limit, about=self._size > 0)
        if self._stops and num_ids + self._size // self._model.tokenizer.longest >= self._limit:
            self._refuse()

    def tokenise(self, text: str, special: bool = False, begin: bool = False) -> np.ndarray:
        """Return the ids (int32) of a text. Raises RequestError as soon as a large prompt is too long.

        After `tokenise`, the caller must pass the number of ids to `add`.
        """
        if not self._stops:
            return self._model.tokenize(text, special=special, begin=begin)
        runs, made = [np.empty(0, np.int32)], 0
        for run in self._model.tokenizer.runs(text, special, begin):
            runs.append(run)
            made += len(run)
            self._check(made)
        return np.concatenate(runs)

    def add(self, num_tokens: int) -> None:
        """Count further tokens of the prompt. Raises RequestError as soon as a large prompt is too long."""
        give_way()
        self._num_tokens += num_tokens
        self._check()

    def _check(self, more: int = 0) -> None:
        if self._stops and self._limit is not None and self._num_tokens + more >= self._limit:
            self._refuse()

    def _refuse(self) -> None:
        assert self._limit is not None
        raise too_long(max(self._num_tokens, self._estimate(), self._limit), self._limit, about=True)

    def _estimate(self) -> int:
        """Estimate the number of tokens of all texts. The start of a long text serves as a sample."""
        sample = self._longest[:SAMPLE]
        return self._size * len(self._model.tokenize(sample)) // _num_bytes(sample) if sample else 0


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
