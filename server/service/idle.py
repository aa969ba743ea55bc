"""Work for idle time: abandoned prompts, follow-up turns, document sets, popular prefixes.

First the rest of each prompt whose client left when more than half of it was computed: it will ask again. Then the
beginning of a history that a client is about to shorten (`Compactions`).

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
import re
import sqlite3
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from sys import getsizeof
from typing import Generic, Protocol, TypeVar

import msgspec
import numpy as np

from ...retrieval.index import Index
from ...retrieval.store import count_uses, likeliest
from ...retrieval.writing import StoredChunk
from ...slots.radix import NO_TOKENS
from ...slots.request import Kind, Prompt
from ...slots.scope import Scope
from ..chat.body import ChatRequest
from ..chat.builder import PromptBuilder
from ..chat.chat_prompt import ChatPrompt, DocumentSet, Fixed, SeparatePrompt
from ..chat.decode import decode
from ..chat.history import INSTRUCTIONS, HistoryMessage
from ..chat.sampling_fields import JsonValue
from ..chat.shortened_history import Kept, follows
from ..engine.engine import Engine
from ..engine.generation import End, Failure, Generation
from ..engine.view import View
from ..http.api_errors import RequestError
from ..http.threads import LARGE
from .submitter import Submitter

# ---- Work that waits for idle time: bounded in number and in bytes, since idle time may never come. ---------------------

T = TypeVar("T")


class Scoped(Protocol):
    """Work of a scope."""

    @property
    def scope(self) -> Scope: ...


W = TypeVar("W", bound=Scoped)


class Backlog(Generic[W]):
    """Items in order of arrival. Beyond its bounds the oldest leave."""

    def __init__(self, max_number: int, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_number, self._max_bytes = max_number, max_bytes
        self._items: dict[W, int] = {}  # with the bytes of each

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[W]:
        return iter(self._items)

    @property
    def oldest(self) -> W:
        return next(iter(self._items))

    @property
    def newest(self) -> W:
        return next(reversed(self._items))

    def add(self, item: W, num_bytes: int) -> None:
        """Add an item that keeps `num_bytes` in memory, unless it alone exceeds the bound."""
        self.remove(item)
        if num_bytes > self._max_bytes:
            return
        self._items[item] = num_bytes
        self.num_bytes += num_bytes
        while len(self) > self._max_number or self.num_bytes > self._max_bytes:
            self.remove(self.oldest)

    def remove(self, item: W) -> None:
        """Remove an item, if it is still here."""
        self.num_bytes -= self._items.pop(item, 0)

    def forget(self, scope: str) -> None:
        """Remove the items of a scope."""
        for item in [item for item in self if item.scope.name == scope]:
            self.remove(item)

    def clear(self) -> None:
        self._items.clear()
        self.num_bytes = 0


# ---- Compactions --------------------------------------------------------------------------------------------------------
# Clients that shorten their history: the request that follows is known once one has done it before, and is computed ahead.
#
# Such a client asks for a summary of all that was said, and goes on with a new history, which begins with that summary
# between words of its own. The words are learnt from the first time that an answer comes back so; when the same question is
# answered again, the beginning of the new history is known before the client sends it.

SHORTEST_SUMMARY = 200  # characters of a summary: shorter answers are quoted by chance
FEW_ANSWERS = 4  # answers that are remembered of a session
MOST_SESSIONS = 64  # sessions
LONGEST_SUMMARY = 64 << 10  # bytes of an answer, and of a beginning, that are remembered
INNER = re.compile("<summary>(.*)</summary>", re.DOTALL)  # the part that some clients go on with

SessionKey = tuple[str, str]
"""A scope, and the session's name in it."""


@dataclass(frozen=True, slots=True)
class Summary:
    """An answer that may come back. question: that it answers, as JSON. texts: all of it, and the part in its tag."""

    question: bytes
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shortened:
    """A history that began with an answer. question: to which it was one. options: of the request, as JSON.

    first: its messages in front of the one with the answer; before, after: that one, around the answer. All are JSON.
    place: of the text that came back, among those of the answer.
    """

    question: bytes
    options: bytes
    first: tuple[bytes, ...]
    before: bytes
    after: bytes
    place: int

    def chat(self, text: str) -> ChatRequest:
        """Return the request that begins with another answer."""
        messages = map(msgspec.json.decode, (*self.first, self.before + _escaped(text) + self.after))
        return msgspec.structs.replace(decode(self.options, ChatRequest), messages=list(messages))


