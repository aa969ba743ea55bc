"""Events of a generation, and the mailbox where its client finds them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ...models.sampling import Chances
from ..errors import RequestError
from .report import Fields, Report, timings

MAX_PROGRESS = 8  # unread events of it
MAX_PIECES = 8  # unread pieces of text that are sent one by one


@dataclass(frozen=True, slots=True)
class Delta:
    """More text of the answer, and the tokens that it became known with.

    chances: of each of these tokens, where they were asked for. num_generated: tokens so far, these counted. is_last: the
    answer ends with it.
    """

    text: str
    tokens: tuple[int, ...] = ()
    chances: tuple[Chances, ...] = ()
    num_generated: int = 0
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the prompt is: tokens in all, from the cache, and done so far (cached ones counted). Time in ms."""

    total: int
    cache: int
    processed: int
    time_ms: float

    def timings(self) -> Fields:
        """Return llama-server's `timings` so far."""
        return timings(
            num_cached=self.cache,
            num_computed=self.processed - self.cache,
            num_generated=0,
            queue_time=0.0,
            prompt_time=self.time_ms / 1000,
            generation_time=0.0,
        )


@dataclass(frozen=True, slots=True)
class End:
    """The last piece of a whole answer, with its tokens. reason: stop or length.

    chances: as in `Delta`, but none of tokens that only belong to a stop string. sampled: the ids (int32) of the whole
    answer, where they spell its text exactly and may be kept. prompt: its text, for answers that show it; whoever reads the
    event adds it.
    """

    text: str
    reason: str
    report: Report
    sampled: np.ndarray | None = None
    tokens: tuple[int, ...] = ()
    chances: tuple[Chances, ...] = ()
    prompt: str = ""

    def delta(self) -> Delta:
        """Return the piece as if the answer went on."""
        return Delta(self.text, self.tokens, self.chances, num_generated=self.report.num_generated, is_last=True)


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer ends here, with an error."""

    error: RequestError


Final = End | Failure
Event = Delta | Progress | Final


class Unread:
    """A client's unread events: some progress, the pieces of text, and the end. It belongs to the event loop.

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
        num_pieces = len(self._text) if len(self._text) <= MAX_PIECES else 1
        return len(self._progress) + num_pieces + (self._final is not None)

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
            event = self._take_text()
        else:
            event, self._final = self._final, None
        assert event is not None
        return event

    def _take_text(self) -> Delta:
        """Take the first piece, or all of them as one for a client that has fallen behind."""
        if len(self._text) <= MAX_PIECES:
            return self._text.pop(0)
        joined, self._text = _join(self._text), []
        return joined


def _join(deltas: Sequence[Delta]) -> Delta:
    """Return several pieces as one."""
    tokens = tuple(chain.from_iterable(delta.tokens for delta in deltas))
    chances = tuple(chain.from_iterable(delta.chances for delta in deltas))
    return Delta("".join(delta.text for delta in deltas), tokens, chances, deltas[-1].num_generated)
