"""Computes ahead, while there is nothing else to do, what the next turn of a conversation will start with.

That is its history as the template shows it then, up to what the user will say: the answer's last token, the tokens that
end it, and all of the answer where the template shows it otherwise than it was sampled (without its reasoning, say).

Then, if it is told to, what the next chat may start with. A prompt reuses leading documents only: of five that were read,
the first is of use to whoever asks about it, the others are not. So sets of them are brought to the front: each document
alone, then pairs, and so on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from sys import getsizeof

from .chat.builder import PromptBuilder
from .chat.history import Entry
from .chat.parts import DocumentSet
from .chat.prompt import ChatPrompt
from .chat.threads import LARGE
from .engine.backlog import Backlog
from .engine.door import Door
from .engine.view import End, Failure, View
from .errors import RequestError
from .intake import Intake
from .wire import ChatRequest, decode

logger = logging.getLogger("slotcache.idle")
KEY = "idle"  # of the one generation that the engine has of it
MAX_WAITING = 64  # answers for which there is something to be computed: of more the oldest are let go
MAX_BYTES = 32 << 20  # of memory that they may keep


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """A conversation up to an answer. request: the one that was answered; options: as JSON, without its messages."""

    request: int
    scope: str
    options: bytes
    entries: tuple[Entry, ...]

    @property
    def num_bytes(self) -> int:
        """Of memory, about."""
        return getsizeof(self.options) + getsizeof(self.entries) + sum(entry.num_bytes for entry in self.entries)


@dataclass(frozen=True, slots=True, eq=False)
class Sets:
    """What other chats of a scope may begin with, the likeliest first."""

    scope: str
    prompts: deque[ChatPrompt]


class IdlePrefill:
    """The next turns, in the order of the answers, then the sets, those of the last answer first; all of it in the engine's
    background. What is interrupted goes on afterwards. The event loop's.

    next_turns: whether they are computed. num_sets: of an answer's documents that are brought to the front.
    """

    def __init__(
        self,
        door: Door,
        view: View,
        builder: PromptBuilder,
        intake: Intake,
        *,
        next_turns: bool,
        num_sets: int,
    ) -> None:
        self._door, self._view, self._builder, self._intake = door, view, builder, intake
        self._next_turns, self._num_sets = next_turns, num_sets
        self._answers: Backlog[Ahead] = Backlog(MAX_WAITING, MAX_BYTES)
        self._sets: Backlog[Sets] = Backlog(MAX_WAITING, MAX_BYTES)
        self._task: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self._task or self._answers or self._sets)

    @property
    def num_bytes(self) -> int:
        """Of memory that is kept for what there is to compute, about."""
        return self._answers.num_bytes + self._sets.num_bytes

    def add(self, ahead: Ahead, prompt: ChatPrompt) -> None:
        """An answer to `prompt` is whole."""
        if self._next_turns:
            self._answers.add(ahead, ahead.num_bytes)
        is_first = sum(entry.role == "user" for entry in ahead.entries) == 1
        if is_first and (prompts := deque(itertools.islice(beginnings(prompt), self._num_sets))):
            self._sets.add(Sets(ahead.scope, prompts), ahead.num_bytes)

    def resume(self) -> None:
        """Nobody else needs the engine."""
        if self._task is None and (self._answers or self._sets):
            self._task = asyncio.get_running_loop().create_task(self._work())

    def stop(self) -> None:
        """Somebody does. What runs gives way to it in the engine; what it has computed stays."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def give_way(self) -> None:
        """Stop, and have the engine stop, too."""
        self.stop()
        self._door.drop_ahead(KEY)

    def forget(self, scope: str) -> None:
        """Compute nothing more for what was said in a scope."""
        self.give_way()
        for ahead in [ahead for ahead in self._answers if ahead.scope == scope]:
            self._answers.remove(ahead)
        for sets in [sets for sets in self._sets if sets.scope == scope]:
            self._sets.remove(sets)

    async def _work(self) -> None:
        try:
            while self._answers:
                ahead = self._answers.oldest
                if not await self._next_turn(ahead):
                    return
                self._answers.remove(ahead)
            while self._sets:
                sets = self._sets.newest
                if not await self._compute(sets.prompts[0], sets.scope, guess=True):
                    return
                sets.prompts.popleft()
                if not sets.prompts:
                    self._sets.remove(sets)
        except RequestError as error:  # the engine has ended
            logger.debug("nothing more is computed ahead: %s", error)
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    async def _next_turn(self, ahead: Ahead) -> bool:
        """Compute what the turn after an answer begins with; False where now is no time for that."""
        try:
            # In the threads that end before the model does. The backlog bounds what waits here, so it takes no room there.
            prompt = await self._builder.threads.run(min(ahead.num_bytes, LARGE), self._prompt, ahead)
            return prompt is None or await self._compute(prompt, ahead.scope, follows=ahead.request)
        except RequestError:
            raise
        except Exception:
            logger.exception("the start of a next turn could not be computed ahead")
            return True

    def _prompt(self, ahead: Ahead) -> ChatPrompt | None:
        return self._builder.ahead(decode(ahead.options, ChatRequest), ahead.entries)

    async def _compute(self, prompt: ChatPrompt, scope: str, guess: bool = False, follows: int | None = None) -> bool:
        """See that a prompt is cached, if it can be; False where now is no time for that: somebody uses the engine, or it
        has failed, or a guess would take the place of something else."""
        if prompt.num_tokens >= self._intake.limit:
            return True
        generation = self._intake.idle_prefill(prompt, scope, guess, follows)
        missing = await self._view.missing(prompt, scope)
        if not missing.tokens or not (missing.fits or guess):
            return True
        if not (missing.fits and missing.idle):
            return False
        if not await asyncio.wrap_future(self._door.compute_ahead(KEY, generation)):
            return False
        while not isinstance(event := await generation.events.get(), End | Failure):
            pass
        if isinstance(event, Failure):
            self._answers.clear()
            self._sets.clear()
            return False
        logger.debug("%d tokens of %d computed ahead", missing.tokens, event.report.num_prompt)
        return True


def beginnings(prompt: ChatPrompt) -> Iterator[ChatPrompt]:
    """What other chats begin with that ask about some of the documents of this one: each alone, then pairs, and so on.

    Each has at most one document more than one before it. Nothing where the order of documents may not be chosen.
    """
    shown = next((part for part in prompt.parts if isinstance(part, DocumentSet)), None)
    if shown is None or shown.policy != "auto" or shown.keep_first or shown.keep_last:
        return
    before, ranks = prompt.parts[: prompt.parts.index(shown)], range(len(shown.documents))
    for some in itertools.chain.from_iterable(itertools.combinations(ranks, size + 1) for size in ranks):
        documents, tokens = [shown.documents[rank] for rank in some], [shown.tokens[rank] for rank in some]
        yield ChatPrompt([*before, DocumentSet(tuple(documents), tuple(tokens), shown.policy, hint=None)])
