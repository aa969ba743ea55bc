"""Work for idle time: abandoned prompts, next turns, sets of documents, likely prefixes.

The kinds of work, in the order in which they are done:

1. The rest of a prompt whose client disconnected after more than half of the prompt was computed. The client is likely
   to send the request again.
2. The next prompt of a client that is about to shorten its history (`Compaction`).
3. The next turn of each conversation, up to the user's message. Most of the next turn's prompt is cached already. Only the
   answer's last token and the template's tokens after the answer are computed. If the template changes the answer, for
   example by dropping its reasoning, the whole answer is computed again.
4. With --idle-sets, prompts with which new chats are likely to start. Only a prefix can be reused: if one chat has documents
   1 to 5, its KV is useless to a chat that starts with document 3. Idle prefill therefore computes prompts with each
   document alone, then prompts with pairs of documents, then prompts with larger sets.
5. With --read-ahead, prompts that end with one of the server's likeliest documents (`LikelyPrefixes`). A prompt that is read
   ahead starts like the prompt of a chat that searches.
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
MAX_WAITING = 64  # items in a backlog; if there are more, the oldest are dropped
MAX_BYTES = 32 << 20  # bytes of memory for a backlog
PAUSE = 0.05  # seconds without a request before work starts: about a step's time, and longer than programs pause


class Backlog:
    """Items of work in order of arrival.

    The number of items and their bytes are bounded, since idle time may never come. If a bound is exceeded, the oldest items
    are dropped.
    """

    def __init__(self, max_number: int, max_bytes: int, *, oldest_first: bool = False) -> None:
        self.num_bytes = 0
        self._max_number, self._max_bytes, self._oldest_first = max_number, max_bytes, oldest_first
        self._items: dict[Work, int] = {}  # the bytes of each item

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Work]:
        return iter(self._items)

    @property
    def oldest(self) -> Work:
        return next(iter(self._items))

    @property
    def next(self) -> Work:
        """The item to compute next."""
        return self.oldest if self._oldest_first else next(reversed(self._items))

    def add(self, item: Work) -> None:
        """Add an item, in place of an equal item. An item that alone exceeds the bound in bytes is not added."""
        self.remove(item)
        num_bytes = item.num_bytes
        if num_bytes > self._max_bytes:
            return
        self._items[item] = num_bytes
        self.num_bytes += num_bytes
        while len(self) > self._max_number or self.num_bytes > self._max_bytes:
            self.remove(self.oldest)

    def remove(self, item: Work) -> None:
        self.num_bytes -= self._items.pop(item, 0)

    def forget(self, scope: str) -> None:
        for item in [item for item in self if item.scope.name == scope]:
            self.remove(item)

    def clear(self) -> None:
        self._items.clear()
        self.num_bytes = 0


class IdlePrefill:
    """Does the work of this module in idle time. For the event loop only.

    Next turns are computed oldest first, all other work newest first. One generation at a time runs in the engine's
    background. When a request arrives, the generation is aborted. The work resumes when the server is idle again.

    sessions: predicts how clients shorten their histories.
    open: the requests that the engine has not ended yet.
    num_arriving: the number of requests whose prompts are being made.
    next_turns: whether to do kinds 1 to 3 of the work.
    num_sets: how many sets of documents may be computed after an answer.
    prefixes: the likely prefixes with the server's documents; None until the server has opened its documents.
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
        """Whether no work waits and none runs."""
        return not (self._task or self._has_work)

    @property
    def _has_work(self) -> bool:
        return any(self._backlogs) or (self.prefixes is not None and self.prefixes.has_more)

    @property
    def num_bytes(self) -> int:
        """The memory that all backlogs take, in bytes (an estimate)."""
        return sum(backlog.num_bytes for backlog in self._backlogs)

    def add(self, answered: AnsweredChat, prompt: ChatPrompt) -> None:
        """Queue the prompts that are likely to come after an answer. prompt: the prompt of the answered request."""
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
        """Queue the rest of a disconnected client's prompt.

        Nothing is queued if less than half of the prompt is computed, or if the prompt may not be cached.
        """
        request = generation.request
        abandoned = AbandonedPrompt(request.prompt, request.index_scope, request.session)
        if self._next_turns and abandoned.scope.is_shared and generation.is_past_half:
            self._abandoned.add(abandoned)

    def resume(self) -> None:
        """Start the waiting work, if none runs yet and no request is open or arriving."""
        is_idle = not (self._open or self.num_arriving)
        if is_idle and self._task is None and self._has_work:
            self._task = asyncio.get_running_loop().create_task(self._work())

    def look_again(self) -> None:
        """Choose again which documents to read ahead. Called after the server's documents have changed."""
        if self.prefixes is not None:
            self.abort()
            self.prefixes.renew()
            self.resume()

    def stop(self) -> None:
        """Stop the work, but leave its generation in the engine.

        The engine itself ends this generation when a request is submitted.
        """
        if self._task is not None:
            self._task.cancel()
            self._task = None

    @contextmanager
    def giving_way(self) -> Iterator[None]:
        """Stop the work during a `with` block that makes a request's prompt, so that the block can use all cores.

        After the block, the work resumes unless a request is open or arriving.
        """
        self.num_arriving += 1
        if self._task is not None:
            self.abort()
        try:
            yield
        finally:
            self.num_arriving -= 1
            self.resume()

    def abort(self) -> None:
        """Stop the work, and take its generation out of the engine. The computed tokens stay cached."""
        self.stop()
        self._ahead.drop()

    def forget(self, scope: str) -> None:
        """Abort the running work, and drop all waiting work of a scope."""
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
                        break  # later kinds go on: if sets find no room, documents may, because they make room
                    backlog.remove(work)
            if self.prefixes is not None:
                await self.prefixes.compute(self._ahead)
        except RequestError as error:  # the engine has ended
            logger.debug("idle prefill ends: %s", error)
        except AheadFailed:
            self._clear()
        except Exception:  # caught, or else the same work would be tried for ever
            logger.exception("idle prefill failed, and all waiting work is dropped")
            self._clear()
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    def _clear(self) -> None:
        for backlog in self._backlogs:
            backlog.clear()
