"""One accepted request on its way through the engine: its text so far, and the events that its client reads.

Every generation ends in exactly one final event, an End or a Failure, unless its client has gone. The final event counts
when the engine sends it: a client that does not read cannot keep a generation open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from ...models.sampling import Sampling
from ...models.text import TextStream
from ...slots.request import Request
from ..chat.turn import Turn
from ..errors import RequestError


@dataclass(frozen=True, slots=True)
class Delta:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the prompt is: tokens in all, from the cache, and done so far (cached ones counted). Time in ms."""

    total: int
    cache: int
    processed: int
    time_ms: float


@dataclass(frozen=True, slots=True)
class End:
    """The answer is whole. reason: stop or length. text: the last piece of it."""

    text: str
    reason: str
    report: Report


@dataclass(frozen=True, slots=True)
class Failure:
    """There will be no (more) answer."""

    error: RequestError


Final = End | Failure
Event = Delta | Progress | Final


class Unread:
    """Events that a client has not read yet: the newest progress, the text in one piece, and the end. The event loop's.

    A client that reads slowly gets longer pieces, and one that does not read at all makes no more wait than its answer.
    """

    __slots__ = ("_arrived", "_final", "_progress", "_text")

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._text: list[str] = []
        self._final: Final | None = None
        self._arrived = asyncio.Event()

    def qsize(self) -> int:
        """How many events `get` would return without waiting."""
        return (self._progress is not None) + bool(self._text) + (self._final is not None)

    def put(self, event: Event) -> None:
        match event:
            case Delta(text):
                self._text.append(text)
            case Progress():
                self._progress = event
            case End() | Failure():
                self._final = event
        self._arrived.set()

    async def get(self) -> Event:
        """The next event; waits for one."""
        await self._arrived.wait()
        event = self._take()
        if not self.qsize():
            self._arrived.clear()
        return event

    def _take(self) -> Event:
        event: Event | None
        if self._progress is not None:  # it comes before all text
            event, self._progress = self._progress, None
        elif self._text:
            event, self._text = Delta("".join(self._text)), []
        else:
            event, self._final = self._final, None
        assert event is not None
        return event


Conclude = Callable[["Generation", Final], Final]
"""Takes note of a generation's end; the final event as its client shall read it."""


def _as_it_is(generation: Generation, event: Final) -> Final:
    return event


@dataclass(frozen=True, slots=True)
class Report:
    """What an answer cost and what it reused. Times in seconds, lengths in tokens."""

    lane: int
    source: str
    num_prompt: int
    num_cached: int
    num_generated: int
    stop: str | None
    documents: list[dict[str, Any]]
    repeated: tuple[str, ...]
    miss: dict[str, Any] | None
    queue_time: float
    prompt_time: float
    generation_time: float
    num_preempted: int
    conversation: dict[str, Any] | None = None

    def timings(self) -> dict[str, Any]:
        """llama-server's `timings`. cache_n: prompt tokens that were not computed; prompt_n: those that were."""
        computed = self.num_prompt - self.num_cached
        return {
            "cache_n": self.num_cached,
            "prompt_n": computed,
            **_rates("prompt", computed, self.prompt_time),
            "predicted_n": self.num_generated,
            **_rates("predicted", self.num_generated, self.generation_time),
            "queue_ms": self.queue_time * 1000,
        }

    def slotcache(self) -> dict[str, Any]:
        """Our own object in the answer: where it ran, what it reused, and why not more."""
        return {
            "lane": self.lane,
            "source": self.source,
            "cached_tokens": self.num_cached,
            "documents": self.documents,
            "repeated": self.repeated,
            "miss": self.miss,
            "preempted": self.num_preempted,
        } | ({} if self.conversation is None else {"conversation": self.conversation})

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_generated,
            "total_tokens": self.num_prompt + self.num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }


def _rates(name: str, tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / max(tokens, 1),
        f"{name}_per_second": tokens / seconds if seconds else 0.0,
    }


@dataclass(slots=True, eq=False)
class Generation:
    """The engine's view of a request beside the scheduler's. limit 0: compute the prompt, generate nothing.

    abandoned: its client has gone, and the engine is to let go of it. conclude: called in the event loop when the engine
    has ended it, before its client can read so.
    """

    request: Request
    sampling: Sampling
    text: TextStream
    limit: int
    scope: str = ""
    wants_progress: bool = False
    no_cache_reason: str | None = None  # why nothing may be reused, where that is so
    turn: Turn | None = None  # of a chat, until it has ended
    sampled: np.ndarray | None = None  # the ids (int32) of the whole answer, once they are known to spell its text exactly
    events: Unread = field(default_factory=Unread)
    parts: list[str] = field(default_factory=list)  # the text so far
    arrived: float = field(default_factory=perf_counter)
    admitted: float = 0.0
    first_token: float = 0.0
    done: bool = False
    abandoned: bool = False
    conclude: Conclude = _as_it_is

    def deliver(self, event: Event) -> None:
        """Hand an event to the client; runs in the event loop."""
        self.events.put(self.conclude(self, event) if isinstance(event, End | Failure) else event)

    @property
    def num_generated(self) -> int:
        return self.request.num_tokens - self.request.num_prompt

    def push(self, token: int, is_end: bool) -> Event | None:
        """Take the next token (already appended to the request); what to send for it. An End ends the generation."""
        if not self.first_token:
            self.first_token = perf_counter()
        if self.limit == 0:
            return self._end("", "length")
        if is_end:
            return self._end(self.text.finish(), "stop")
        text = self.text.push(token)
        if self.text.stopped is not None:
            return self._end(text, "stop")
        if self.num_generated >= self.limit:
            return self._end(text + self.text.finish(), "length")
        self.parts.append(text)
        return Delta(text) if text else None

    def progress(self) -> Progress:
        request = self.request
        spent = (perf_counter() - self.admitted) * 1000
        return Progress(request.num_prompt, request.cached, min(request.computed, request.num_prompt), spent)

    def _end(self, text: str, reason: str) -> End:
        self.parts.append(text)
        return End(text, reason, self._report())

    def _report(self) -> Report:
        request, now = self.request, perf_counter()
        layout = request.layout
        assert layout is not None
        cached = request.cached
        documents = [
            {
                "id": document.id,
                "tokens": document.stop - document.start,
                "cached_tokens": min(max(cached - document.start, 0), document.stop - document.start),
            }
            for document in layout.documents
        ]
        return Report(
            lane=request.lane,
            source=request.source,
            num_prompt=request.num_prompt,
            num_cached=cached,
            num_generated=self.num_generated if self.limit else 0,
            stop=self.text.stopped,
            documents=documents,
            repeated=layout.repeated,
            miss=self._miss(),
            queue_time=self.admitted - self.arrived,
            prompt_time=self.first_token - self.admitted,
            generation_time=now - self.first_token,
            num_preempted=request.num_preempted,
        )

    def _miss(self) -> dict[str, Any] | None:
        """Where reuse ended and why; None where all but its last tokens, which are always computed, was reused."""
        request = self.request
        assert request.layout is not None
        if request.cached >= request.num_prompt - request.rest:
            return None
        why = self.no_cache_reason or f"{request.layout.segment_at(request.cached)} is not cached here"
        return {"at": request.cached, "why": why}