class Compactions:
    """What sessions have shortened, and how. It belongs to the event loop."""

    def __init__(self) -> None:
        self._answers: OrderedDict[SessionKey, list[Summary]] = OrderedDict()
        self._shortened: OrderedDict[SessionKey, Shortened] = OrderedDict()
        self._kept: OrderedDict[SessionKey, Kept] = OrderedDict()

    def note(self, key: SessionKey, options: bytes, entries: Sequence[HistoryMessage]) -> Iterator[ChatRequest]:
        """Take an answered chat; yield what the client is likely to ask next, if it has shortened its history like this."""
        *asked, answer = entries
        kept = self._kept.get(key, Kept()).learnt(entries)
        if found := follows(entries, kept):
            messages, kept = found
            yield msgspec.structs.replace(decode(options, ChatRequest), messages=messages)
        if kept != Kept():
            _keep(self._kept, key, kept)
        if found:
            return
        if found := self._find(key, options, asked):
            _keep(self._shortened, key, found)
        texts = _texts(answer)
        if not texts or not asked:
            return
        known = self._shortened.get(key)
        if known is not None and known.question == asked[-1].said and len(texts) > known.place:
            yield known.chat(texts[known.place])
        _keep(self._answers, key, [*self._answers.get(key, ()), Summary(asked[-1].said, texts)][-FEW_ANSWERS:])

    def forget(self, scope: str, session: str | None = None) -> None:
        """Forget the sessions of a scope, or one of them."""
        for known in (self._answers, self._shortened, self._kept):
            for key in [key for key in known if key[0] == scope and session in (None, key[1])]:
                del known[key]

    def _find(self, key: SessionKey, options: bytes, asked: Sequence[HistoryMessage]) -> Shortened | None:
        """Return how a chat begins, if the first message behind its instructions has an earlier answer in it."""
        at = next((at for at, entry in enumerate(asked) if entry.role not in INSTRUCTIONS), None)
        if at is None or asked[at].role != "user" or sum(len(entry.said) for entry in asked[: at + 1]) > 4 * LONGEST_SUMMARY:
            return None
        for summary in reversed(self._answers.get(key, ())):
            for place, text in enumerate(summary.texts):
                before, found, after = asked[at].said.partition(_escaped(text))
                if found:
                    first = tuple(entry.said for entry in asked[:at])
                    return Shortened(summary.question, options, first, before, after, place)
        return None


def _texts(answer: HistoryMessage) -> tuple[str, ...]:
    """Return the texts by which an answer may come back; none of a short or a very long one."""
    if len(answer.said) > LONGEST_SUMMARY or not isinstance(text := answer.message.get("content"), str):
        return ()
    inner = INNER.search(text)
    texts = (text.strip(), inner[1].strip()) if inner else (text.strip(),)
    return texts if min(map(len, texts)) >= SHORTEST_SUMMARY else ()


def _escaped(text: str) -> bytes:
    """Return a text as it stands within a string of JSON."""
    return msgspec.json.encode(text)[1:-1]


def _keep(known: OrderedDict[SessionKey, T], key: SessionKey, value: T) -> None:
    known[key] = value
    known.move_to_end(key)
    while len(known) > MOST_SESSIONS:
        known.popitem(last=False)


# ---- Likely prefixes ----------------------------------------------------------------------------------------------------
# The prefixes of likely prompts: what each chat about the server's documents begins with, then one document.
#
# Only a prefix can be reused, so a document helps a new question only at the front of its prompt, behind the same system
# message. The prefixes follow the newest chats that searched; before any chat, they have no system message.

