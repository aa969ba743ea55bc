"""From the messages of a request to the parts of a prompt."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ...models.chat.marks import Piece
from ...models.chat.messages import Message
from ...models.chat.sandbox import TemplateError
from ...models.chat.template import ChatTemplate
from ...models.infill import InfillTokens
from ...models.model import Model
from ...ordering.document import Document
from ...ordering.given import leave_out
from ...ordering.prompt import document_text, location_hint
from ...slots.radix import NO_TOKENS
from ..errors import RequestError, too_long
from ..settings import Settings
from ..wire.infill import InfillRequest
from ..wire.requests import ChatRequest, CompletionRequest, Options, TextRequest
from .answered import Sampled, Shown, answer_key, place_answers
from .begun import Begun, continues_answer
from .conversation import Origin
from .given import check_attention, parse_documents_of
from .history import Chat, Entry, History, continue_history
from .infill import Infill
from .parts import DocumentSet, Fixed
from .prompt import ChatPrompt, SeparatePrompt
from .reading import Answers
from .rendering import Rendering
from .results import make_places
from .results import rewrite as rewrite_results
from .texts import Texts, split_prompts, texts_of
from .threads import PromptThreads
from .tokens import AnswerMemory, TokenCache
from .tools import read_tools
from .variables import settings_variables

MAX_PROMPTS = 128  # of one request
NEXT_TURN = {"role": "user", "content": "?"}  # a stand-in for the user's next message


class PromptBuilder:
    """Renders, cuts and tokenises. Safe from several threads: callers run it in `threads`.

    limit: tokens that a prompt and its answer may have. settings: the defaults of a request's options. room: bytes of
    requests that may wait for its threads.
    """

    def __init__(
        self, model: Model, template: ChatTemplate, answers: AnswerMemory, settings: Settings, *, limit: int, room: int
    ) -> None:
        self._model, self._answers, self._limit = model, answers, limit
        self._settings = settings
        self.texts, self.tokens = Texts(model), TokenCache(model.tokenize)
        self._infill = self._make_infill(settings.spm_infill)
        self._forms = Answers(template.source, model, settings)
        variables, asks = settings_variables(settings), settings.retrieval_prompt
        self._rendering = Rendering(template, self._forms.format.written, variables, retrieval_prompt=asks)
        self.threads = PromptThreads(room)

    def close(self) -> None:
        self.threads.close()

    def prompts(self, request: CompletionRequest | InfillRequest) -> tuple[ChatPrompt, ...]:
        """Build the prompts of a request that is no chat: one, or a list of them. Raises RequestError."""
        if isinstance(request, InfillRequest):
            return (self.infill(request),)
        given = list(split_prompts(request.prompt))
        if len(given) > MAX_PROMPTS:
            raise RequestError(f"prompt has {len(given):,} texts: expected at most {MAX_PROMPTS}", param="prompt")
        if isinstance(request, TextRequest) and request.suffix is not None:
            return tuple(self.infill(InfillRequest.between(item, request)) for _, item in given)
        return tuple(self.text(item, where) for where, item in given)

    def spelt(self, prompt: ChatPrompt) -> str:
        """Return the text of a prompt that has no documents, with its control tokens."""
        tokens = np.concatenate([NO_TOKENS, *(part.tokens for part in prompt.parts if isinstance(part, Fixed))])
        return self._model.detokenize(tokens, special=True)

    def infill(self, request: InfillRequest) -> ChatPrompt:
        """Build the prompt that fills a gap in a text. Raises RequestError 501 for a model that cannot."""
        if self._infill is None:
            raise RequestError("this model has no tokens for filling in the middle of a text", status=501)
        return ChatPrompt(self._infill.parts(request, partial(self.tokens, request.cache_scope)))

    def _make_infill(self, suffix_first: bool) -> Infill | None:
        special, tokenizer = InfillTokens.of(self._model), self._model.tokenizer
        if special is None:
            return None
        return Infill(special, tokenizer, self.texts, limit=self._limit, suffix_first=suffix_first)

    def text(self, prompt: object, where: str = "prompt") -> ChatPrompt:
        """Build a prompt from a text, in which control tokens count, token ids, or both mixed. Raises RequestError."""
        self._check_size(texts_of(prompt, where))
        return ChatPrompt([Fixed(self.texts.tokens(prompt, where), "the prompt")])

    def chat(self, request: ChatRequest, origin: Origin | None = None, open_turn: bool = False) -> Chat:
        """Build the prompt of a chat with documents. Raises RequestError.

        origin: the point of a conversation that it continues. open_turn: more documents of the last message, a user's,
        are still to come, so the prompt ends with its documents.
        """
        check_attention(request, separates=self.separates(request))
        remembered, kind = (origin.entries, origin.kind) if origin else ((), "whole")
        given = parse_documents_of(request, auto=self._takes_tool_documents(request))
        history = continue_history(request.messages, given, remembered, kind)
        try:
            return self._chat(history, request, open_turn)
        except TemplateError as error:
            raise RequestError(str(error), param="messages") from None

    def ahead(self, request: ChatRequest, entries: Sequence[Entry]) -> ChatPrompt | None:
        """Build the prefix of every next turn after `entries`, up to the user's message; None if the template hides it."""
        messages = [*(entry.message for entry in entries), NEXT_TURN]
        try:
            parts = self._chat(History(messages, {}, entries), request).prompt.parts
        except (TemplateError, RequestError):
            return None
        next_turn = _label(len(entries), NEXT_TURN)
        known = list(itertools.takewhile(lambda part: not isinstance(part, Fixed) or part.label != next_turn, parts))
        return self._fitting(known, request) if len(known) < len(parts) else None

    def _takes_tool_documents(self, request: ChatRequest) -> bool:
        return (request.tool_documents or self._settings.tool_documents) == "auto"

    def _chat(self, history: History, request: ChatRequest, open_turn: bool = False) -> Chat:
        """Build a chat from its whole history. Raises TemplateError; RequestError if the template leaves out documents."""
        numbers = {at: len(entry.keys) for at, entry in enumerate(history.kept)}
        numbers |= {at: len(given) for at, given in history.documents.items()}
        messages, repeated = make_places(history.messages, numbers), {}
        if self._takes_tool_documents(request):
            messages, repeated = rewrite_results(messages)
        use = read_tools(request)
        continues = continues_answer(request, messages, prefills=self._settings.prefill_assistant)
        pieces = self._rendering.pieces(messages, request, continues)
        pieces += [] if continues else self._forms.closing(request, pieces)
        self._check_size(piece.text for piece in pieces)
        sets = self._document_sets(history, request)
        entries = [
            *history.kept,
            *(
                Entry.of(message, tuple(document.key for document in history.documents.get(at, ())), sets.get(at))
                for at, message in enumerate(history.messages[len(history.kept) :], len(history.kept))
            ),
        ]
        parts: list[Fixed | DocumentSet] = []
        if len(begin := self._model.tokenizer.begin) and not _begins(pieces):
            parts.append(Fixed(begin, "the chat template", ends=False))
        end = len(messages) - 1 if open_turn else None
        shown_pieces = self._with_answers(pieces, messages, request.cache_scope)
        for shown in shown_pieces:
            piece = shown.piece
            if piece.message is None:
                parts.append(self._template_text(piece, request.cache_scope, first=not parts))
            else:
                if documents := sets.pop(piece.message, None):
                    parts.append(documents)
                if piece.message == end:
                    break
                content = self._content(shown, messages[piece.message], entries[piece.message].sampled, request.cache_scope)
                parts.append(replace(content, repeated=repeated.get(piece.message, ())))
            if shown.rewritten is not None:
                label = _label(shown.rewritten, messages[shown.rewritten])
                parts.append(replace(parts.pop(), label=f"{label}, which the template writes in other words,"))
        if sets:
            at = next(iter(sets)) - history.shift
            raise RequestError(
                f"the chat template leaves out messages[{at}], which has documents", param=f"messages[{at}].documents"
            )
        begun = Begun.of(messages[-1], shown_pieces[-1].piece, parts[-1], request.shows_begun) if continues else None
        opening = pieces[:-1] if continues and pieces[-1].message is not None else pieces
        form = self._forms.of(request, use, opening)
        return Chat(self._fitting(parts, request), tuple(entries), len(history.kept), form=form, begun=begun)

    def separates(self, request: ChatRequest) -> bool:
        """Whether the documents of a chat are read separately."""
        return (request.documents_attention or self._settings.documents_attention) == "separate"

    def _fitting(self, parts: Sequence[Fixed | DocumentSet], request: ChatRequest) -> ChatPrompt:
        """Make the prompt, without hints of the ranking if it is too long with them."""
        if self.separates(request):
            return SeparatePrompt(parts, request.link_tokens or 0)
        prompt = ChatPrompt(parts)
        if prompt.num_tokens < self._limit:
            return prompt
        return ChatPrompt([part.without_hint() if isinstance(part, DocumentSet) else part for part in parts])

    def _check_size(self, texts: Iterable[str]) -> None:
        """Refuse texts, before they are tokenised, that are too long even if every token is the longest one."""
        least = sum(len(text.encode("utf-8", "replace")) for text in texts) // self._model.tokenizer.longest
        if least >= self._limit:
            raise too_long(least, self._limit, at_least=True)

    def _template_text(self, piece: Piece, scope: str, first: bool) -> Fixed:
        if piece.is_plain:
            return Fixed(self.tokens(scope, piece.text), "the chat template", ends=False)
        begin = first and not (self._model.bos and piece.text.startswith(self._model.bos))
        return Fixed(self._model.tokenize(piece.text, special=True, begin=begin), "the chat template", ends=False)

    def _with_answers(self, pieces: Sequence[Piece], messages: Sequence[Message], scope: str) -> list[Shown]:
        """Find answers of the model that are more than their content: thoughts, calls."""
        known: dict[int, Sampled] = {}
        for at, message in enumerate(messages):
            if message["role"] == "assistant" and (tokens := self._answers.recall(scope, answer_key(message))) is not None:
                known[at] = Sampled(self._model.detokenize(tokens, special=True), tokens)
        return place_answers(pieces, known, self._model.tokenizer.controls.touches)

    def _content(self, shown: Shown, message: Message, sampled: np.ndarray | None, scope: str) -> Fixed:
        """Tokenise a message, an answer of ours as it was sampled. Control tokens in it are only text."""
        piece, tokens = shown.piece, shown.tokens
        if tokens is None and message["role"] == "assistant":
            # The sampled ids spell the whole answer: they are of no use if the template shows only a part of it.
            is_whole = sampled is not None and piece.part == "content" and piece.text == message.get("content")
            tokens = sampled if is_whole else self._answers.recall(scope, piece.text)
        assert piece.message is not None
        return Fixed(self.tokens(scope, piece.text) if tokens is None else tokens, _label(piece.message, message))

    def length(self, scope: str, document: Document) -> int:
        """Return the tokens of a document in a prompt."""
        return len(self.tokens(scope, document_text(document)))

    def _document_sets(self, history: History, options: Options) -> dict[int, DocumentSet]:
        """Return the documents of each message that has some: of kept messages as they stood, of new ones made here."""
        sets = {at: entry.shown for at, entry in enumerate(history.kept) if entry.shown}
        held: set[str] | None = None
        if (options.dedup or self._settings.dedup) == "auto":
            held = {key for shown in sets.values() for key in shown.keys}
        new = {at: self._document_set(given, options, held) for at, given in sorted(history.documents.items()) if given}
        return sets | new

    def _document_set(self, given: tuple[Document, ...], options: Options, held: set[str] | None) -> DocumentSet:
        """Tokenise documents. held: keys of earlier turns' documents, not shown again (RAGBoost, 5.4); None: show all."""
        hint = self._settings.order_hint if options.order_hint is None else options.order_hint
        tokenize = partial(self.tokens, options.cache_scope)
        documents, repeated = leave_out(given, held or set())
        if held is not None:
            held.update(document.key for document in documents)
        texts = list(map(document_text, documents))
        self._check_size(texts)
        return DocumentSet(
            documents,
            tuple(map(tokenize, texts)),
            policy=options.document_order or self._settings.document_order,
            hint=tokenize if hint else None,
            repeated=repeated,
            location=tokenize(location_hint(repeated)) if repeated else NO_TOKENS,
            keep_first=options.keep_first,
            keep_last=options.keep_last,
        )


def _begins(pieces: Sequence[Piece]) -> bool:
    """Whether the first piece is the template's: such a piece contains BOS or gets it put in front."""
    return bool(pieces) and pieces[0].message is None and not pieces[0].is_plain


def _label(at: int, message: Message) -> str:
    return f"message {at} ({message['role']})"
