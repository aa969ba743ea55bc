"""One accepted request on its way through the engine: its text so far, and the events that its client reads.

Every generation ends in exactly one final event, an End or a Failure, unless its client has gone. It is closed when the
engine sends that event: a client that does not read cannot keep a generation open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from ...models.sampling import Chances, Sampling
from ...models.text import TextStream
from ...slots.request import Request
from .events import Delta, End, Event, Failure, Final, Progress, Unread
from .report import Fields, Miss, Report, document_reuse, first_gap, moved_reuse, segment_reuse, timings
from .volatile import volatile_span

AROUND = 32  # tokens on either side of a miss that are searched for volatile text

OnEnd = Callable[["Generation", Final], Final]
"""Accounts for a generation's end; returns the final event for its client."""


def _pass_on(generation: Generation, event: Final) -> Final:
    return event


@dataclass(slots=True, eq=False, kw_only=True)
class Generation:
    """The engine's view of a request beside the scheduler's. limit 0: compute the prompt, generate nothing.

    wanted: the most tokens that the request asks for, which may be more than the context holds; -1: it sets no limit.
    id: the answer's, which its client gets. no_cache_reason: why nothing may be reused, where that is so. spells: whether
    ids (int32) are exactly the bytes of a text; None where the answer's ids may not be kept. on_end: called in the event
    loop when the engine has ended it, before its client can read the end. abandoned: its client has gone, and the engine is
    about to end it.
    """

    id: str
    request: Request
    sampling: Sampling
    text: TextStream
    limit: int
    wanted: int = -1
    scope: str = ""
    wants_progress: bool = False
    wants_segments: bool = False
    no_cache_reason: str | None = None
    spells: Callable[[np.ndarray, str], bool] | None = None
    detokenize: Callable[[np.ndarray], str] = lambda tokens: ""
    on_end: OnEnd = _pass_on
    events: Unread = field(default_factory=Unread)
    parts: list[str] = field(default_factory=list)  # the text so far
    unsent: list[int] = field(default_factory=list)  # tokens whose text is held back
    unsent_chances: list[Chances] = field(default_factory=list)  # of these, where they were asked for
    arrived: float = field(default_factory=perf_counter)
    admitted: float = 0.0
    is_primed: bool = False  # its sampler has seen the prompt
    first_token: float = 0.0
    patience: float = 0.0  # seconds for the answer after its first token, if it has a whole line by then; 0: no limit
    has_line: bool = False
    final: Final | None = None  # once its client can read it
    done: bool = False
    abandoned: bool = False

    def deliver(self, event: Event) -> None:
        """Put an event where the client reads it; runs in the event loop."""
        if isinstance(event, End | Failure):
            event = self.final = self.on_end(self, event)
        self.events.put(event)

    @property
    def num_generated(self) -> int:
        return self.request.num_tokens - self.request.num_prompt

    def push(self, token: int, is_end: bool, chances: Chances | None = None) -> Event | None:
        """Take the next token (already appended to the request); return its event. An End ends the generation.

        chances: its own; a token that no sampler chose has none.
        """
        if not self.first_token:
            self.first_token = perf_counter()
        if self.limit == 0:
            return self._end("", "length", is_end)
        self.unsent.append(token)
        if self.sampling.n_probs is not None:
            self.unsent_chances.append(chances or Chances.certain(token))
        if is_end:
            return self._end(self.text.finish(), "stop", is_end)
        text = self.text.push(token)
        if self.text.stopped is not None:
            return self._end(text, "stop", is_end)
        if self.num_generated >= self.limit or self._is_late(text):
            return self._end(text + self.text.finish(), "length", is_end)
        self.parts.append(text)
        return Delta(text, *self._take_unsent(), num_generated=self.num_generated) if text else None

    def _is_late(self, text: str) -> bool:
        """Whether the answer has had its time, and has a whole line. text: its newest piece."""
        if not self.patience:
            return False
        self.has_line = self.has_line or "\n" in text
        return self.has_line and perf_counter() - self.first_token > self.patience

    def progress(self, now: float) -> Progress:
        """Return how far the prompt is."""
        request = self.request
        spent = (now - self.admitted) * 1000
        return Progress(request.num_prompt, request.cached, min(request.computed, request.num_prompt), spent)

    def timings(self, num_generated: int) -> Fields:
        """Return llama-server's `timings` of the answer so far; for the event loop, after the first token."""
        return timings(
            num_cached=self.request.cached,
            num_computed=self.request.num_prompt - self.request.cached,
            num_generated=num_generated,
            queue_time=self.admitted - self.arrived,
            prompt_time=self.first_token - self.admitted,
            generation_time=perf_counter() - self.first_token,
            drafts=self._drafts,
        )

    @property
    def _drafts(self) -> tuple[int, int]:
        """Tokens drafted, and accepted."""
        draft = self.request.draft
        return (0, 0) if draft is None else (draft.num_drafted, draft.num_accepted)

    def _end(self, text: str, reason: str, is_end: bool) -> End:
        self.parts.append(text)
        if self.unsent_chances and self.text.cut:
            del self.unsent_chances[self.text.num_before_cut(self.unsent) :]
        tokens, chances = self._take_unsent()
        sampled = self._sampled(is_end)
        return End(text, reason, self._report(), sampled=sampled, tokens=tokens, chances=chances)

    def _take_unsent(self) -> tuple[tuple[int, ...], tuple[Chances, ...]]:
        tokens, chances = tuple(self.unsent), tuple(self.unsent_chances)
        self.unsent, self.unsent_chances = [], []
        return tokens, chances

    def _sampled(self, is_end: bool) -> np.ndarray | None:
        """Return the answer's ids without the end token, if as plain text they spell exactly the text that was sent.

        A loop over the whole answer, so it runs here, once, and not in the event loop, which serves every stream.
        """
        if self.spells is None:
            return None
        request, text = self.request, "".join(self.parts)
        tokens = request.tokens[request.num_prompt : request.num_tokens - is_end]
        return tokens.copy() if text and self.spells(tokens, text) else None

    def _report(self) -> Report:
        request, now = self.request, perf_counter()
        layout = request.layout
        assert layout is not None
        return Report(
            lane=request.lane,
            source=request.source,
            num_prompt=request.num_prompt,
            num_cached=request.cached,
            num_generated=self.num_generated if self.limit else 0,
            stop=self.text.stopped,
            documents=moved_reuse(layout, request.reused) if layout.moved else document_reuse(layout, request.cached),
            documents_attention="separate" if layout.moved else None,
            repeated=layout.repeated,
            miss=self._miss(),
            queue_time=self.admitted - self.arrived,
            prompt_time=self.first_token - self.admitted,
            generation_time=now - self.first_token,
            num_preempted=request.num_preempted,
            num_drafted=self._drafts[0],
            num_accepted=self._drafts[1],
            segments=segment_reuse(layout, request.reused, request.scope.adapters) if self.wants_segments else None,
        )

    def _miss(self) -> Miss | None:
        """Return where reuse ended and why; None where only the last tokens, which are always computed, were not reused."""
        request = self.request
        assert request.layout is not None
        if request.cached >= request.num_prompt - request.rest:
            return None
        if self.no_cache_reason:
            return {"at": request.cached, "why": self.no_cache_reason}
        at = first_gap(request.reused) if request.layout.moved else request.cached
        why = f"{request.layout.segment_at(at)} is not cached here"
        volatile = self._volatile(at) if request.layout.splits(at) else None
        return {"at": at, "why": f"{why}: {volatile} differs" if volatile else why}

    def _volatile(self, at: int) -> str | None:
        """Return the text at a token's place in the prompt, if it is of a kind that changes with each request."""
        tokens = self.request.ids(0, self.request.num_prompt)
        before = self.detokenize(tokens[max(at - AROUND, 0) : at])
        return volatile_span(before + self.detokenize(tokens[at : at + AROUND]), len(before))