docs_logger = logging.getLogger("slotcache.docs")
QUESTION: Mapping[str, JsonValue] = {"role": "user", "content": "?"}  # a stand-in: a prefix ends before it
MARGIN = 2  # times the budget in tokens as the index counts them: the model's are other ones


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The prefix that chats share. options: of a request, as JSON, without messages; instructions: its first messages."""

    scope: Scope
    options: bytes
    instructions: tuple[bytes, ...] = ()

    @classmethod
    def first(cls, scope: Scope) -> SharedPrefix:
        """Return the prefix of chats before one was seen: they search, and ask for nothing else."""
        return cls(scope, msgspec.json.encode(ChatRequest(messages=[], retrieval=True, cache_scope=scope.name)))

    @classmethod
    def of(cls, scope: Scope, options: bytes, entries: Sequence[HistoryMessage]) -> SharedPrefix:
        """Return the prefix of a chat."""
        first = takewhile(lambda entry: entry.role in INSTRUCTIONS, entries)
        return cls(scope, options, tuple(entry.said for entry in first))

    def is_like(self, other: SharedPrefix) -> bool:
        """Return whether both have the same instructions."""
        return (self.scope, self.instructions) == (other.scope, other.instructions)

    def chat(self, chunks: Sequence[StoredChunk]) -> ChatRequest:
        """Return a chat of one question about these. It takes time as the options and the instructions are long."""
        messages: list[dict[str, JsonValue]] = [*map(msgspec.json.decode, self.instructions), dict(QUESTION)]
        found: list[JsonValue] = [{"id": chunk.id, "title": chunk.title, "text": chunk.text} for chunk in chunks]
        # A document that is read separately is read behind the prefix alone, as here: no mode of its own is needed.
        options = decode(self.options, ChatRequest)
        return msgspec.structs.replace(options, messages=messages, documents=found, documents_attention="joint")


@dataclass(frozen=True, slots=True, eq=False)
class LikelyPrefix:
    """A prompt that ends with a document. number: of the document in the index; num_tokens: of the document alone."""

    prompt: ChatPrompt
    scope: Scope
    number: int
    num_tokens: int


class LikelyPrefixes:
    """The prefixes of prompts, the likeliest first. It belongs to the event loop.

    prefix: of chats before the first one. most_tokens: that all prefixes may have together. state_tokens: those that the
    recurrent state behind a document counts for, known once the model is warm. num_documents: that are at the
    front of a prompt by now; num_tokens: of these. has_files: whether all files were read, so that the likeliest documents
    are known.
    """

    def __init__(
        self,
        index: Index,
        builder: PromptBuilder,
        prefix: SharedPrefix,
        most_tokens: int,
        *,
        state_tokens: Callable[[], int] = lambda: 0,
    ) -> None:
        self.most_tokens, self.has_files = most_tokens, False
        self.num_documents = self.num_tokens = 0
        self._index, self._builder, self._state_tokens = index, builder, state_tokens
        self._prefix = prefix  # that is followed
        self._last: SharedPrefix | None = None  # of the newest chat
        self._shared, self._shared_scope = NO_TOKENS, prefix.scope  # the tokens of the prefix
        self._uses: Counter[str] = Counter()  # of documents, by their ids; not yet in the index
        self._left: deque[int] | None = None  # the documents to come; None: to be looked up
        self._tokens: dict[int, int] = {}  # of the documents that were computed behind this prefix

    @property
    def has_more(self) -> bool:
        """Whether documents may be left to compute."""
        return self.has_files and (self._left is None or bool(self._left))

    def note(self, prefix: SharedPrefix, found: Sequence[str]) -> None:
        """Follow a chat that searched. found: the ids of the documents that its prompt got.

        Other instructions than before are followed from the second chat on: a prefix with the time of day never comes back.
        """
        if self._last is None or self._last.is_like(prefix):
            self._prefix = prefix
        self._last = prefix
        self._uses.update(found)
        self.renew()

    def renew(self) -> None:
        """Look for likelier documents: a chat has used some, or files have changed."""
        self._left = None

    def forget(self, scope: str) -> None:
        """Compute nothing before the next change, if this scope was dropped."""
        if scope == self._prefix.scope.name:
            self._left, self._tokens = deque(), {}
            self.num_documents = self.num_tokens = 0

    async def next(self) -> LikelyPrefix | None:
        """Return the next prefix; the same one again, unless it was counted. None: the budget has no room for more."""
        if not self.has_more:
            return None
        if self._left is None:
            self._left = await self._look_up()
        while self._left:
            number, likely = self._left[0], None
            tokens = self._tokens.get(number)
            if tokens is None:
                likely = await self._builder.threads.run(0, self._make, number)
                tokens = likely.num_tokens if likely else 0
            if not self._has_room_for(tokens):
                self._left.clear()
            elif likely is not None:
                return likely
            elif tokens:
                self._count(number, tokens)
            else:
                self._left.popleft()
        docs_logger.debug("%d documents are at the front of a prompt: %d tokens", self.num_documents, self.num_tokens)
        return None

    def count(self, likely: LikelyPrefix) -> None:
        """Count a prefix that is computed."""
        self._count(likely.number, likely.num_tokens)

    def shown(self) -> dict[str, int | bool]:
        """Return the progress as JSON."""
        return {"documents": self.num_documents, "tokens": self.num_tokens, "done": self.has_files and not self.has_more}

    def _has_room_for(self, num_tokens: int) -> bool:
        """Return whether a document of that many tokens fits beside those that are counted."""
        states = (self.num_documents + 1) * self._state_tokens()
        return len(self._shared) + self.num_tokens + num_tokens + states <= self.most_tokens

    def _count(self, number: int, tokens: int) -> None:
        assert self._left and self._left[0] == number
        self._left.popleft()
        self._tokens[number] = tokens
        self.num_documents += 1
        self.num_tokens += tokens

    async def _look_up(self) -> deque[int]:
        """Return the likeliest documents, those that are computed included."""
        uses, self._uses = self._uses, Counter()
        numbers = await asyncio.to_thread(self._choose, uses)
        shared = await self._builder.threads.run(0, self._make_shared)
        is_same = self._prefix.scope == self._shared_scope and np.array_equal(shared, self._shared)
        self._shared, self._shared_scope = shared, self._prefix.scope
        self._tokens = {number: self._tokens[number] for number in numbers if is_same and number in self._tokens}
        self.num_documents = self.num_tokens = 0
        return deque(numbers)

    # ---- in threads ------------------------------------------------------------------------------------------------

    def _choose(self, uses: Counter[str]) -> list[int]:
        try:
            count_uses(self._index.store, uses)
            return likeliest(self._index.store, MARGIN * self.most_tokens)
        except sqlite3.Error as error:  # the disk is full, or the index is closed: only a head start is lost
            docs_logger.debug("no documents are read ahead: %s", error)
            return []

    def _make_shared(self) -> np.ndarray:
        """Return the prefix's tokens, int32; none if the template refuses the chat."""
        try:
            parts = self._prompt(()).parts
        except RequestError as error:
            docs_logger.debug("no documents are read ahead: %s", error)
            return NO_TOKENS
        return np.concatenate([NO_TOKENS, *(part.tokens for part in parts if isinstance(part, Fixed))])

    def _make(self, number: int) -> LikelyPrefix | None:
        """Make the prefix of a document; None if the document is gone, or the template refuses the chat."""
        try:
            prompt = self._prompt(list(self._index.store.chunks([number]).values()))
        except (RequestError, sqlite3.Error) as error:
            docs_logger.debug("a document is not read ahead: %s", error)
            return None
        last = prompt.parts[-1]
        if not isinstance(last, DocumentSet):
            return None
        return LikelyPrefix(prompt, self._prefix.scope, number, sum(map(len, last.tokens)))

    def _prompt(self, chunks: Sequence[StoredChunk]) -> ChatPrompt:
        """Make a prompt that ends with the documents. Raises RequestError."""
        return self._builder.chat(self._prefix.chat(chunks), open_turn=True).prompt


