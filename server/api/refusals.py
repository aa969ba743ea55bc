"""Bodies whose prompts were too long: an equal one is refused again without a look at its text.

Some clients send the same body again and again. A body that goes on from what is stored, or whose documents are searched,
may fit the next time.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from copy import copy
from hashlib import blake2b

import msgspec

from ..chat.body import ChatRequest, OpenAIFields, Options
from ..http.api_errors import RequestError

logger = logging.getLogger("slotcache")
MOST = 32  # bodies that are remembered, by their digests
CODE = "context_length_exceeded"


class Refusals:
    """The newest refusals, by the digest of the path and the body, each with the times that it was repeated."""

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
        if len(self._kept) > MOST:
            self._kept.popitem(last=False)


def is_lasting(asked: Options, error: RequestError) -> bool:
    """Whether a body that was refused with this error will be refused as long as the server runs."""
    continues = isinstance(asked, OpenAIFields) and (asked.conversation, asked.previous_response_id) != (None, None)
    return error.code == CODE and not continues and not (isinstance(asked, ChatRequest) and asked.retrieves)


def key_of(path: str, asked: Options) -> bytes:
    return blake2b(path.encode() + b"\0" + msgspec.json.encode(asked), digest_size=16).digest()
