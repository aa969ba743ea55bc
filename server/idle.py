"""Idle prefill: compute what the next requests will begin with while the server has none.

First the next turn of each conversation: its history as the template shows it then, up to the user's message. That is the
answer's last token, the tokens that end it, and the whole answer where the template changes it (drops its reasoning, say).

Then, with --idle-sets, likely prompts of new chats. Only a prefix can be reused: a chat that read documents 1 to 5 does not
help a new chat that starts with document 3. So idle prefill brings sets of the documents to the front of a prompt: each
document alone, then pairs, and larger sets.

Last, with --read-ahead, documents of the server that no chat has asked about yet (`retrieving.beginnings`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from sys import getsizeof

from ..slots.scope import Scope
from .chat.builder import PromptBuilder
from .chat.history import Entry
from .chat.parts import DocumentSet
from .chat.prompt import ChatPrompt, SeparatePrompt
from .chat.threads import LARGE
from .engine.backlog import Backlog
from .engine.door import Door
from .engine.view import End, Failure, Generation, View
from .errors import RequestError
from .intake import Intake
from .retrieving.beginnings import Beginning, Beginnings, Front
from .wire.decoding import decode
from .wire.requests import ChatRequest

logger = logging.getLogger("slotcache.idle")
KEY = "idle"  # of the one generation that the engine has of it
MAX_WAITING = 64  # answers in the backlog; beyond that the oldest leave
MAX_BYTES = 32 << 20  # of memory that the backlog may keep
PAUSE = 0.005  # s without a request before work begins: one that was accepted is submitted by then


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredChat:
    """A conversation up to an answer. request: the one that was answered; options: as JSON, without its messages.

    found: the ids of the documents that the server found for it; None if the request did not ask for them.
    """

    request: int
    scope: Scope
    options: bytes
    entries: tuple[Entry, ...]
    found: Sequence[str] | None = None

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return getsizeof(self.options) + getsizeof(self.entries) + sum(entry.num_bytes for entry in self.entries)


@dataclass(frozen=True, slots=True, eq=False)
class LikelyPrompts:
    """Prompts that new chats of a scope may begin with, the likeliest first."""

    scope: Scope
    prompts: deque[ChatPrompt]


class IdlePrefill:
    """Computes next turns in the order of the answers, then likely prompts, those of the newest answer first.

    Last come beginnings of prompts about the server's documents. Its generations are in the engine's background, one at a
    time. A request that arrives aborts the current one; idle prefill resumes when the server is idle. It belongs to the
    event loop.

    open: requests that the engine has not ended yet. num_arriving: those whose prompts are being made. next_turns: whether
    to compute next turns. num_sets: most sets of an answer's documents to bring to the front. beginnings: of prompts about
    the server's documents, once these are open.
    """

    def __init__(
        self,
        door: Door,
        view: View,
        builder: PromptBuilder,
        intake: Intake,
        *,
        open: Collection[Generation],
        next_turns: bool,
        num_sets: int,
    ) -> None:
        self._door, self._view, self._builder, self._intake = door, view, builder, intake
        self._open, self.num_arriving = open, 0
        self._next_turns, self._num_sets = next_turns, num_sets
        self._answers: Backlog[AnsweredChat] = Backlog(MAX_WAITING, MAX_BYTES)
        self._sets: Backlog[LikelyPrompts] = Backlog(MAX_WAITING, MAX_BYTES)
        self.beginnings: Beginnings | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        """Whether nothing is left to compute."""
        return not (self._task or self._has_work)

    @property
    def _has_work(self) -> bool:
        return bool(self._answers or self._sets or (self.beginnings and self.beginnings.has_more))

    @property
    def num_bytes(self) -> int:
        """Memory that the backlog takes, about."""
        return self._answers.num_bytes + self._sets.num_bytes

    def add(self, answered: AnsweredChat, prompt: ChatPrompt) -> None:
        """Queue what may follow an answer. prompt: the one that was answered."""
        if self.beginnings and answered.found is not None:
            self.beginnings.note(Front.of(answered.scope, answered.options, answered.entries), answered.found)
        if self._next_turns:
            self._answers.add(answered, answered.num_bytes)
        is_first = sum(entry.role == "user" for entry in answered.entries) == 1
        if is_first and (prompts := deque(itertools.islice(likely_prompts(prompt), self._num_sets))):
            self._sets.add(LikelyPrompts(answered.scope, prompts), answered.num_bytes)

    def resume(self) -> None:
        """Start to compute, unless a request is open or arrives, nothing is left, or it runs already."""
        is_idle = not (self._open or self.num_arriving)
        if is_idle and self._task is None and self._has_work:
            self._task = asyncio.get_running_loop().create_task(self._work())

    def look_again(self) -> None:
        """Read ahead what is likely now: the server's documents have changed, or KV of an earlier start is back."""
        if self.beginnings is not None:
            self.abort()
            self.beginnings.renew()
            self.resume()

    def stop(self) -> None:
        """Stop for a request that is about to be submitted: the engine drops its background by itself then."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    @contextmanager
    def giving_way(self) -> Iterator[None]:
        """Leave all cores to a request that arrives, while its prompt is made. It may be refused, or its client may go."""
        self.num_arriving += 1
        if self._task is not None:
            self.abort()
        try:
            yield
        finally:
            self.num_arriving -= 1
            self.resume()

    def abort(self) -> None:
        """Stop, and take the current generation out of the engine. What it has computed stays cached."""
        self.stop()
        self._door.drop_background(KEY)

    def forget(self, scope: str) -> None:
        """Abort, and drop the scope's part of the backlog."""
        self.abort()
        for answered in [answered for answered in self._answers if answered.scope.name == scope]:
            self._answers.remove(answered)
        for sets in [sets for sets in self._sets if sets.scope.name == scope]:
            self._sets.remove(sets)
        if self.beginnings is not None:
            self.beginnings.forget(scope)

    async def _work(self) -> None:
        try:
            await asyncio.sleep(PAUSE)
            while self._answers:
                answered = self._answers.oldest
                if not await self._prefill_next_turn(answered):
                    return
                self._answers.remove(answered)
            while self._sets:
                sets = self._sets.newest
                if not await self._prefill(sets.prompts[0], sets.scope, guess=True):
                    return
                sets.prompts.popleft()
                if not sets.prompts:
                    self._sets.remove(sets)
            while self.beginnings and (beginning := await self.beginnings.next()):
                if not await self._read_ahead(beginning):
                    return
                self.beginnings.count(beginning)
        except RequestError as error:  # the engine has ended
            logger.debug("nothing more is computed ahead: %s", error)
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    async def _prefill_next_turn(self, answered: AnsweredChat) -> bool:
        """Prefill the beginning of the turn after an answer. False: stop for now."""
        try:
            # In the builder's threads, since those end before the model is freed. The backlog bounds the bytes that wait, so
            # here an answer counts as the smallest large request, and leaves the room to the prompts of clients.
            size = min(answered.num_bytes, LARGE)
            prompt = await self._builder.threads.run(size, self._next_prompt, answered)
            return prompt is None or await self._prefill(prompt, answered.scope, follows=answered.request)
        except RequestError:
            raise
        except Exception:
            logger.exception("the start of a next turn could not be computed ahead")
            return True

    async def _read_ahead(self, beginning: Beginning) -> bool:
        """Prefill the beginning of a prompt that no client has asked for. False: stop for now."""
        prompt, scope = beginning.prompt, beginning.scope
        return await self._view.make_room(prompt, scope) and await self._prefill(prompt, scope, guess=True)

    def _next_prompt(self, answered: AnsweredChat) -> ChatPrompt | None:
        return self._builder.ahead(decode(answered.options, ChatRequest), answered.entries)

    async def _prefill(self, prompt: ChatPrompt, scope: Scope, guess: bool = False, follows: int | None = None) -> bool:
        """Prefill `prompt` into the cache. False: stop for now (a request came, the engine failed, or a guess would evict).

        True where it can never be cached, too: then the next one has its turn.
        """
        if prompt.num_tokens >= self._intake.limit:
            return True
        generation = self._intake.idle_prefill(prompt, scope, guess, follows)
        missing = await self._view.missing(prompt, scope)
        if not missing.tokens or not (missing.fits or guess):
            return True
        if not (missing.fits and missing.idle):
            return False
        if not await asyncio.wrap_future(self._door.submit_background(KEY, generation)):
            return False
        while not isinstance(event := await generation.events.get(), End | Failure):
            pass
        if isinstance(event, Failure):
            self._answers.clear()
            self._sets.clear()
            return False
        logger.debug("%d tokens of %d computed ahead", missing.tokens, event.report.num_prompt)
        return True


def likely_prompts(prompt: ChatPrompt) -> Iterator[ChatPrompt]:
    """Yield prompts that begin with some of the first documents of `prompt`: each alone, then pairs, and larger sets.

    Each has at most one document more than an earlier one. Nothing where the order of documents may not be chosen, nor where
    they are read separately: no chat would use a set of them.
    """
    if isinstance(prompt, SeparatePrompt):
        return
    first = next((part for part in prompt.parts if isinstance(part, DocumentSet)), None)
    if first is None or first.policy != "auto" or first.keep_first or first.keep_last:
        return
    before, ranks = prompt.parts[: prompt.parts.index(first)], range(len(first.documents))
    for chosen in itertools.chain.from_iterable(itertools.combinations(ranks, size + 1) for size in ranks):
        documents, tokens = [first.documents[rank] for rank in chosen], [first.tokens[rank] for rank in chosen]
        yield ChatPrompt([*before, DocumentSet(tuple(documents), tuple(tokens), first.policy, hint=None)])