logger = logging.getLogger("slotcache.idle")
KEY = "idle"  # of the one generation that the engine has of it
MAX_WAITING = 64  # answers in the backlog; beyond that the oldest leave
MAX_BYTES = 32 << 20  # of memory that the backlog may keep
TRIES, AGAIN = 50, 0.1  # times that a document without room is tried again before a request comes, and s between them
PAUSE = 0.05  # s without a request before work begins: programs ask again sooner, and a step may take as long to end early


@dataclass(frozen=True, slots=True)
class AbandonedPrompt:
    """A prompt whose client left while it was computed. The choices of a request have the same one."""

    prompt: Prompt
    scope: Scope
    session: str

    @property
    def num_bytes(self) -> int:
        """Memory that its tokens take."""
        return 4 * self.prompt.num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredChat:
    """A conversation up to an answer. request: the one that was answered; options: as JSON, without its messages.

    found: the ids of the documents that the server found for it; None if the request did not ask for them. session: its
    name.
    """

    request: int
    scope: Scope
    options: bytes
    entries: tuple[HistoryMessage, ...]
    found: Sequence[str] | None = None
    session: str = ""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return getsizeof(self.options) + getsizeof(self.entries) + sum(entry.num_bytes for entry in self.entries)


@dataclass(frozen=True, slots=True, eq=False)
class ShortenedChat:
    """A chat that a client is likely to ask when it has shortened its history."""

    scope: Scope
    chat: ChatRequest


