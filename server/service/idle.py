"""Work for idle time: abandoned prompts, follow-up turns, document sets, popular prefixes.

First the rest of each prompt whose client left when more than half of it was computed: it will ask again. Then the
beginning of a history that a client is about to shorten (`Compaction`).

Then the next turn of each conversation: its history as the template shows it then, up to the user's message. That is the
answer's last token, the tokens that end it, and the whole answer where the template changes it (drops its reasoning, say).

After these, with --idle-sets, likely prompts of new chats. Only a prefix can be reused: a chat that read documents 1 to 5
does not help a new chat that starts with document 3. So idle prefill brings sets of the documents to the front of a prompt:
each document alone, then pairs, and larger sets.

Last, with --read-ahead, documents of the server that no chat has asked about yet (`LikelyPrefixes`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from ..chat.chat_prompt import ChatPrompt
from ..chat.sessions import Sessions
from ..engine.generation import Generation
from ..http.api_errors import RequestError
from .ahead import AbandonedPrompt, Ahead, AheadFailed, AnsweredChat, LikelyPrompts, ShortenedChat, Work, likely_prompts
from .likely_prefixes import LikelyPrefixes, SharedPrefix

logger = logging.getLogger("slotcache.idle")
MAX_WAITING = 64  # answers in the backlog; beyond that the oldest leave
MAX_BYTES = 32 << 20  # of memory that the backlog may keep
PAUSE = 0.05  # s without a request before work begins: programs ask again sooner, and a step may take as long to end early


class Backlog:
    """Work in order of arrival, bounded in number and in bytes, since idle time may never come: the oldest leaves."""

    def __init__(self, max_number: int, max_bytes: int, *, oldest_first: bool = False) -> None:
        self.num_bytes = 0
        self._max_number, self._max_bytes, self._oldest_first = max_number, max_bytes, oldest_first
        self._items: dict[Work, int] = {}  # with the bytes of each

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Work]:
        return iter(self._items)

    @property
    def oldest(self) -> Work:
        return next(iter(self._items))

    @property
    def next(self) -> Work:
        """The item whose turn it is."""
        return self.oldest if self._oldest_first else next(reversed(self._items))

    def add(self, item: Work) -> None:
        """Add an item, unless it alone exceeds the bound in bytes."""
        self.remove(item)
        num_bytes = item.num_bytes
        if num_bytes > self._max_bytes:
            return
        self._items[item] = num_bytes
        self.num_bytes += num_bytes
        while len(self) > self._max_number or self.num_bytes > self._max_bytes:
            self.remove(self.oldest)

    def remove(self, item: Work) -> None:
        """Remove an item, if it is still here."""
        self.num_bytes -= self._items.pop(item, 0)

    def forget(self, scope: str) -> None:
        """Remove the items of a scope."""
        for item in [item for item in self if item.scope.name == scope]:
            self.remove(item)

    def clear(self) -> None:
        self._items.clear()
        self.num_bytes = 0


class IdlePrefill:
    """Computes abandoned prompts, next turns in the order of the answers, then likely prompts, the newest answer's first.

    Last come prefixes of prompts about the server's documents. Its generations are in the engine's background, one at a
    time. A request that arrives aborts the current one; idle prefill resumes when the server is idle. It belongs to the
    event loop.

    sessions: how each shortens its history. open: requests that the engine has not ended yet. num_arriving: those
    whose prompts are being made. next_turns: whether to compute abandoned prompts and next turns. num_sets: most sets of an
    answer's documents to bring to the front. prefixes: of prompts about the server's documents, once these are open.
    """

    def __init__(
        self, ahead: Ahead, sessions: Sessions, *, open: Collection[Generation], next_turns: bool, num_sets: int
    ) -> None:
        self._ahead, self._sessions, self._open, self.num_arriving = ahead, sessions, open, 0
        self._next_turns, self._num_sets = next_turns, num_sets
        self._abandoned, self._shortened = Backlog(MAX_WAITING, MAX_BYTES), Backlog(MAX_WAITING, MAX_BYTES)
        self._answers = Backlog(MAX_WAITING, MAX_BYTES, oldest_first=True)
        self._sets = Backlog(MAX_WAITING, MAX_BYTES)
        self._backlogs = (self._abandoned, self._shortened, self._answers, self._sets)  # in the order of their turns
        self.prefixes: LikelyPrefixes | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        """Whether nothing is left to compute."""
        return not (self._task or self._has_work)

    @property
    def _has_work(self) -> bool:
        return any(self._backlogs) or (self.prefixes is not None and self.prefixes.has_more)

    @property
    def num_bytes(self) -> int:
        """Memory that the backlog takes, about."""
        return sum(backlog.num_bytes for backlog in self._backlogs)

    def add(self, answered: AnsweredChat, prompt: ChatPrompt) -> None:
        """Queue what may follow an answer. prompt: the one that was answered."""
        if self.prefixes and answered.found is not None:
            self.prefixes.note(SharedPrefix.of(answered.scope, answered.options, answered.entries), answered.found)
        if self._next_turns:
            self._answers.add(answered)
            key = (answered.scope.name, answered.session)
            if (chat := self._sessions.note_chat(key, answered.options, answered.entries)) is not None:
                self._shortened.add(ShortenedChat(answered.scope, chat, answered.num_bytes))
        is_first = sum(entry.role == "user" for entry in answered.entries) == 1
        if is_first and (prompts := deque(itertools.islice(likely_prompts(prompt), self._num_sets))):
            self._sets.add(LikelyPrompts(answered.scope, prompts, answered.num_bytes))

    def add_abandoned(self, generation: Generation) -> None:
        """Queue the rest of a prompt whose client has gone, where more than half of it is computed and may be kept."""
        request = generation.request
        abandoned = AbandonedPrompt(request.prompt, request.index_scope, request.session)
        if self._next_turns and abandoned.scope.is_shared and generation.is_past_half:
            self._abandoned.add(abandoned)

    def resume(self) -> None:
        """Start to compute, unless a request is open or arrives, nothing is left, or it runs already."""
        is_idle = not (self._open or self.num_arriving)
        if is_idle and self._task is None and self._has_work:
            self._task = asyncio.get_running_loop().create_task(self._work())

    def look_again(self) -> None:
        """Read ahead what is likely now: the server's documents have changed, or KV of an earlier start is back."""
        if self.prefixes is not None:
            self.abort()
            self.prefixes.renew()
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
        self._ahead.drop()

    def forget(self, scope: str) -> None:
        """Abort, and drop the scope's part of the backlog."""
        self.abort()
        for backlog in self._backlogs:
            backlog.forget(scope)
        if self.prefixes is not None:
            self.prefixes.forget(scope)

    async def _work(self) -> None:
        try:
            await asyncio.sleep(PAUSE)
            for backlog in self._backlogs:
                while backlog:
                    work = backlog.next
                    if not await work.compute(self._ahead):
                        return
                    backlog.remove(work)
            if self.prefixes is not None:
                await self.prefixes.compute(self._ahead)
        except RequestError as error:  # the engine has ended
            logger.debug("nothing more is computed ahead: %s", error)
        except AheadFailed:
            self._clear()
        except Exception:  # what failed would be the next to be tried, for ever
            logger.exception("what waited for idle time is not computed ahead")
            self._clear()
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    def _clear(self) -> None:
        for backlog in self._backlogs:
            backlog.clear()
