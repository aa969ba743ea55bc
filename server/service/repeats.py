"""Prompts that repeat the beginning of an earlier one and leave the cache alone: how much it would have saved.

The cache is for requests that ask for it, and many clients could ask and do not know. Each is told once, of its own prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np

from ..chat.chat_prompt import ChatPrompt, Fixed

STRIDE = 1000  # tokens: beginnings of these lengths are compared
LONGEST = 64_000  # tokens of a prompt that are looked at
MOST_KEPT, MOST_TOLD = 4096, 1024  # beginnings, and clients, that are remembered: 16 bytes each, and a name

Client = tuple[str, ...]
"""Who asked, and in which scope: nobody is told of the prompts of others."""


class Repeats:
    """Digests of the beginnings of the newest prompts. It belongs to the event loop."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, None] = OrderedDict()
        self._told: OrderedDict[Client, None] = OrderedDict()

    def note(self, client: Client, prompt: ChatPrompt) -> int:
        """Remember a prompt; return how many of its first tokens an earlier one had, at least. Later ones of it: 0."""
        if client in self._told:
            return 0
        digests = list(_digests(client, prompt))
        repeated = next((at for at in range(len(digests), 0, -1) if digests[at - 1] in self._kept), 0)
        for digest in digests:
            self._kept[digest] = None
            self._kept.move_to_end(digest)
        _shorten(self._kept, MOST_KEPT)
        if repeated:
            self._told[client] = None
            _shorten(self._told, MOST_TOLD)
        return repeated * STRIDE


def _digests(client: Client, prompt: ChatPrompt) -> Iterator[bytes]:
    """Yield a digest of each beginning, up to the first documents, whose order is not known yet."""
    digest = blake2b("\0".join(client).encode("utf-8", "replace"), digest_size=16)
    tokens = _first_tokens(prompt)
    for end in range(STRIDE, len(tokens) + 1, STRIDE):
        digest.update(tokens[end - STRIDE : end].tobytes())
        yield digest.digest()


def _first_tokens(prompt: ChatPrompt) -> np.ndarray:
    runs, length = [np.zeros(0, np.int32)], 0
    for part in prompt.parts:
        if not isinstance(part, Fixed) or length >= LONGEST:
            break
        runs.append(part.tokens)
        length += len(part.tokens)
    return np.concatenate(runs)[:LONGEST]


def _shorten(kept: OrderedDict[bytes, None] | OrderedDict[Client, None], most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)
