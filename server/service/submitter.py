"""Makes generations from accepted requests. The engine runs the generations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ...models.detokenizer import ContentParts, TextStream
from ...models.errors import UnknownAdapter
from ...models.lora import Adapters
from ...models.model import Model
from ...models.sampling_params import GREEDY, Sampling
from ...slots.lookup import Lookup
from ...slots.request import Kind, Prompt, Request
from ...slots.scope import Scope
from ..chat.body import AdapterScale, ChatRequest, Options
from ..chat.chat_prompt import ChatPrompt
from ..chat.conversations import PendingTurn
from ..chat.sampling_fields import MAX_BIASES, MOST_LISTED, Defaults
from ..config.settings import Draft
from ..engine.generation import Generation
from ..engine.view import View
from ..formats.answer import GrammarSpec
from ..formats.readers import ReadParts, SteppedReader
from ..http.api_errors import RequestError, too_long
from ..search.retrieve import AnswerSources

T = TypeVar("T")
CANNOT_DRAFT = "this model's state cannot be cut, so a wrong draft could not be removed from it"
CACHE_IS_OFF = "cache_prompt is off"
SCORED = "the request wants log-probabilities of its prompt, so the whole prompt was computed"


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A checked request with its prompts.

    id: the answer's id.
    turn: the chat's turn, to which the answer will be added; None for a text completion.
    echoes: the prompts' texts, if the answers start with them.
    scores_prompts: whether the answers start with the prompts' tokens and their logprobs.
    grammar_spec: the grammar that the answers must fit.
    answer_sources: the documents of a search, which the answer may cite.
    warnings: texts about fields that have no effect.
    """

    id: str
    prompts: tuple[ChatPrompt, ...]
    options: Options
    sampling: Sampling
    turn: PendingTurn | None = None
    echoes: tuple[str, ...] = ()
    scores_prompts: bool = False
    grammar_spec: GrammarSpec | None = None
    answer_sources: AnswerSources | None = None
    warnings: tuple[str, ...] = ()

    @property
    def prompt(self) -> ChatPrompt:
        """The prompt of a request that has exactly one prompt, such as a chat."""
        (prompt,) = self.prompts
        return prompt

    @property
    def question(self) -> bytes:
        """The last message of the user, as JSON; empty if the request is no chat."""
        entries = self.turn.chat.entries if self.turn else ()
        return next((entry.said for entry in reversed(entries) if entry.role == "user"), b"")

    @property
    def num_choices(self) -> int:
        """The number of generations: one for each choice of each prompt."""
        return len(self.prompts) * (self.options.n or 1)


def _check_listed(prepared: Prepared, generations: Sequence[Generation]) -> None:
    """Raise RequestError if an unstreamed answer has logprobs that could take too much memory."""
    if prepared.sampling.n_probs is None or prepared.options.stream:
        return
    listed = sum(one.num_echoed + one.limit for one in generations) * (prepared.sampling.n_probs + 1)
    if listed > MOST_LISTED:
        wrong = f"logprobs: the answer could list {listed:,} tokens: expected at most {MOST_LISTED:,}"
        raise RequestError(f"{wrong}; stream it, or ask for fewer choices or tokens", param="logprobs")


def with_scales(asked: Sequence[AdapterScale], where: str, use: Callable[[dict[int, float]], T]) -> T:
    """Call `use` with the adapters' scales by id, and return its result. Raises RequestError for an unknown adapter.

    where: the name of the request's field, for the error.
    """
    try:
        return use({one.id: one.scale for one in asked})
    except UnknownAdapter as error:
        where = f"{where}[{[one.id for one in asked].index(error.number)}].id"
        raise RequestError(f"{where} is {error.number}: {error}", param=where) from None


def _parts(prepared: Prepared) -> ContentParts | None:
    """Return a reader that finds the content in an answer. Stop strings apply only to the content.

    The result is None if the request has no stop strings, or if the whole answer is content.
    """
    reader = prepared.turn.chat.form.reader() if prepared.turn and prepared.options.stops() else None
    return ReadParts(reader) if isinstance(reader, SteppedReader) else None


