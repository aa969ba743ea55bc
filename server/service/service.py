"""The service of a loaded model: the routes use it to accept, submit and abandon requests."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from ...models.context import Context, DevicePart
from ...models.grammar import Grammars
from ...models.json_schema import GrammarError
from ...models.model import Model
from ...models.sampling_params import GREEDY
from ...models.template import ChatTemplate
from ...retrieval.ranking import Hit
from ...slots.request import Kind
from ...slots.store.tier import LowerTier
from ..chat.body import ChatRequest, CompletionRequest, InfillRequest, TextRequest
from ..chat.builder import PromptBuilder
from ..chat.content import Breakpoints, take
from ..chat.conversations import Conversation, Conversations, PendingTurn
from ..chat.history import HistoryMessage
from ..chat.reasoning import warnings_of
from ..chat.sessions import Branch, Sessions, spoken
from ..chat.tokens import AnswerMemory
from ..config.settings import Settings
from ..engine.engine import Engine, Sleep
from ..engine.fit import Decision
from ..engine.generation import End, Failure, Final, Generation
from ..engine.view import View
from ..http.api_errors import RequestError
from ..http.threads import CLIENT, LARGE
from ..search.retrieve import AnswerSources, Found, fitting
from .ahead import AnsweredChat
from .idle import IdlePrefill
from .metrics import Metrics
from .submitter import Prepared, Submitter

logger = logging.getLogger("slotcache")
ROOM = 0.5  # share of a request's most tokens that documents from a search may take
MOST_NAMED = 8  # keywords of a schema in one warning
MOST_GRAMMARS = 32  # waiting grammars: each may take two seconds to compile
NAMELESS = "volatile has no effect without a `session_id` or `cache_scope`: a prompt takes no text from another session"


@dataclass(slots=True, eq=False, kw_only=True)
class Service:
    """A loaded model with all parts that serve its requests. For the event loop only.

    name: the model's name in answers.
    build: the versions of llama.cpp and of this server.
    fingerprint: OpenAI's field `system_fingerprint`, made of the build, the model and the settings.
    template: the chat template.
    parts: the model's share on each device.
    decision: how the model was fitted to memory; None if llama.cpp could not count the memory.
    open: the submitted generations that the engine has not ended yet. Each generation maps to the turn that will be stored
        when the generation ends, or to None if no turn will be stored.
    _unattended: the generations that go on without their clients, oldest first. Each generation maps to the identity of its
        client.
    _wholes: the generations whose whole answer will be stored. Each generation maps to a function that makes the answer's
        JSON.
    _keeping: the tasks that store whole answers, by the answer's id.
    """

    settings: Settings
    name: str
    build: str
    fingerprint: str
    template: ChatTemplate
    model: Model
    context: Context
    parts: Sequence[DevicePart]
    decision: Decision | None
    grammars: Grammars
    engine: Engine
    view: View
    builder: PromptBuilder
    submitter: Submitter
    answers: AnswerMemory
    conversations: Conversations
    idle: IdlePrefill
    metrics: Metrics
    sessions: Sessions
    tiers: list[LowerTier]  # below host memory
    open: dict[Generation, PendingTurn | None]
    _unattended: dict[Generation, tuple[object, ...]] = field(default_factory=dict[Generation, Any], init=False)
    _wholes: dict[Generation, Callable[[End], bytes]] = field(default_factory=dict[Generation, Any], init=False)
    _keeping: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, "asyncio.Task[None]"], init=False)

    # ---- a request comes -------------------------------------------------------------------------------------------

    async def accept(
        self,
        asked: ChatRequest | CompletionRequest | InfillRequest,
        num_bytes: int,
        open_turn: bool = False,
        *,
        id: str = "",
        found: Found = None,
        wake: Callable[[Sleep], None] = Sleep.wake,
    ) -> Prepared:
        """Check a request, and build its prompts in a thread. A chat may continue a stored answer. Raises RequestError.

        num_bytes: the size of the body.
        open_turn: as in `PromptBuilder.chat`.
        id: the answer's id; empty: a new id.
        found: the documents of the server's search.
        wake: how the request wakes a sleeping model: `Sleep.wake` if a client waits for the result, `Sleep.bring` if no
            client waits for it, and `Sleep.expect` if nothing is computed.
        """
        wake(self.engine.sleep)
        asked.check()
        ref = None
        if isinstance(asked, ChatRequest):
            chat, breakpoints, warnings = await self._taken(asked, num_bytes)
            ref, id = self.conversations.ref(chat, self.submitter.caches(chat)), id or new_id("chatcmpl-")
            chat.check_outliving(ref is not None and ref.stores)

            def build() -> Prepared:
                turn = PendingTurn.of(id, chat, self.builder.chat(chat, ref, open_turn, breakpoints), ref)
                return self._prepared_chat(turn, chat, found, warnings)

        else:
            build = partial(self._prepared_text, id or new_id("cmpl-"), asked)
        with self.idle.giving_way(), self.conversations.entering(ref):
            return await self._constrained(await self.builder.threads.run(num_bytes, build))

    async def _taken(self, asked: ChatRequest, num_bytes: int) -> tuple[ChatRequest, Breakpoints, tuple[str, ...]]:
        """Return a chat with all parts in this server's form (see `content.take`), its cache breakpoints, and warnings.

        Raises RequestError.
        """
        taken = partial(take, asked, self.builder.takes_tool_documents(asked))
        asked, breakpoints, warnings = taken() if num_bytes < LARGE else await asyncio.to_thread(taken)
        if asked.volatile == "move" and not asked.is_named:
            warnings += (NAMELESS,)
        knows_reasoning = self.template.thinks or self.template.knows("reasoning_effort")
        warnings += tuple(warnings_of(asked.asked_reasoning, knows_reasoning=knows_reasoning))
        if self.builder.separates(asked):
            await self.submitter.check_movable()
        return asked, breakpoints, warnings

    def _prepared_chat(self, turn: PendingTurn, asked: ChatRequest, found: Found, warnings: tuple[str, ...]) -> Prepared:
        form, sampling = turn.chat.form, self.submitter.sampling(asked)
        sampling = sampling if form.reasoning is None else sampling.changed({"reasoning": form.reasoning})
        answer_sources = None if found is None else AnswerSources.of(found, turn.chat)
        return Prepared(
            turn.id,
            (turn.chat.prompt,),
            asked,
            sampling,
            turn=turn,
            grammar_spec=form.grammar_spec,
            answer_sources=answer_sources,
            warnings=warnings,
        )

    def _prepared_text(self, id: str, asked: CompletionRequest | InfillRequest) -> Prepared:
        prompts = self.builder.prompts(asked)
        sampling = self.submitter.sampling(asked)
        is_echoed = isinstance(asked, TextRequest) and asked.echo
        scores = is_echoed and sampling.n_probs is not None
        echoes = tuple(map(self.builder.spelt, prompts)) if is_echoed and not scores else ()
        grammar_spec = asked.grammar_spec()
        return Prepared(id, prompts, asked, sampling, echoes=echoes, scores_prompts=scores, grammar_spec=grammar_spec)

    async def _constrained(self, prepared: Prepared) -> Prepared:
        """If a request has a grammar, compile it and return the request with it. Raises RequestError for a bad grammar."""
        grammar_spec = prepared.grammar_spec
        if grammar_spec is None:
            return prepared
        if self.grammars.num_waiting >= MOST_GRAMMARS:
            raise RequestError("too many grammars wait to be compiled: try again", status=503, retry_after=1)
        try:
            grammar = await asyncio.wrap_future(self.grammars.compile(grammar_spec.source))
        except GrammarError as error:
            raise RequestError(f"{grammar_spec.field}: {error}", param=grammar_spec.field, code="invalid_grammar") from None
        warnings = (*prepared.warnings, *_not_enforced(grammar_spec.field, grammar.left_out))
        return replace(prepared, sampling=prepared.sampling.changed({"grammar": grammar}), warnings=warnings)

    def submit(self, prepared: Prepared) -> list[Generation]:
        """Submit a request to the engine, and return the generations of its choices.

        Raises RequestError if the prompt is too long or the queue is full.
        """
        self._check_queue(prepared.num_choices)
        generations = self.submitter.generations(prepared)
        for generation in generations:
            generation.question = prepared.question
            generation.on_end = partial(self._conclude, prepared.answer_sources, prepared.options.session)
        self.engine.submit(generations)
        self.idle.stop()
        self.open.update(dict.fromkeys(generations))
        self.open[generations[0]] = prepared.turn  # a conversation continues from the first of several answers
        return generations

    async def prefetch(self, key: Hashable, asked: ChatRequest, num_bytes: int, *, open_turn: bool = False) -> bool:
        """Prefill the prompt of a chat before the chat is sent. Raises RequestError.

        Return False if no slot is idle, or if too many prompts wait to be computed ahead.

        key: as in `compute_ahead`. num_bytes: as in `accept`. open_turn: whether the prompt ends with the chat's
        documents.
        """
        if self.is_full:
            return False
        return await self.compute_ahead(key, await self.accept(asked.prefill_only(), num_bytes, open_turn, wake=Sleep.bring))

    async def warm_up(self, key: Hashable, asked: ChatRequest, num_bytes: int) -> bool:
        """Prefill the text that precedes a chat's last documents, before the chat is sent. Raises RequestError.

        Return False if the text is cached or too short, if no slot is idle, or if too many prompts wait to be computed
        ahead. A text of fewer than `recompute_last` tokens is too short: in such a small batch its KV would be rounded
        differently than in the batch of a whole prompt.

        key, num_bytes: as in `prefetch`.
        """
        if self.is_full:
            return False
        prepared = await self.accept(asked.prefill_only(), num_bytes, open_turn=True, wake=Sleep.bring)
        if prepared.prompt.num_tokens < self.context.costs.recompute_last:
            return False
        missing = await self.view.missing(prepared.prompt, self.submitter.scope(asked))
        return missing.tokens > 0 and await self.compute_ahead(key, prepared)

    async def compute_ahead(self, key: Hashable, prepared: Prepared) -> bool:
        """Prefill a prompt on an idle slot before its request arrives. Raises RequestError if the prompt is too long.

        Return False if no slot is idle, or if too many prompts wait to be computed ahead.

        key: a name for the prompt. The prompt replaces an earlier prompt that has the same scope and key.
        """
        (generation,) = self.submitter.generations(prepared, Kind.AHEAD)
        generation.question, generation.sampling = prepared.question, GREEDY
        generation.on_end = self._resume_after
        self.idle.abort()
        place, started = (prepared.options.cache_scope, key), False
        try:
            started = await asyncio.wrap_future(self.engine.submit_background(place, generation, beside=True))
        finally:  # also if the caller was cancelled
            if not started:
                self.idle.resume()
        return started

    async def room_for(self, scope: str, hits: Sequence[Hit]) -> list[Hit]:
        """Return the first hits of a search, as many as fit into a chat."""
        length, room = partial(self.builder.length, scope), int(ROOM * self.submitter.limit)
        return await self.builder.threads.run(0, partial(fitting, hits, room, length))

    @property
    def is_full(self) -> bool:
        """Whether there are at least as many open generations as slots.

        While a service is full, it computes no prompt ahead.
        """
        return len(self.open) >= self.view.num_slots

    async def prompt_text(self, generation: Generation) -> str:
        """Return the text of a generation's prompt."""
        return await asyncio.to_thread(self.model.detokenize, generation.job.layout.ids, special=True)

    # ---- a request ends --------------------------------------------------------------------------------------------

    def disconnect(self, generation: Generation) -> None:
        """Handle a client's disconnect: abandon its generation, or let the generation go on if the request wants that.

        A generation that goes on without its client is called unattended. Each conversation has at most one unattended
        generation. In all conversations together, at most half of `max_open` generations may be unattended. If another
        generation exceeds this limit, the client with the most unattended generations loses its oldest one.
        """
        turn = self.open.get(generation)
        if not generation.outlives_client or turn is None or turn.ref is None or turn.ref.conversation.forgotten:
            self.abandon(generation)
            return
        self.stop_unattended(turn.ref.conversation)
        generation.is_unattended = True
        generation.events.close()
        self._unattended[generation] = CLIENT.get()
        if len(self._unattended) > max(self.max_open // 2, 1):
            ((client, _),) = Counter(self._unattended.values()).most_common(1)
            self.abandon(next(one for one, whose in self._unattended.items() if whose == client))

    def stop_unattended(self, conversation: Conversation) -> None:
        """End the unattended generation of a conversation, if there is one."""
        for generation in list(self._unattended):
            turn = self.open[generation]
            if turn and turn.ref and turn.ref.conversation is conversation:
                self.abandon(generation)

    def find_open(self, scope: str, id: str) -> Generation | None:
        """Return the generation of an answer; None if it is not open or was abandoned."""
        found = (one for one in self.open if one.id == id and one.scope == scope and not one.abandoned)
        return next(found, None)

    def stop(self, generation: Generation) -> None:
        """End an answer, even if its client is still reading it. The client gets a Failure."""
        generation.events.put(Failure(RequestError("the answer was stopped", code="answer_stopped")))
        self.abandon(generation)

    def abandon(self, generation: Generation) -> None:
        """End a generation that no client waits for. If the generation has ended or was abandoned before, do nothing.

        The engine ends the generation within one step. Until the engine has ended it, the generation counts as open.
        """
        if generation not in self.open or generation.abandoned:
            return
        self.metrics.count_unanswered("cancelled")
        generation.abandoned, self.open[generation] = True, None
        self._unattended.pop(generation, None)
        ended = asyncio.wrap_future(self.engine.cancel(generation))
        ended.add_done_callback(lambda ended: self._close_abandoned(generation, ended))

    def _close_abandoned(self, generation: Generation, ended: asyncio.Future[None]) -> None:
        """Close an abandoned generation. Called when the engine has ended the generation, or has itself stopped."""
        if not (ended.cancelled() or ended.exception()):
            self.idle.add_abandoned(generation)
        self._close(generation)

    def _conclude(self, answer_sources: AnswerSources | None, session: str, generation: Generation, event: Final) -> Final:
        """Count a generation that the engine has ended, and store its answer.

        Return the final event for the generation's client.

        Since this method runs before the client gets the event, the client's next request finds the stored answer.
        """
        turn = self.open.get(generation)
        try:
            if generation.abandoned:
                return event
            if isinstance(event, Failure):
                self.metrics.count_unanswered("error")
                return event
            self.metrics.count_finished(event.report, event.reason)
            if turn is None:
                self._note(generation, session)
            if answer_sources is not None:
                retrieval = answer_sources.fields("".join(generation.parts))
                event = replace(event, report=replace(event.report, retrieval=retrieval))
            if turn is not None:
                event = self._remember(generation, turn, event, answer_sources, session=session)
                if (make := self._wholes.get(generation)) is not None:
                    keeping = self._keep(generation, partial(make, event))
                    self._keeping[generation.id] = asyncio.get_running_loop().create_task(keeping)
                return event
            if event.sampled is not None:
                self.answers.remember(generation.scope, "".join(generation.parts), event.sampled)
            return event
        finally:
            self._close(generation)

    def _remember(
        self, generation: Generation, turn: PendingTurn, end: End, answer_sources: AnswerSources | None, *, session: str
    ) -> End:
        """Store a finished turn, and queue idle prefill for the next turn.

        Return `end` with a report that also has the fields about the conversation.
        """
        request, layout = generation.request, generation.job.layout
        text = "".join(generation.parts)
        answer, key, is_content = turn.read(text, end.is_cut)
        if (citations := turn.chat.citations) is not None and citations.trail:
            self.builder.cited.remember(citations.trail, turn.read_shown(text, end.is_cut), answer)
        sampled = None if end.sampled is None else turn.ids(end.sampled)
        if sampled is not None:
            self.answers.remember(generation.scope, key, sampled)
        entries = turn.entries(layout, answer, sampled if is_content else None)
        self._note(generation, session, entries)
        remembered = turn.ref is not None and self.conversations.remember(turn.ref, turn.id, entries)
        if request.index_scope.is_shared and generation.limit:
            found = answer_sources.found if answer_sources else None
            answered = AnsweredChat(request.id, request.index_scope, turn.options, entries, found=found, session=session)
            self.idle.add(answered, turn.chat.prompt)
        moved = [asdict(change) for change in turn.chat.moved] or None
        lists = turn.chat.shown_lists(entries) or None
        report = replace(end.report, conversation=turn.report(remembered), moved=moved, documents_in_text=lists)
        return replace(end, report=report)

    def keep_whole(self, generation: Generation, make: Callable[[End], bytes]) -> None:
        """Store the whole answer with its conversation when the answer ends.

        make: returns the answer as JSON; called in a thread.
        """
        self._wholes[generation] = make

    async def _keep(self, generation: Generation, make: Callable[[], bytes]) -> None:
        try:
            whole = await asyncio.to_thread(make)
            self.conversations.attach(generation.scope, generation.id, whole)
        except Exception:
            logger.exception("the whole answer %s could not be stored", generation.id)
        finally:
            del self._keeping[generation.id]

    async def kept(self, id: str) -> None:
        """If the whole answer is being stored now, wait until it is stored."""
        if id in self._keeping:
            await asyncio.wait([self._keeping[id]])

    def _note(self, generation: Generation, session: str, entries: Sequence[HistoryMessage] = ()) -> None:
        """Remember a prompt of a session, and retire earlier prompts whose answers it quotes.

        For example, if an agent quotes the answer of its sub-agent, the sub-agent's prompt is no longer needed. KV that only
        retired prompts use is evicted before all other KV.

        entries: the messages of the prompt, and its answer.
        """
        job, scope = generation.job, generation.request.index_scope
        if session and scope.is_shared:
            answer, heard = spoken(entries)
            tokens = job.tokens[: job.computed].copy()  # a copy, since a view would keep the memory of the longest answer
            branch = Branch(scope, tokens, job.num_prompt, answer)
            if done := self.sessions.note_prompt((generation.scope, session), branch, heard):
                self.view.retire(session, [(one.scope, one.tokens) for one in done])

    def _resume_after(self, generation: Generation, event: Final) -> Final:
        """Resume idle prefill, which `compute_ahead` stopped. Return the event unchanged."""
        self.idle.resume()
        return event

    def _close(self, generation: Generation) -> None:
        self.open.pop(generation, None)
        self._unattended.pop(generation, None)
        self._wholes.pop(generation, None)
        self.idle.resume()

    def close(self, why: str = "the server is shutting down", *, keeps_vocabulary: bool = False) -> None:
        """End all open requests, and free the model and its parts.

        keeps_vocabulary: whether to keep the model's vocabulary, because routes that still run may read it.
        """
        self.engine.stop(why)
        self.view.close()
        self.builder.close()
        self.grammars.close()
        for tier in self.tiers:
            tier.close()
        self.conversations.close()
        if self.engine.draft_model is not None:
            self.engine.draft_model.close()
        self.context.close()
        if not keeps_vocabulary:
            self.model.close()

    # ---- limits and properties -------------------------------------------------------------------------------------

    @property
    def max_open(self) -> int:
        """The most generations that may be open: running or waiting."""
        return self.settings.parallel + self.settings.max_queue

    def _check_queue(self, num_new: int) -> None:
        if num_new > self.max_open:
            raise RequestError(f"{num_new} answers at once: expected at most {self.max_open}", param="n")
        num_open = len(self.open)
        if num_open + num_new > self.max_open:
            self.metrics.count_unanswered("refused")
            raise RequestError(
                f"{num_open} answers are running or waiting, of at most {self.max_open}: try again later",
                status=429,
                code="queue_full",
                retry_after=self.metrics.seconds_until_room(self.settings.parallel),
            )


def _not_enforced(field: str, left_out: tuple[str, ...]) -> Iterator[str]:
    """Yield a warning that names the parts of a schema that are not enforced."""
    if left_out:
        rest = len(left_out) - MOST_NAMED
        named = ", ".join(left_out[:MOST_NAMED]) + (f", and {rest:,} more" if rest > 0 else "")
        yield f"{field}: not enforced: {named}; with strict: true the request is refused"


def new_id(kind: str) -> str:
    """Return an id that cannot be guessed, since whoever knows an answer's id may continue the answer."""
    return kind + secrets.token_hex(12)