@dataclass(frozen=True, slots=True, eq=False)
class LikelyPrompts:
    """Prompts that new chats of a scope may begin with, the likeliest first."""

    scope: Scope
    prompts: deque[ChatPrompt]


class IdlePrefill:
    """Computes abandoned prompts, next turns in the order of the answers, then likely prompts, the newest answer's first.

    Last come prefixes of prompts about the server's documents. Its generations are in the engine's background, one at a
    time. A request that arrives aborts the current one; idle prefill resumes when the server is idle. It belongs to the
    event loop.

    open: requests that the engine has not ended yet. num_arriving: those whose prompts are being made. next_turns: whether
    to compute abandoned prompts and next turns. num_sets: most sets of an answer's documents to bring to the front.
    prefixes: of prompts about the server's documents, once these are open.
    """

    def __init__(
        self,
        engine: Engine,
        view: View,
        builder: PromptBuilder,
        submitter: Submitter,
        *,
        open: Collection[Generation],
        next_turns: bool,
        num_sets: int,
    ) -> None:
        self._engine, self._view, self._builder, self._submitter = engine, view, builder, submitter
        self._open, self.num_arriving = open, 0
        self._next_turns, self._num_sets = next_turns, num_sets
        self._abandoned: Backlog[AbandonedPrompt] = Backlog(MAX_WAITING, MAX_BYTES)
        self._answers: Backlog[AnsweredChat] = Backlog(MAX_WAITING, MAX_BYTES)
        self._compactions = Compactions()
        self._shortened: Backlog[ShortenedChat] = Backlog(MAX_WAITING, MAX_BYTES)
        self._sets: Backlog[LikelyPrompts] = Backlog(MAX_WAITING, MAX_BYTES)
        self._backlogs = (self._abandoned, self._shortened, self._answers, self._sets)
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
            self._answers.add(answered, answered.num_bytes)
            key = (answered.scope.name, answered.session)
            for chat in self._compactions.note(key, answered.options, answered.entries):
                self._shortened.add(ShortenedChat(answered.scope, chat), answered.num_bytes)
        is_first = sum(entry.role == "user" for entry in answered.entries) == 1
        if is_first and (prompts := deque(itertools.islice(likely_prompts(prompt), self._num_sets))):
            self._sets.add(LikelyPrompts(answered.scope, prompts), answered.num_bytes)

    def add_abandoned(self, generation: Generation) -> None:
        """Queue the rest of a prompt whose client has gone, where more than half of it is computed and may be kept."""
        request = generation.request
        abandoned = AbandonedPrompt(request.prompt, request.index_scope, request.session)
        if self._next_turns and abandoned.scope.is_shared and generation.is_past_half:
            self._abandoned.add(abandoned, abandoned.num_bytes)

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
        self._engine.drop_background(KEY)

    def forget_session(self, scope: str, session: str) -> None:
        """Forget how a session shortens its history."""
        self._compactions.forget(scope, session)

    def forget(self, scope: str) -> None:
        """Abort, and drop the scope's part of the backlog."""
        self.abort()
        self._compactions.forget(scope)
        for backlog in self._backlogs:
            backlog.forget(scope)
        if self.prefixes is not None:
            self.prefixes.forget(scope)

    async def _work(self) -> None:
        try:
            await asyncio.sleep(PAUSE)
            while self._abandoned:
                abandoned = self._abandoned.newest
                if not await self._finish(abandoned):
                    return
                self._abandoned.remove(abandoned)
            while self._shortened:
                shortened = self._shortened.newest
                chat = shortened.chat
                make = partial(self._prompt_of, chat)
                if not await self._prefill_made(shortened.scope, LARGE, make, session=chat.session):
                    return
                self._shortened.remove(shortened)
            while self._answers:
                answered = self._answers.oldest
                if not await self._prefill_next_turn(answered):
                    return
                self._answers.remove(answered)
            while self._sets:
                sets = self._sets.newest
                if not await self._prefill(sets.prompts[0], sets.scope, kind=Kind.PREFETCH):
                    return
                sets.prompts.popleft()
                if not sets.prompts:
                    self._sets.remove(sets)
            tries = TRIES
            while self.prefixes and tries and (likely := await self.prefixes.next()):
                if await self._prefetch_documents(likely):
                    self.prefixes.count(likely)
                    tries = TRIES
                else:  # host memory has room again once its copies are on disk
                    tries -= 1
                    await asyncio.sleep(AGAIN)
        except RequestError as error:  # the engine has ended
            logger.debug("nothing more is computed ahead: %s", error)
        except Exception:  # what failed would be the next to be tried, for ever
            logger.exception("what waited for idle time is not computed ahead")
            for backlog in self._backlogs:
                backlog.clear()
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    async def _finish(self, abandoned: AbandonedPrompt) -> bool:
        """Compute the rest of a prompt, unless it would evict. False: stop for now."""
        missing = await self._view.missing(abandoned.prompt, abandoned.scope)
        has_room = missing.fits or not missing.idle
        if not has_room:
            return True
        return await self._prefill(abandoned.prompt, abandoned.scope, kind=Kind.PREFETCH, session=abandoned.session)

    async def _prefill_next_turn(self, answered: AnsweredChat) -> bool:
        """Prefill the prefix of the turn after an answer. False: stop for now."""
        # The backlog bounds the bytes that wait, so here an answer counts as the smallest large request, and leaves the room
        # to the prompts of clients.
        size = min(answered.num_bytes, LARGE)

        def make() -> ChatPrompt | None:
            return self._builder.ahead(decode(answered.options, ChatRequest), answered.entries)

        return await self._prefill_made(answered.scope, size, make, follows=answered.request, session=answered.session)

    async def _prefill_made(
        self,
        scope: Scope,
        size: int,
        make: Callable[[], ChatPrompt | None],
        follows: int | None = None,
        session: str = "",
    ) -> bool:
        """Prefill a prompt that is made first, if it can be. False: stop for now. size: bytes that it counts for."""
        try:
            # In the builder's threads, since those end before the model is freed.
            prompt = await self._builder.threads.run(size, make)
            return prompt is None or await self._prefill(prompt, scope, follows=follows, session=session)
        except RequestError:
            raise
        except Exception:
            logger.exception("a prompt could not be computed ahead")
            return True

    async def _prefetch_documents(self, likely: LikelyPrefix) -> bool:
        """Prefill the prefix of a prompt that no client has asked for, unless a tier has it. False: stop for now."""
        prompt, scope = likely.prompt, likely.scope
        if not (await self._view.missing(prompt, scope)).tokens:
            return True
        if not (await self._view.make_room(prompt, scope) and await self._prefill(prompt, scope, kind=Kind.PREFETCH)):
            return False
        await self._view.make_room(prompt, scope)  # saves it: no later one may come
        return True

    def _prompt_of(self, chat: ChatRequest) -> ChatPrompt | None:
        """Make the prompt of a chat that nobody has sent; None if it would be refused."""
        try:
            return self._builder.chat(chat).prompt
        except RequestError:
            return None

    async def _prefill(
        self, prompt: Prompt, scope: Scope, kind: Kind = Kind.AHEAD, follows: int | None = None, session: str = ""
    ) -> bool:
        """Prefill `prompt` into the cache. False: stop for now (a request came, the engine failed, or it would evict).

        True where it can never be cached, too: then the next one has its turn.
        """
        if prompt.num_tokens >= self._submitter.limit:
            return True
        generation = self._submitter.idle_prefill(prompt, scope, kind, follows, session)
        missing = await self._view.missing(prompt, scope)
        if not missing.tokens or not (missing.fits or kind is Kind.PREFETCH):
            return True
        if not (missing.fits and missing.idle):
            return False
        if not await asyncio.wrap_future(self._engine.submit_background(KEY, generation)):
            return False
        while not isinstance(event := await generation.events.get(), End | Failure):
            pass
        if isinstance(event, Failure):
            for backlog in self._backlogs:
                backlog.clear()
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
