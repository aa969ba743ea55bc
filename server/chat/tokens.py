"""Tokens by text: of texts that were tokenised, and of answers as they were sampled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from sys import getsizeof
from threading import Lock

import numpy as np

OVERHEAD = 500  # bytes that an entry takes beside its texts and tokens, about

ScopedText = tuple[str, str]


class TokensByText:
    """Tokens (int32) by scope and text. Safe from several threads.

    Bounded by the bytes of all it holds, the texts counted; the least recently used entry leaves first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[ScopedText, np.ndarray] = OrderedDict()
        self._lock = Lock()

    def get(self, key: ScopedText) -> np.ndarray | None:
        with self._lock:
            if (tokens := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
            return tokens

    def put(self, key: ScopedText, tokens: np.ndarray) -> None:
        """Keep `tokens`, unless they alone are more than `max_bytes`."""
        size = _size(key, tokens)
        if size > self._max_bytes:
            return
        with self._lock:
            if (before := self._entries.pop(key, None)) is not None:
                self.num_bytes -= _size(key, before)
            self._entries[key] = tokens
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _size(*self._entries.popitem(last=False))


def _size(key: ScopedText, tokens: np.ndarray) -> int:
    scope, text = key
    return OVERHEAD + getsizeof(scope) + getsizeof(text) + tokens.nbytes


class TokenCache:
    """Tokenises each text once: documents, and messages that come back with every turn.

    Each scope has its own, so the time that a text takes says nothing about other scopes.
    """

    def __init__(self, tokenize: Callable[[str], np.ndarray], max_bytes: int = 64 << 20) -> None:
        self._tokenize = tokenize
        self._known = TokensByText(max_bytes)

    @property
    def num_bytes(self) -> int:
        return self._known.num_bytes

    def __call__(self, scope: str, text: str) -> np.ndarray:
        """Return the ids of `text`, int32; do not write to them."""
        tokens = self._known.get((scope, text))
        if tokens is None:
            tokens = self._tokenize(text)
            self._known.put((scope, text), tokens)
        return tokens


class AnswerMemory:
    """The ids that were sampled for an answer, by scope and text.

    Only the sampled ids have KV. When the text comes back as history, tokenising it anew may give different ids.
    """

    def __init__(self, max_bytes: int = 32 << 20) -> None:
        self._known = TokensByText(max_bytes)

    @property
    def num_bytes(self) -> int:
        return self._known.num_bytes

    def remember(self, scope: str, text: str, tokens: np.ndarray) -> None:
        """Store that `text` was sampled as `tokens` (int32), which must spell exactly its bytes."""
        self._known.put((scope, text), tokens)

    def recall(self, scope: str, text: str) -> np.ndarray | None:
        """Return the ids that `text` was sampled as in this scope, if they are known."""
        return self._known.get((scope, text))
