"""Penalties for repetition.

Penalties read only the last tokens, so their time does not grow with the context or the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from .sampling_params import Sampling

LOG_FLOAT = 88.7228391  # the logarithm of the largest float, beyond which a power of the base is infinite


class Logits(Protocol):
    """The logits of the tokens that may still be chosen."""

    @property
    def values(self) -> np.ndarray:
        """The logits, (tokens,), float32, to be changed in place."""
        ...

    def places(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find which of `tokens` (sorted) are in `values`.

        Return two arrays: the indices of the found tokens in `values`, and their indices in `tokens`.
        """
        ...


class RecentTokens:
    """The last `size` tokens of a prompt and its answer."""

    def __init__(self, size: int) -> None:
        self._tokens, self._size, self._stop = np.empty(2 * size, np.int32), size, 0

    @property
    def tokens(self) -> np.ndarray:
        return self._tokens[max(self._stop - self._size, 0) : self._stop]

    def extend(self, tokens: np.ndarray) -> None:
        """Add tokens (int32)."""
        new = tokens[-self._size :]
        if self._stop + len(new) > len(self._tokens):
            kept = self.tokens.copy()
            self._tokens[: len(kept)], self._stop = kept, len(kept)
        self._tokens[self._stop : self._stop + len(new)] = new
        self._stop += len(new)


class Penalties:
    """llama-server's `penalties`: lowers the logits of tokens that are among the last `repeat_window` tokens."""

    def __init__(self, sampling: Sampling) -> None:
        self._history = RecentTokens(sampling.repeat_window)
        self._repeat = np.float32(sampling.repeat_penalty)
        self._presence, self._frequency = np.float32(sampling.presence_penalty), np.float32(sampling.frequency_penalty)

    def extend(self, tokens: np.ndarray) -> None:
        """Count more tokens (int32)."""
        self._history.extend(tokens)

    @np.errstate(over="ignore", invalid="ignore")  # a penalty may be as large as any number
    def apply(self, logits: Logits) -> bool:
        """Change the logits. Return whether any logit may have changed."""
        tokens, counts = np.unique(self._history.tokens, return_counts=True)
        places, which = logits.places(tokens)
        values = logits.values[places]
        values = np.where(values <= 0, values * self._repeat, values / self._repeat)
        logits.values[places] = values - (counts[which].astype(np.float32) * self._frequency + self._presence)
        return True


class Dry:
    """llama-server's `dry` (don't repeat yourself): lowers the logits of tokens that would continue a repetition.

    A repeated sequence cannot contain a breaker (see `Breakers`).

    piece: returns the bytes of a token.
    """

    def __init__(self, sampling: Sampling, piece: Callable[[int], bytes]) -> None:
        self._history = RecentTokens(sampling.dry_window)
        self._multiplier, self._base = np.float32(sampling.dry_multiplier), np.float32(sampling.dry_base)
        self._allowed, self._piece = sampling.dry_allowed_length, piece
        self._breakers = Breakers(sampling.dry_sequence_breakers)
        self._most = int(LOG_FLOAT / math.log(self._base)) if self._base > 1.000001 else 0
        self._lengths = np.zeros(0, np.int32)  # `repeated` of the history

    def extend(self, tokens: np.ndarray) -> None:
        """Add more tokens (int32)."""
        self._history.extend(tokens)
        known = self._history.tokens
        self._breakers.extend([self._piece(token) for token in tokens[-len(known) :].tolist()])
        is_next = len(tokens) == 1 and len(known) > 1
        self._lengths = grown(self._lengths, known) if is_next else repeated(known)

    @np.errstate(over="ignore", invalid="ignore")  # a penalty may be as large as any number
    def apply(self, logits: Logits) -> bool:
        """Change the logits. Return whether any logit may have changed."""
        known, free = self._history.tokens, min(self._breakers.since, len(self._history.tokens))
        if len(known) <= self._allowed or free < self._allowed:
            return False
        lengths = np.minimum(self._lengths, free)
        repeats = lengths >= self._allowed
        tokens, which = np.unique(known[1:][repeats], return_inverse=True)
        longest = np.zeros(len(tokens), np.int64)
        np.maximum.at(longest, which, lengths[repeats])
        kept = [index for index, token in enumerate(tokens.tolist()) if not self._breakers.are_in(self._piece(token))]
        tokens, beyond = tokens[kept], longest[kept] - self._allowed
        if self._most:
            beyond = np.minimum(beyond, self._most)
        places, which = logits.places(tokens)
        logits.values[places] -= (self._multiplier * np.power(np.float64(self._base), beyond[which])).astype(np.float32)
        return True


class Breakers:
    """Finds breakers: texts that cut off repeated sequences, such as line ends.

    since: the number of tokens after the last breaker.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.since = 0
        self._texts = [text.encode("utf-8", "replace") for text in texts if text]
        self._longest = max(map(len, self._texts), default=0)
        self._end = b""  # the last bytes of the text so far

    def extend(self, pieces: Sequence[bytes]) -> None:
        """Add the next tokens, each as bytes."""
        text = self._end + b"".join(pieces)
        found = max((at + len(each) for each in self._texts if (at := text.rfind(each)) >= 0), default=0)
        start = len(text)
        for since, piece in enumerate(reversed(pieces)):
            start -= len(piece)
            if start < found:
                self.since = since
                break
        else:
            self.since += len(pieces)
        self._end = text[max(len(text) - self._longest + 1, 0) :]

    def are_in(self, piece: bytes) -> bool:
        """Return whether the bytes of a token contain a breaker."""
        return any(each in piece for each in self._texts)


def repeated(tokens: np.ndarray) -> np.ndarray:
    """Return, for each token but the last, how many tokens up to and including it equal the last tokens of `tokens`.

    Shape: (tokens - 1,).
    """
    lengths = np.zeros(max(len(tokens) - 1, 0), np.int32)
    places, last = np.arange(len(lengths)), len(tokens) - 1
    for length in range(len(lengths)):
        places = places[places >= length]
        places = places[tokens[places - length] == tokens[last - length]]
        if not len(places):
            break
        lengths[places] = length + 1
    return lengths


def grown(lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return `repeated(tokens)`, computed from its earlier result.

    lengths: the result before the last token was added. When the last token was added, `tokens` may have lost its oldest
    token.
    """
    longer = np.concatenate((np.zeros(1, np.int32), lengths))[-(len(tokens) - 1) :] + 1
    longer[tokens[:-1] != tokens[-1]] = 0
    return np.minimum(longer, np.arange(1, len(longer) + 1, dtype=np.int32))
