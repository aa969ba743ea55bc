"""A generation turns the tokens of one answer into text, detects its end, and makes events for the event loop.

Each generation ends with one final event, an End or a Failure, unless its client has disconnected. The engine closes the
generation as soon as it sends the final event. So a client that reads slowly, or not at all, cannot keep a generation open.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter

import numpy as np

from ...models.detokenizer import TextStream
from ...models.sampling import Logprobs
from ...models.sampling_params import Sampling
from ...slots.job import Job
from ...slots.request import Layout, Request
from ..http.api_errors import RequestError
from .usage import (
    LONGEST,
    Change,
    Fields,
    Miss,
    Reordering,
    Report,
    Reused,
    changed_piece,
    document_reuse,
    first_gap,
    reordering,
    segment_reuse,
    timings,
    volatile_span,
)

# ---- Events of a generation, and the mailbox for its client. ------------------------------------------------------------

MAX_PROGRESS = 8  # most unread progress events
MAX_PIECES = 8  # most unread pieces of text that are sent one by one; more pieces are joined
MAX_UNSENT = 64  # pieces of an unstreamed answer that the event loop gets in one event


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of the answer's text, with its tokens.

    logprobs: one entry for each token, if the request asks for logprobs. num_generated: the number of the answer's tokens up
    to the end of this piece. is_last: whether the answer ends with this piece. kept: how many characters of the last token
    with logprobs are in the answer, since a stop string may cut a token; None if the whole token is in the answer.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    num_generated: int = 0
    is_last: bool = False
    kept: int | None = None


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """The progress of a prefill.

    total: the number of the prompt's tokens. cache: how many of the prompt's tokens were cached. processed: how many of the
    prompt's tokens have KV now, including the cached tokens.
    """

    total: int
    cache: int
    processed: int
    time_ms: float

    def timings(self) -> Fields:
        """Return the progress in the form of llama-server's `timings`."""
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
    """The last piece of an answer, with its tokens.

    reason: `stop` or `length`. logprobs, kept: as in `Delta`; tokens that lie wholly in a stop string have no logprobs.
    sampled: the token ids (int32) of the whole answer, if they may be kept and spell the answer's text exactly; else None.
    prompt: the prompt's text, if the answer repeats it. The engine leaves `prompt` empty, and the reader of the event sets
    it.
    """

    text: str
    reason: str
    report: Report
    sampled: np.ndarray | None = None
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    kept: int | None = None
    prompt: str = ""

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended at a limit of tokens or time."""
        return self.reason == "length"

    def delta(self) -> Delta:
        num_generated = self.report.num_generated
        return Delta(self.text, self.tokens, self.logprobs, num_generated=num_generated, is_last=True, kept=self.kept)


@dataclass(frozen=True, slots=True)
class Failure:
    """The final event of an answer that ends with an error."""

    error: RequestError


Final = End | Failure
Event = Delta | PromptProgress | Final


class Unread:
    """The events that a client has not read yet: some progress events, the text, and the final event.

    Only the event loop may use it. If a client reads slowly, its pieces of text are joined into one longer piece. If a
    client never reads, at most its answer and `MAX_PROGRESS` progress events are kept.

    take_now: a function that may deliver a new piece of text at once, which saves a turn of the event loop. `put` calls
    `take_now` if `get` is waiting. If `take_now` returns True, it has delivered the piece. If `take_now` returns False,
    `get` returns the piece.
    """

    __slots__ = ("_arrived", "_final", "_is_awaited", "_is_closed", "_progress", "_text", "take_now")

    def __init__(self) -> None:
        self.take_now: Callable[[Delta], bool] | None = None
        self._is_awaited = self._is_closed = False
        self._progress: deque[PromptProgress] = deque()  # the earliest events, and the newest event
        self._text: list[Delta] = []
        self._final: Final | None = None
        self._arrived = asyncio.Event()

    def qsize(self) -> int:
        """Return how many calls of `get` would return without waiting."""
        num_pieces = len(self._text) if len(self._text) <= MAX_PIECES else 1
        return len(self._progress) + num_pieces + (self._final is not None)

    def close(self) -> None:
        """Drop all unread and later events, because nobody will read them."""
        self._is_closed, self.take_now = True, None
        self._progress.clear()
        self._text.clear()

    def put(self, event: Event) -> None:
        if self._is_closed:
            return
        if self._is_awaited and self.take_now is not None and isinstance(event, Delta) and self.take_now(event):
            return
        self._is_awaited = False
        match event:
            case Delta():
                self._text.append(event)
            case PromptProgress():
                if len(self._progress) == MAX_PROGRESS:
                    self._progress.pop()
                self._progress.append(event)
            case End() | Failure():
                self._final = self._final or event  # the first final event counts
        self._arrived.set()

    async def get(self) -> Event:
        self._is_awaited = not self._arrived.is_set()
        try:
            await self._arrived.wait()
        finally:
            self._is_awaited = False
        event = self._take()
        if not self.qsize():
            self._arrived.clear()
        return event

    def _take(self) -> Event:
        event: Event | None
        if self._progress:  # progress precedes all text
            event = self._progress.popleft()
        elif self._text:
            event = self._take_text()
        else:
            event, self._final = self._final, None
        assert event is not None
        return event

    def _take_text(self) -> Delta:
        """Remove and return the first piece. If more than `MAX_PIECES` pieces wait, return all of them, joined."""
        if len(self._text) <= MAX_PIECES:
            return self._text.pop(0)
        joined, self._text = _join(self._text), []
        return joined


def _join(deltas: Sequence[Delta]) -> Delta:
    """Join several pieces into one."""
    tokens = tuple(chain.from_iterable(delta.tokens for delta in deltas))
    logprobs = tuple(chain.from_iterable(delta.logprobs for delta in deltas))
    return Delta("".join(delta.text for delta in deltas), tokens, logprobs, deltas[-1].num_generated)


# ---- The unsent part of an answer: text and tokens. ---------------------------------------------------------------------


@dataclass(slots=True)
class Pending:
    """The tokens of an answer that are not sent yet, and as much of their text as may be sent.

    Text is held back while it may be part of a stop string. The field `text` does not contain the text that is held back.

    shows_logprobs: whether the answer shows logprobs. If the answer shows logprobs, text is sent only in whole tokens, so
    that the sent tokens spell the sent text. If the answer shows no logprobs, `text` is sent with all tokens, even if the
    text of the last tokens is still held back. logprobs: one entry for each token. ends: the end of each token's text, as a
    position in `text`. If the token's text is held back, the position lies beyond the end of `text`.
    """

    shows_logprobs: bool
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    text: str = ""

    def push(self, token: int, logprobs: Logprobs | None) -> None:
        """Add a token. logprobs: None if a grammar determined the token, or if the answer shows no logprobs."""
        self.tokens.append(token)
        if self.shows_logprobs:
            self.logprobs.append(logprobs or Logprobs.certain(token))

    def settle(self, text: str, num_unsettled: int) -> None:
        """Add the text that may be sent now that the last token was pushed.

        num_unsettled: the number of characters after this text that are still held back.
        """
        self.text += text
        if self.shows_logprobs:
            self.ends.append(len(self.text) + num_unsettled)

    def take(self) -> tuple[str, tuple[int, ...], tuple[Logprobs, ...]]:
        """Remove and return the text that may be sent, its tokens and their logprobs.

        If no text may be sent, return empty values, and keep the tokens until more text may be sent.
        """
        text, number = self.text, len(self.tokens)
        if self.shows_logprobs:
            number = sum(end <= len(text) for end in self.ends)
            text = text[: self.ends[number - 1]] if number else ""
        if not text:
            return "", (), ()
        taken = text, tuple(self.tokens[:number]), tuple(self.logprobs[:number])
        self.text, self.tokens, self.logprobs = self.text[len(text) :], self.tokens[number:], self.logprobs[number:]
        self.ends = [end - len(text) for end in self.ends[number:]]
        return taken

    def cut(self) -> int | None:
        """Drop the logprobs of tokens that lie wholly in the stop string that ended the answer.

        Return how many characters of the last token with logprobs are in the text. Return None if no token has logprobs.
        """
        begins = [0, *self.ends][: len(self.logprobs)]
        number = sum(begin < len(self.text) for begin in begins)
        del self.logprobs[number:]
        return len(self.text) - begins[number - 1] if number else None


AROUND = 32  # tokens before and after a miss that are searched for volatile text
OPENING = 8  # tokens quoted before a changed piece, since the piece may start within a word

OnEnd = Callable[["Generation", Final], Final]
"""Takes a generation and its final event, and returns the final event for the client."""


@dataclass(slots=True, eq=False, kw_only=True)
class Generation:
    """One answer to a request, as the engine sees it. The scheduler's state of the request is its `Job`.

    id: the answer's id for its client. limit: the most tokens to generate; 0: only compute the prompt. wanted: the limit
    that the request sets, even if the context is too short for it; -1 if the request sets none. scope: the client's name of
    the cache scope. no_cache_reason: why the request may reuse no KV; None if the request may reuse KV. spells: returns
    whether token ids (int32) spell a text byte for byte. The ids of an answer are kept only if they spell its text, and
    never if `spells` is None. is_whole: whether the client gets the text only at the end. on_end: called in the event loop
    after the engine has ended the generation and before the client can read the end. outlives_client: whether the generation
    goes on if its client disconnects. is_unattended: whether the client has disconnected and the generation goes on.
    abandoned: whether the client has disconnected and the engine is about to end the generation. first: the generation of
    the prompt's first choice; None if this generation is the first choice.
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
    is_whole: bool = False
    outlives_client: bool = False
    is_unattended: bool = False
    no_cache_reason: str | None = None
    spells: Callable[[np.ndarray, str], bool] | None = None
    detokenize: Callable[[np.ndarray], str] = lambda tokens: ""
    on_end: OnEnd = lambda generation, event: event
    events: Unread = field(default_factory=Unread)
    parts: list[str] = field(default_factory=list)  # the text so far
    unsent: list[Delta] = field(default_factory=list)  # unsent pieces, if `is_whole`
    job: Job = field(init=False)  # set when the generation is submitted
    pending: Pending = field(init=False)
    arrived: float = field(default_factory=perf_counter)
    admitted: float = 0.0
    is_primed: bool = False  # whether the sampler has seen the prompt
    first: Generation | None = None
    question: bytes = b""  # the user's last message, as JSON; empty for a text
    num_pushed: int = 0  # tokens of the answer passed to `push`
    num_sent: int = 0  # prompt tokens sent with their logprobs
    first_token: float = 0.0
    patience: float = 0.0  # seconds after the first token until an answer ends once it has a whole line; 0: never
    has_line: bool = False
    final: Final | None = None  # set when the client can read it
    done: bool = False
    abandoned: bool = False

    def __post_init__(self) -> None:
        self.pending = Pending(shows_logprobs=self.sampling.n_probs is not None)

    def deliver(self, event: Event) -> None:
        """Queue an event for the client. Runs in the event loop."""
        if isinstance(event, End | Failure):
            event = self.final = self.on_end(self, event)
        self.events.put(event)

    @property
    def num_generated(self) -> int:
        return self.job.num_generated

    @property
    def num_echoed(self) -> int:
        """The number of prompt tokens that the answer repeats with their logprobs: all of them, or 0."""
        return self.request.prompt.num_tokens if self.request.scores_prompt else 0

    @property
    def is_past_half(self) -> bool:
        """Whether the prefill stopped after more than half of the prompt, but before the prompt's end."""
        if not self.admitted or self.job.is_reading:
            return False
        return self.job.num_prompt < 2 * self.job.computed < 2 * self.job.num_prompt

    def is_turn_of(self, request: Generation) -> bool:
        """Return whether this generation computes the prompt of `request` ahead.

        The two generations must have the same scope. The question of this generation must be the question of `request`, or
        the start of that question, as when a person was still typing.
        """
        return request.scope == self.scope and request.question.startswith(self.question.removesuffix(b'"}'))

    def push(self, token: int, is_end: bool, logprobs: Logprobs | None = None) -> Event | None:
        """Add the job's newest token, and return the event to send to the client; None if there is nothing to send yet.

        If the event is an End, the caller has to end the generation. logprobs: as in `Pending.push`.
        """
        self.num_pushed += 1
        if not self.first_token:
            self.first_token = perf_counter()
        if self.limit == 0:
            return self._end("", "length", is_end)
        self.pending.push(token, logprobs)
        if is_end:
            return self._end(self.text.finish(), "stop", is_end)
        text = self.text.push(token)
        if self.text.stopped is not None:
            return self._end(text, "stop", is_end)
        if self.num_generated >= self.limit or self._is_late(text):
            return self._end(text + self.text.finish(is_cut=True), "length", is_end)
        self.parts.append(text)
        self.pending.settle(text, self.text.num_unsettled)
        sent, tokens, shown = self.pending.take()
        num_generated = self.num_generated - len(self.pending.tokens)
        return Delta(sent, tokens, shown, num_generated=num_generated) if sent else None

    def collect(self, delta: Delta) -> Delta | None:
        """Keep a piece of an answer whose client gets the text only at the end.

        Once `MAX_UNSENT` pieces are kept, return all of them as one piece.
        """
        self.unsent.append(delta)
        return self.take_unsent() if len(self.unsent) >= MAX_UNSENT else None

    def take_unsent(self) -> Delta | None:
        """Remove the kept pieces, and return them as one piece, or None if no piece is kept."""
        unsent, self.unsent = self.unsent, []
        return _join(unsent) if unsent else None

    def send_prompt(self, start: int, logprobs: Sequence[Logprobs]) -> Delta:
        """Return the prompt tokens in `logprobs` that were not sent before, as an event without text.

        If a request was paused, the engine computes some of its prompt tokens again, so `logprobs` may have tokens that were
        already sent. start: the prompt position of the first entry of `logprobs`.
        """
        new = tuple(logprobs[self.num_sent - start :])
        self.num_sent += len(new)
        return Delta("", tuple(one.token for one in new), new)

    def _is_late(self, text: str) -> bool:
        """Return whether the answer's time is up and the answer has a whole line. text: the answer's newest piece."""
        if not self.patience:
            return False
        self.has_line = self.has_line or "\n" in text
        return self.has_line and perf_counter() - self.first_token > self.patience

    def progress(self, now: float) -> PromptProgress:
        """Return the progress of the prefill."""
        job = self.job
        spent = (now - self.admitted) * 1000
        return PromptProgress(job.num_prompt, job.reuse.cached, min(job.computed, job.num_prompt), spent)

    def timings(self, num_generated: int) -> Fields:
        """Return llama-server's `timings` of the answer so far. Call this in the event loop, after the first token."""
        return timings(
            num_cached=self.job.reuse.cached,
            num_computed=self.job.num_prompt - self.job.reuse.cached,
            num_generated=num_generated,
            queue_time=self.admitted - self.arrived,
            prompt_time=self.first_token - self.admitted,
            generation_time=perf_counter() - self.first_token,
            drafts=self._drafts,
        )

    @property
    def _drafts(self) -> tuple[int, int]:
        draft = self.request.draft
        return (0, 0) if draft is None else (draft.num_drafted, draft.num_accepted)

    def _end(self, text: str, reason: str, is_end: bool) -> End:
        self.parts.append(text)
        pending = self.pending
        pending.text += text
        kept = pending.cut() if self.text.stopped is not None else None
        shown, sampled = tuple(pending.logprobs), self._sampled(is_end)
        return End(
            pending.text, reason, self._report(), sampled=sampled, tokens=tuple(pending.tokens), logprobs=shown, kept=kept
        )

    def _sampled(self, is_end: bool) -> np.ndarray | None:
        """Return the answer's token ids without the end token, if they spell the sent text exactly.

        The check loops over the whole answer. So `_sampled` runs only once for an answer, and not in the event loop, which
        has to serve all streams.
        """
        if self.spells is None:
            return None
        job, text = self.job, "".join(self.parts)
        tokens = job.tokens[job.num_prompt : job.num_tokens - is_end]
        return tokens.copy() if text and self.spells(tokens, text) else None

    def _report(self) -> Report:
        job, reuse, now = self.job, self.job.reuse, perf_counter()
        layout = job.layout
        return Report(
            slot=job.slot,
            source=reuse.source,
            num_prompt=job.num_prompt,
            num_cached=reuse.cached,
            num_generated=self.num_generated if self.limit else 0,
            stop=self.text.stopped,
            documents=document_reuse(layout, self._reused(layout)),
            documents_attention="separate" if layout.in_pieces else None,
            repeated=layout.repeated,
            miss=self._miss(),
            queue_time=self.admitted - self.arrived,
            prompt_time=self.first_token - self.admitted,
            generation_time=now - self.first_token,
            num_preempted=reuse.num_preempted,
            num_drafted=self._drafts[0],
            num_accepted=self._drafts[1],
            fetch_time=reuse.fetch_seconds,
            segments=segment_reuse(layout, reuse.spans, self.request.scope.adapters) if self.wants_segments else None,
            reordered=self._reordered(),
        )

    def _reordered(self) -> Reordering | None:
        """Return what the order of the documents gained.

        All choices of a prompt report the first choice's gain. The other choices reuse the first choice's KV, so the order
        of the documents gains nothing for them.
        """
        leader = self.first or self
        return reordering(
            leader.job.layout, leader.job.reuse.cached, leader._seconds if leader.first_token else self._seconds
        )

    def _seconds(self, start: int, stop: int) -> float:
        """Estimate the prefill seconds of the prompt's tokens at positions [start, stop).

        Each reused token adds the time that its reuse saved. Each other token adds the average time of a computed token.
        """
        saved, reused = 0.0, 0
        for span in self.job.reuse.spans:
            shared = max(min(span.stop, stop) - max(span.start, start), 0)
            saved, reused = saved + span.seconds * shared / (span.stop - span.start), reused + shared
        return saved + (stop - start - reused) * self._seconds_each

    @property
    def _seconds_each(self) -> float:
        """The average time to compute a token of the prompt, in seconds."""
        return (self.first_token - self.admitted) / max(self.job.num_prompt - self.job.reuse.cached, 1)

    def _reused(self, layout: Layout) -> Reused:
        """Return the reused positions: a prefix of the prompt, or several parts of it if `in_pieces` or `has_hole`."""
        reuse = self.job.reuse
        return (
            [(span.start, span.stop) for span in reuse.spans] if layout.in_pieces or reuse.has_hole else [(0, reuse.cached)]
        )

    def _miss(self) -> Miss | None:
        """Return where and why reuse ended.

        Return None if all tokens were reused, except the last ones, which must be computed.
        """
        job, layout, cached = self.job, self.job.layout, self.job.reuse.cached
        if cached >= job.num_prompt - job.recompute_last:
            return None
        if self.no_cache_reason:
            return {"at": cached, "why": self.no_cache_reason}
        at = first_gap(self._reused(layout))
        why = layout.segment_at(at).miss
        volatile = self._volatile(at) if layout.splits(at) else None
        miss: Miss = {"at": at, "why": f"{why}: {volatile} differs" if volatile else why}
        if change := self._change(at):
            miss["changed"] = change
        return miss

    def _change(self, at: int) -> Change | None:
        """Return the piece of the prompt that differs from an earlier prompt of the scope, if equal text follows in both.

        The piece of the earlier prompt is shown only in a named scope, since only clients that know the name can see it
        there. In the common scope, every client could see this piece of another client's prompt.
        """
        job = self.job
        if job.sequence is None or job.layout.in_pieces:
            return None
        piece = changed_piece(job.sequence.last_node, job.tokens[: job.num_prompt], at)
        if piece is None:
            return None
        opening = job.tokens[max(at - OPENING, 0) : at]
        after, before = (self.detokenize(np.concatenate((opening, part)))[:LONGEST] for part in (piece.after, piece.before))
        ms = round(1000 * piece.num_after * self._seconds_each, 1)
        change: Change = {"after": after, "tokens": piece.num_after, "ms": ms}
        if self.scope:
            change["before"] = before
        return change

    def _volatile(self, at: int) -> str | None:
        """Return the volatile text at a position of the prompt, and its kind.

        Return None if the text at this position is not volatile.
        """
        tokens = self.job.ids(0, self.job.num_prompt)
        before = self.detokenize(tokens[max(at - AROUND, 0) : at])
        return volatile_span(before + self.detokenize(tokens[at : at + AROUND]), len(before))


