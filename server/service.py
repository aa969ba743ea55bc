"""A loaded model with everything that serves it: made once at start, handed to the routes."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from ..models.context import Context
from ..models.model import Model
from ..models.text import TextStream
from ..slots.request import Request
from ..slots.scope import Scope
from ..slots.snapshots import Snapshots
from ..slots.tiers.tier import LowerTier
from .chat.builder import PromptBuilder
from .chat.conversations import Conversations, Origin
from .chat.prompt import ChatPrompt
from .chat.tokens import AnswerMemory
from .chat.turn import Turn
from .engine.engine import Engine
from .engine.events import End, Failure, Final
from .engine.generation import Generation
from .errors import RequestError, too_long
from .idle import Ahead, IdlePrefill
from .metrics import Metrics
from .settings import Settings
from .wire import ChatRequest, Options

logger = logging.getLogger("slotcache")


@dataclass(slots=True, eq=False)
class Service:
    """What the routes work with.

    open: generations that were accepted and that the engine has not ended yet, each with the turn of its chat, if any.
    """

    settings: Settings
    name: str
    model: Model
    context: Context
    engine: Engine
    builder: PromptBuilder
    template: str
    metrics: Metrics
    limit: int  # tokens a prompt and its answer may have together
    open: dict[Generation, Turn | None]
    answers: AnswerMemory
    ids: itertools.count
    conversations: Conversations
    idle: IdlePrefill
    tiers: list[LowerTier]  # below host memory

    def origin(self, asked: ChatRequest) -> Origin | None:
        """What a chat goes on from, if it has to do with a conversation. Raises RequestError where that is not known."""
        asked.check()
        return self.conversations.origin(asked, self._caches(asked))

    def submit(self, prompt: ChatPrompt, options: Options, turn: Turn | None = None) -> Generation:
        """Hand a prompt to the engine. Raises RequestError: too long, or the queue is full."""
        options.check()
        self._check_length(prompt)
        self._admit_to_queue()
        generation = self._generation(prompt, options)
        generation.on_end = self._conclude
        self.idle.stop()
        self.engine.submit(generation)
        self.open[generation] = turn
        return generation

    def ahead(self, key: Hashable, prompt: ChatPrompt, options: Options) -> Future[bool]:
        """Have a prompt computed while nobody asks for anything; whether that is now. Raises RequestError: too long."""
        options.check()
        self._check_length(prompt)
        generation = self._generation(prompt, options)
        generation.request.background, generation.on_end = True, self._computed_ahead
        self.idle.give_way()
        return self.engine.submit_background((options.cache_scope, key), generation)

    def _check_length(self, prompt: ChatPrompt) -> None:
        if prompt.num_tokens == 0:
            raise RequestError("the prompt is empty: expected at least one token")
        if prompt.num_tokens >= self.limit:
            raise too_long(prompt.num_tokens, self.limit)

    def abandon(self, generation: Generation) -> None:
        """Whoever waited for this generation has gone. Does nothing when the engine has ended it, or will soon.

        It is open until the engine has let go of it, which is by the next step.
        """
        if generation not in self.open or generation.abandoned:
            return
        self.metrics.cancelled()
        generation.abandoned, self.open[generation] = True, None
        left = asyncio.wrap_future(self.engine.cancel(generation))
        left.add_done_callback(lambda left: self._left(generation, left))

    def _left(self, generation: Generation, left: asyncio.Future[None]) -> None:
        """The engine has let go of an abandoned generation, or is stopped and has ended it with the others."""
        if not left.cancelled():
            left.exception()  # seen
        self._close(generation)

    def _conclude(self, generation: Generation, event: Final) -> Final:
        """The engine has ended a generation: make room for another one, account for it, remember what was said."""
        turn = self.open.get(generation)
        try:
            if isinstance(event, End) and event.sampled is not None:
                self.answers.remember(generation.scope, "".join(generation.parts), event.sampled)
            if generation.abandoned:
                return event
            if isinstance(event, Failure):
                self.metrics.failed()
                return event
            self.metrics.finished(event.report, event.reason)
            return event if turn is None else self._with_turn(generation, turn, event)
        finally:
            self._close(generation)

    def _with_turn(self, generation: Generation, turn: Turn, end: End) -> End:
        """Remember the turn of a whole answer; its end, with what became of the conversation."""
        request = generation.request
        assert request.layout is not None
        entries = turn.entries(request.layout, "".join(generation.parts), end.sampled)
        remembered = turn.origin is not None and self.conversations.remember(turn.origin, turn.id, entries)
        if request.cache and generation.limit:
            self.idle.add(Ahead(request.id, generation.scope, turn.options, entries), turn.chat.prompt)
        return replace(end, report=replace(end.report, conversation=turn.report(remembered)))

    def _computed_ahead(self, generation: Generation, event: Final) -> Final:
        """A prompt that was computed ahead of its turn is done: what gave way to it goes on."""
        self.go_on_idly()
        return event

    def _close(self, generation: Generation) -> None:
        self.open.pop(generation, None)
        self.go_on_idly()

    def go_on_idly(self) -> None:
        """Compute ahead, if nobody asks for anything."""
        if not self.open:
            self.idle.go_on()

    def close(self) -> None:
        self.engine.stop()
        self.builder.close()
        for tier in self.tiers:
            tier.close()
        self.context.close()
        self.model.close()

    @property
    def room(self) -> int:
        """How many requests may run or wait."""
        return self.settings.parallel + self.settings.max_queue

    def _admit_to_queue(self) -> None:
        if len(self.open) >= self.room:
            self.metrics.refused()
            raise RequestError(
                f"{len(self.open)} requests are running or waiting, which is as many as may: try again later",
                status=429,
                code="queue_full",
                retry_after=self.metrics.seconds_until_room(self.settings.parallel),
            )

    def _caches(self, options: Options) -> bool:
        """Whether a request may leave anything behind."""
        return self.settings.cache_prompt if options.cache_prompt is None else options.cache_prompt

    def _generation(self, prompt: ChatPrompt, options: Options) -> Generation:
        wanted, room = options.limit(), self.limit - prompt.num_tokens
        limit = room if wanted < 0 else min(wanted, room)
        asked = self._caches(options)
        number = next(self.ids)
        cache = asked and self.model.can_trim
        shared = Scope.shared(options.cache_scope)
        request = Request(
            number,
            prompt,
            max(limit, 1),
            shared if cache else Scope.private(number),
            cache,
            options.priority,
            snapshot_scope=shared if asked and self.snapshots.max_bytes else None,
        )
        return Generation(
            request=request,
            sampling=options.sampling(self.model.ends, self.model.num_vocab),
            text=TextStream(options.stops(), self.model.piece),
            limit=limit,
            scope=options.cache_scope,
            wants_progress=options.return_progress,
            no_cache_reason=self._why_not(asked, cache),
            spells=self.model.spells if request.cache or request.snapshot_scope is not None else None,
        )

    @property
    def snapshots(self) -> Snapshots:
        return self.engine.scheduler.snapshots

    def _why_not(self, asked: bool, cache: bool) -> str | None:
        if not asked:
            return "cache_prompt is off"
        if cache:
            return None
        if self.snapshots.max_bytes:
            return "this model's state cannot be cut, and no snapshot of it goes further"
        return "this model keeps no KV that can be cut at a prefix, and --cache-ram leaves no room for snapshots"

    def properties(self) -> dict[str, Any]:
        """`/props`: llama-server's fields, and every setting."""
        return {
            "model_path": str(self.model.path),
            "model_alias": self.name,
            "total_slots": self.settings.parallel,
            "default_generation_settings": {"n_ctx": self.limit},
            "chat_template": self.template,
            "bos_token": self.model.bos,
            "eos_token": self.model.eos,
            "settings": self.settings.shown(),
        }
