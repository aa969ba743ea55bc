"""Requests that repeat what an earlier one had: the beginning of its prompt, or a whole body that was refused."""

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
# Prompts that repeat the beginning of an earlier one and leave the cache alone: how much it would have saved.
#
# The cache is for requests that ask for it, and many clients could ask and do not know. Each is told once, of its own
# prompts.

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

    def note(self, client: Client, prompt: ChatPrompt, model: str = "") -> int:
        """Remember a prompt; return how many of its first tokens an earlier one had, at least. Later ones of it: 0.

        model: the name of the one that is asked: another one's tokens may be the same, and its KV is not.
        """
        if client in self._told:
            return 0
        digests = list(_digests((*client, model), prompt))
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


K = TypeVar("K")
V = TypeVar("V")


def _shorten(kept: OrderedDict[K, V], most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)


# ---- Refusals -----------------------------------------------------------------------------------------------------------
# Bodies whose prompts were too long: an equal one is refused again without a look at its text.
#
# Some clients send the same body again and again. A body that goes on from what is stored, or whose documents are searched,
# may fit the next time.

logger = logging.getLogger("slotcache")
MOST_REFUSED = 32  # bodies that are remembered, by their digests


class Refusals:
    """The newest refusals, by the digest of the path, the model and the body, each with the times that it was repeated."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, tuple[RequestError, int]] = OrderedDict()  # the least recently used first

    def __bool__(self) -> bool:
        return bool(self._kept)

    def find(self, key: bytes, path: str) -> RequestError | None:
        """Return the error of an equal body, if it was refused. The log says so at the 1st, 10th, 100th, ... time."""
        if key not in self._kept:
            return None
        error, count = self._kept.pop(key)
        count += 1
        self._kept[key] = error, count
        if str(count).strip("0") == "1":
            logger.warning("%s: an equal body was refused again, %d times so far: %s", path, count, error.message)
        return copy(error)

    def note(self, key: bytes, error: RequestError) -> None:
        self._kept[key] = copy(error), 0  # without its traceback, which holds the body
        _shorten(self._kept, MOST_REFUSED)


def is_lasting(asked: Options, error: RequestError) -> bool:
    """Whether a body that was refused with this error will be refused as long as the server runs."""
    continues = isinstance(asked, OpenAIFields) and (asked.conversation, asked.previous_response_id) != (None, None)
    return error.code == TOO_LONG and not continues and not (isinstance(asked, ChatRequest) and asked.retrieves)


def key_of(place: str, asked: Options) -> bytes:
    """Return the digest of a body. place: the path, and the model that is asked there."""
    return blake2b(place.encode() + b"\0" + msgspec.json.encode(asked), digest_size=16).digest()