# ---- Account ------------------------------------------------------------------------------------------------------------
# The figures of a request for the log: how much was reused, why not more, and how fast it was. They contain no text. The
# report, `timings`, `GET /slots` and the metrics use the same names.


def account(generations: Sequence[Generation]) -> Fields:
    """Return the figures of a request for the log. generations: the choices of the request.

    The prompt's figures are those of the first generation that ended with an End. If no generation ended with an End, the
    only figure is `end`, which says how the choices ended.
    """
    ends = [(generation, generation.final) for generation in generations if isinstance(generation.final, End)]
    how: Fields = {"end": ", ".join(dict.fromkeys(_end(generation) for generation in generations))}
    if not ends:
        return how
    generation, end = ends[0]
    report, steps = end.report, end.report.num_generated - 1
    return {
        "prompt_tokens": report.num_prompt,
        "prefix_cache_tokens": report.num_cached,
        "prefix_cache_ratio": round(report.prefix_cache_ratio, 3),
        "source": report.source,
        **_miss(generation, report),
        "generated_tokens": sum(end.report.num_generated for _, end in ends),
        "ttft_ms": round(1000 * (report.queue_time + report.prompt_time), 1),
        "predicted_per_second": round(steps / report.generation_time, 1) if steps > 0 else None,
        **({"choices": len(generations)} if len(generations) > 1 else {}),
        **how,
    }


