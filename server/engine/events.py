"""Events of a generation, and the mailbox where its client finds them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ..errors import RequestError
from .report import Report

MAX_PROGRESS = 8  # unread events of it


@dataclass(frozen=True, slots=True)
class Delta:
    """More text of the answer, and the tokens that it became known with."""

    text: str
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the prompt is: tokens in all, from the cache, and done so far (cached ones counted). Time in ms."""

    total: int
    cache: int
    processed: int
    time_ms: float


@dataclass(frozen=True, slots=True)
class End:
    """The last piece of a whole answer, with its tokens. reason: stop or length.

    sampled: the ids (int32) of the whole answer, where they spell its text exactly and may be kept.
    """

    text: str
    reason: str
    report: Report
    sampled: np.ndarray | None = None
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer ends here, with an error."""

    error: RequestError


Final = End | Failure
Event = Delta | Progress | Final


class Unread:
    """A client's unread events: some progress, the text in one piece, and the end. It belongs to the event loop.

    A slow client gets longer pieces, and the unread events of a client that never reads are no larger than its answer.
    """

    __slots__ = ("_arrived", "_final", "_progress", "_text")

    def __init__(self) -> None:
        self._progress: deque[Progress] = deque()  # the first ones, and the newest
        self._text: list[Delta] = []
        self._final: Final | None = None
        self._arrived = asyncio.Event()

    def qsize(self) -> int:
        """Return how many events `get` would return without waiting."""
        return len(self._progress) + bool(self._text) + (self._final is not None)

    def put(self, event: Event) -> None:
        match event:
            case Delta():
                self._text.append(event)
            case Progress():
                if len(self._progress) == MAX_PROGRESS:
                    self._progress.pop()
                self._progress.append(event)
            case End() | Failure():
                self._final = event
        self._arrived.set()

    async def get(self) -> Event:
        """Wait for the next event and return it."""
        await self._arrived.wait()
        event = self._take()
        if not self.qsize():
            self._arrived.clear()
        return event

    def _take(self) -> Event:
        event: Event | None
        if self._progress:  # it comes before all text
            event = self._progress.popleft()
        elif self._text:
            event, self._text = _join(self._text), []
        else:
            event, self._final = self._final, None
        assert event is not None
        return event


def _join(deltas: Sequence[Delta]) -> Delta:
    """Return several pieces as one."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta("".join(delta.text for delta in deltas), tuple(chain.from_iterable(delta.tokens for delta in deltas)))
