"""What is remembered about text: the tokens it was cut into, and the tokens an answer was sampled as."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

import numpy as np


class TokenCache:
    """Tokens by text: a document, or a message that comes back with every turn, is tokenised once.

    Bounded by the tokens it holds (4 bytes each, beside the text), the least recently used text leaves first.
    """

    def __init__(self, tokenize: Callable[[str], np.ndarray], max_tokens: int = 4_000_000) -> None:
        self._tokenize = tokenize
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._entries: OrderedDict[str, np.ndarray] = OrderedDict()
        self._lock = Lock()

    def __call__(self, text: str) -> np.ndarray:
        """The ids of `text`, int32; do not write to them."""
        with self._lock:
            if (known := self._entries.get(text)) is not None:
                self._entries.move_to_end(text)
                return known
        tokens = self._tokenize(text)
        with self._lock:
            if text not in self._entries:
                self._entries[text] = tokens
                self._num_tokens += len(tokens)
            while self._num_tokens > self._max_tokens:
                _, dropped = self._entries.popitem(last=False)
                self._num_tokens -= len(dropped)
        return tokens


class AnswerMemory:
    """The ids that were sampled for an answer, by scope and text.

    When the text comes back as history its own tokens may differ from the sampled ones, which are those that have KV.
    Bounded by the tokens it holds, the least recently used answer leaves first.
    """

    def __init__(self, max_tokens: int = 1_000_000) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._entries: OrderedDict[tuple[str, str], np.ndarray] = OrderedDict()
        self._lock = Lock()

    def remember(self, scope: str, text: str, tokens: np.ndarray) -> None:
        """`text` was sampled as `tokens` (int32), which must be exactly its bytes."""
        with self._lock:
            self._num_tokens += len(tokens) - len(self._entries.pop((scope, text), ()))
            self._entries[scope, text] = tokens
            while self._num_tokens > self._max_tokens:
                _, dropped = self._entries.popitem(last=False)
                self._num_tokens -= len(dropped)

    def recall(self, scope: str, text: str) -> np.ndarray | None:
        """The ids that `text` was sampled as in this scope, if it is known."""
        with self._lock:
            if (tokens := self._entries.get((scope, text))) is not None:
                self._entries.move_to_end((scope, text))
            return tokens