def _end(generation: Generation) -> str:
    if generation.final is None:
        return "unattended" if generation.is_unattended else "cancelled"
    return generation.final.reason if isinstance(generation.final, End) else "error"


def _miss(generation: Generation, report: Report) -> Fields:
    """Return where reuse ended, and in which part of the prompt.

    The result omits the ids of documents, because clients write these ids.
    """
    layout = generation.job.layout
    if report.miss is None:
        return {}
    at = report.miss["at"]
    in_document = any(document.start <= at < document.stop for document in layout.documents)
    part = "a document" if in_document else layout.segment_at(at).label
    return {"miss": generation.no_cache_reason or part, "miss_at": at}


# ---- Outbox -------------------------------------------------------------------------------------------------------------
# Events from the engine to the event loop: one call per step for all streams.

logger = logging.getLogger("slotcache.engine")


class Outbox:
    """The events of a step, in order. The engine's thread adds events, and sends them to the event loop."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._events: list[tuple[Generation, Event]] = []

    def put(self, generation: Generation, event: Event) -> None:
        self._events.append((generation, event))

    def send(self) -> None:
        """Pass the events to the event loop, in a single call."""
        if not self._events:
            return
        events, self._events = self._events, []
        self.call(_deliver, events)

    def call(self, act: Callable[..., object], *arguments: object) -> None:
        """Call a function in the event loop."""
        assert self.loop is not None
        try:
            self.loop.call_soon_threadsafe(act, *arguments)
        except RuntimeError:  # the loop is closed, so there are no streams
            logger.debug("%s after the loop closed", act)


def _deliver(events: Sequence[tuple[Generation, Event]]) -> None:
    """Deliver events to their streams. Runs in the event loop. An error in one stream does not affect other streams."""
    for generation, event in events:
        try:
            generation.deliver(event)
        except Exception:
            logger.exception("the end of a request could not be dealt with")
            generation.events.put(Failure(RequestError("the server failed at the end of this", status=500)))