class Submitter:
    """Makes generations. For the event loop only.

    limit: the most tokens that a prompt and its answer may have together.
    defaults: values for the fields that a request does not set.
    """

    def __init__(self, model: Model, view: View, limit: int, defaults: Defaults, *, adapters: Adapters) -> None:
        self.limit, self.defaults, self.adapters = limit, defaults, adapters
        self._model, self._view = model, view
        self._ids = itertools.count(1)

    async def check_movable(self) -> None:
        """Raise RequestError if the model's KV cannot be moved to other positions in a prompt.

        Documents can be read separately only if their KV can be moved.
        """
        if reason := await self._view.why_unmovable():
            wrong = f"documents_attention is separate: this model's KV cannot be moved: {reason}"
            raise RequestError(wrong, param="documents_attention")

    def caches(self, options: Options) -> bool:
        """Return whether a request may read and fill the cache."""
        return options.caches(self.defaults.caches)

    @property
    def can_reuse(self) -> bool:
        """Whether the model's prompts can be cached at all."""
        return self._model.can_trim or self._view.keeps_snapshots

    def scope(self, options: Options) -> Scope:
        """Return the scope in which a request shares its KV if the request uses the cache.

        Raises RequestError if the request names an unknown adapter.
        """
        name = self.adapters.name
        return Scope.shared(options.cache_scope, name() if options.lora is None else with_scales(options.lora, "lora", name))

    def scope_of_dry_run(self, options: Options) -> Scope:
        """Return the scope whose KV a request would reuse. Raises RequestError.

        If the request turns the cache off, return a private scope, which has no KV.
        """
        shared = self.scope(options)
        return shared if options.caches(default=True) else Scope.private(0, shared.adapters)

    def sampling(self, options: Options) -> Sampling:
        """Return a request's sampling parameters. Raises RequestError.

        Call this method in one of the threads that make prompts, because it may tokenise texts.
        """
        return options.sampling(self._model, self.defaults.sampling).seeded()

    def _check_length(self, prompt: ChatPrompt) -> None:
        """Raise RequestError for a prompt that is empty or leaves no room for an answer."""
        if prompt.num_tokens == 0:
            raise RequestError("the prompt is empty: expected at least one token")
        if prompt.num_tokens >= self.limit:
            raise too_long(prompt.num_tokens, self.limit)

    def generations(self, prepared: Prepared, kind: Kind = Kind.CLIENT) -> list[Generation]:
        """Return the generations of a request, ordered by prompt and then by choice. Raises RequestError.

        The choices of a prompt usually share the prompt's KV, even if the request does not use the cache. If the answers
        have the prompt's logprobs, the choices share nothing. If the model's state cannot be cut, the choices share only
        snapshots in the cache.
        """
        num_biases = len(prepared.sampling.logit_bias) * prepared.num_choices
        if num_biases > MAX_BIASES:
            wrong = f"logit_bias: {num_biases:,} tokens for all answers together: expected at most {MAX_BIASES:,}"
            raise RequestError(wrong, param="logit_bias")
        made: list[Generation] = []
        for prompt in prepared.prompts:
            self._check_length(prompt)
            number, choices = next(self._ids), (prepared.options.n or 1) if kind.is_client else 1
            first = self._generation(prepared, prompt, (number, 0), kind)
            others = [self._generation(prepared, prompt, (number, choice), kind) for choice in range(1, choices)]
            for other in others:
                other.first = first
            made += [first, *others]
        _check_listed(prepared, made)
        return made

    def _generation(self, prepared: Prepared, prompt: ChatPrompt, place: tuple[int, int], kind: Kind) -> Generation:
        """Return the generation of one choice.

        place: two numbers: the request id of the prompt's first choice, and the index of the choice to generate.
        """
        options, (first, choice) = prepared.options, place
        wanted, room = options.limit(self.defaults.limit), self.limit - prompt.num_tokens
        limit = room if wanted < 0 else min(wanted, room)
        scores = prepared.scores_prompts and kind.is_client
        shared, caches = self.scope(options), self.caches(options) and not scores
        cache = caches and self._model.can_trim
        number, can_share = next(self._ids) if choice else first, self._model.can_trim and not scores
        request = Request(
            id=number,
            prompt=prompt,
            limit=max(limit, 1),
            # A recurrent state on the device belongs to one request. Choices share a state only through snapshots.
            scope=shared if cache else Scope.private(first if can_share else number, shared.adapters),
            cache=cache,
            kind=kind,
            priority=options.priority,
            wanted_slot=self._slot(options) if kind.is_client and not choice else -1,
            snapshot_scope=shared if caches and self._view.keeps_snapshots else None,
            draft=self._draft(options) if kind.is_client else None,
            scores_prompt=scores,
            session=options.session,
        )
        piece, keeps = self._pieces(prepared), request.keeps
        # Only the first choice is read in the form of a chat's answer. In other choices, control tokens would count as text.
        keeps = keeps and (choice == 0 or piece == self._model.piece)
        return Generation(
            id=prepared.id,
            request=request,
            sampling=prepared.sampling.varied(choice),
            text=TextStream(options.stops(), piece, _parts(prepared)),
            limit=limit,
            wanted=wanted,
            patience=max(options.t_max_predict_ms, 0) / 1000,
            scope=options.cache_scope,
            wants_progress=options.return_progress,
            wants_segments=options.report_segments,
            is_whole=not options.stream,
            outlives_client=kind.is_client and isinstance(options, ChatRequest) and options.outlives_client,
            no_cache_reason=SCORED if scores else self._no_cache_reason(caches, cache),
            detokenize=self._model.detokenize,
            spells=partial(self._model.spells, piece=piece) if keeps else None,
        )

    @property
    def why_no_drafts(self) -> str:
        """Why no request can have drafts; empty if requests can have drafts."""
        if self._view.can_cut:
            return ""
        return CANNOT_DRAFT if self.defaults.draft != "off" else f"{CANNOT_DRAFT}: with some models --draft lookup allows it"

    @property
    def draft(self) -> Draft:
        """How tokens are drafted for requests that do not set `draft`."""
        return "off" if self.why_no_drafts else self.defaults.draft

    def _draft(self, options: Options) -> Lookup | None:
        """Return the source of drafts for a request; None if nothing is drafted. Raises RequestError."""
        wanted = self.draft if options.draft is None else options.draft
        if wanted == "off":
            return None
        if self.why_no_drafts:
            raise RequestError(f"draft is {wanted}: {self.why_no_drafts}", param="draft")
        if wanted == "model" and not self._view.has_draft_model:
            raise RequestError(
                "draft is model: this server has no --draft-model, and no --spec-type draft-mtp", param="draft"
            )
        return Lookup(asks_model=wanted == "model")

    def _slot(self, options: Options) -> int:
        """Return the slot that a request asks for; -1 for any slot. Raises RequestError."""
        if options.id_slot >= self._view.num_slots:
            expected = f"expected -1 (any) to {self._view.num_slots - 1}"
            raise RequestError(f"id_slot is {options.id_slot:,}: {expected}", param="id_slot")
        return options.id_slot

    def _pieces(self, prepared: Prepared) -> Callable[[int], bytes]:
        """Return the function that maps a token to its bytes in an answer.

        A control token has no bytes, unless the reader of the chat's answers needs it as text.
        """
        spelt = prepared.turn.chat.form.spelt if prepared.turn else frozenset()
        return self._model.piece_with(spelt) if spelt else self._model.piece

    def idle_prefill(
        self, prompt: Prompt, scope: Scope, kind: Kind = Kind.AHEAD, follows: int | None = None, session: str = ""
    ) -> Generation:
        """Return a generation for idle time that prefills a prompt and generates no answer.

        kind, follows, session: as in `Request`.
        """
        number, can_cut = next(self._ids), self._model.can_trim
        request = Request(
            id=number,
            prompt=prompt,
            limit=1,
            scope=scope if can_cut else Scope.private(number, scope.adapters),
            cache=can_cut,
            snapshot_scope=None if can_cut else scope,
            kind=kind,
            follows=follows,
            session=session,
        )
        text = TextStream((), self._model.piece)
        return Generation(id="", request=request, sampling=GREEDY, text=text, limit=0, scope=scope.name)

    def _no_cache_reason(self, caches: bool, cache: bool) -> str | None:
        if not caches:
            return CACHE_IS_OFF
        if cache:
            return None
        if self._view.keeps_snapshots:
            return "this model's state cannot be cut, and no snapshot of it goes further"
        return "this model keeps no KV that can be cut at a prefix, and --cache-ram leaves no room for snapshots"
