"""Detects requests that repeat an earlier request: prompts with the same prefix, and bodies that were refused before."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from copy import copy
from hashlib import blake2b
from typing import TypeVar

import msgspec
import numpy as np

from ..chat.body import ChatRequest, OpenAIFields, Options
from ..chat.chat_prompt import ChatPrompt, Fixed
from ..http.api_errors import TOO_LONG, RequestError

# ---- Repeats ------------------------------------------------------------------------------------------------------------
# Uncached prompts that repeat a prefix of an earlier prompt: how many tokens the cache would have saved.
#
# Without --cache-prompt, only requests that ask for the cache use it, and many clients do not know this. Each client gets
# one warning, about its own prompts.

STRIDE = 1000  # tokens: prefixes are compared whose length is a multiple of this
LONGEST = 64_000  # the most tokens of a prompt that are compared
MOST_KEPT, MOST_WARNED = 4096, 1024  # remembered prefixes (16 bytes each) and clients

Client = tuple[str, ...]
"""A client's keys and its scope. A warning must not reveal the prompts of other clients."""


class Repeats:
    """Digests of the prefixes of recent prompts. For the event loop only."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, None] = OrderedDict()
        self._warned: OrderedDict[Client, None] = OrderedDict()

    def note(self, client: Client, prompt: ChatPrompt, model: str = "") -> int:
        """Remember a prompt.

        Return the length of the longest prefix that the prompt shares with an earlier prompt of the client.

        The length is a number of tokens, rounded down to a multiple of `STRIDE`. Each client is warned once: after a
        result above 0, all later results for this client are 0.

        model: the model's name. Prompts of different models are not compared, since they never share KV.
        """
        if client in self._warned:
            return 0
        digests = list(_digests((*client, model), prompt))
        repeated = next((at for at in range(len(digests), 0, -1) if digests[at - 1] in self._kept), 0)
        for digest in digests:
            self._kept[digest] = None
            self._kept.move_to_end(digest)
        _shorten(self._kept, MOST_KEPT)
        if repeated:
            self._warned[client] = None
            _shorten(self._warned, MOST_WARNED)
        return repeated * STRIDE


def _digests(client: Client, prompt: ChatPrompt) -> Iterator[bytes]:
    """Yield digests of a prompt's prefixes, one for each multiple of `STRIDE` tokens.

    The prefixes end before the first documents, since the order of the documents is not known yet.
    """
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


K = TypeVar("K")
V = TypeVar("V")


def _shorten(kept: OrderedDict[K, V], most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)


# ---- Refusals -----------------------------------------------------------------------------------------------------------
# Bodies whose prompts were too long: an equal body is refused again without building its prompt.
#
# Some clients send the same body again and again. A body that continues a stored conversation or searches for documents
# may make a shorter prompt the next time, so it is not remembered.

logger = logging.getLogger("slotcache")
MOST_REFUSED = 32  # remembered bodies, by digest


class Refusals:
    """The errors of recently refused bodies, by a digest of path, model and body. Counts how often a body is repeated."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, tuple[RequestError, int]] = OrderedDict()  # the least recently used first

    def __bool__(self) -> bool:
        return bool(self._kept)

    def find(self, key: bytes, path: str) -> RequestError | None:
        """Return the error with which an equal body was refused; None if no equal body was.

        The 1st, 10th, 100th, ... repetition is logged.
        """
        if key not in self._kept:
            return None
        error, count = self._kept.pop(key)
        count += 1
        self._kept[key] = error, count
        if str(count).strip("0") == "1":
            logger.warning("%s: an equal body was refused again, %d times so far: %s", path, count, error.message)
        return copy(error)

    def note(self, key: bytes, error: RequestError) -> None:
        self._kept[key] = copy(error), 0  # the copy has no traceback, which would keep the body in memory
        _shorten(self._kept, MOST_REFUSED)


def is_lasting(asked: Options, error: RequestError) -> bool:
    """Return whether a body that was refused with this error would be refused again, for as long as the server runs."""
    continues = isinstance(asked, OpenAIFields) and (asked.conversation, asked.previous_response_id) != (None, None)
    return error.code == TOO_LONG and not continues and not (isinstance(asked, ChatRequest) and asked.retrieves)


def key_of(place: str, asked: Options) -> bytes:
    """Return the digest of a body. place: the path and the model's name."""
    return blake2b(place.encode() + b"\0" + msgspec.json.encode(asked), digest_size=16).digest()
