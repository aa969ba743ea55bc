"""Builds the prompt of a request, and the form of its answer."""

from __future__ import annotations

import itertools
import reprlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b

import msgspec
import numpy as np

from ...models.detokenizer import ReasoningLimit
from ...models.jinja import TemplateError
from ...models.json_schema import GrammarError, GrammarSource
from ...models.marks import TextPiece
from ...models.model import InfillTokens, Model
from ...models.template import ChatTemplate, Message
from ...ordering.document import Document, DocumentError, find_documents, leave_out
from ...ordering.pasted import PastedList
from ...ordering.prompt import document_text, location_hint
from ...slots.radix import NO_TOKENS
from ..config.settings import Settings
from ..formats.answer import AnswerFormat, GrammarSpec
from ..formats.call_grammar import GrammarWriter
from ..formats.families import detect
from ..http.api_errors import RequestError, too_long
from ..http.json_body import MAX_BRACKETS, check_elements
from ..http.threads import PromptThreads
from .body import ChatRequest, CompletionRequest, InfillRequest, Options, TextRequest
from .chat_prompt import PLACE, ChatPrompt, DocumentSet, Fixed, SeparatePrompt
from .citations import Citations, CitedAnswers
from .content import Breakpoints
from .conversations import ConversationRef
from .history import ChatHistory, History, HistoryMessage, Prefilled, are_new, continue_history, continues_answer
from .parts import ROLES
from .prompt_length import PromptLength
from .sessions import Sessions
from .text_documents import Cut, TextList, cut_lists, keep_lists, numbers_refused, places, put_back
from .text_prompt import Infill, TextTokens, split_prompts
from .tokens import AnswerMemory, Sampled, Shown, TokenCache, answer_key, place_answers
from .tool_results import make_places, text_of
from .tool_results import rewrite as rewrite_results
from .tools import AllowedTools, Rendering, read_tools, settings_variables
from .volatile import ChangedText

# ---- The documents in the messages of a request. ------------------------------------------------------------------------


def parse_documents_of(request: ChatRequest, auto: bool = False) -> dict[int, tuple[Document, ...]]:
    """Check a request's messages, and return the documents of each message, by the message's index. Raises RequestError.

    A message has its documents in its field `documents`. The request's own `documents` belong to the last message of a
    user. auto: whether a tool message whose content is a list of documents has the documents of this list.
    """
    if not request.messages:
        raise RequestError("messages is empty: expected at least one", param="messages")
    for at, message in enumerate(request.messages):
        _check(message, f"messages[{at}]", is_last=at == len(request.messages) - 1)
    _check_arguments(request.messages)
    try:
        return find_documents(request.messages, request.documents, takes_results=auto)
    except DocumentError as error:
        raise RequestError(str(error), param=error.where) from None


def check_attention(request: ChatRequest, *, separates: bool) -> None:
    """Raise RequestError if the request reorders documents that are read separately and must keep retrieval order.

    separates: whether the documents are read separately.
    """
    if separates and request.document_order not in (None, "retrieval"):
        wrong = f"document_order is {request.document_order}: documents that are read separately keep retrieval order"
        raise RequestError(wrong, param="document_order")
    if separates and request.best == "last":
        wrong = "best is last: documents that are read separately keep retrieval order, the best one first"
        raise RequestError(wrong, param="best")


def _check(message: Message, where: str, is_last: bool) -> None:
    role = message.get("role")
    if role not in ROLES:
        expected, got = ", ".join(ROLES), reprlib.repr(role)
        raise RequestError(f"{where}.role is {got}: expected one of {expected}", param=f"{where}.role")
    if not isinstance(message.get("content"), str | list | None):
        raise RequestError(f"{where}.content: expected a text or a list of parts", param=f"{where}.content")
    if is_last and "content" not in message and role in ("system", "developer", "user"):
        raise RequestError(f"{where} has no content", param=f"{where}.content")


def _check_arguments(messages: Sequence[Message]) -> None:
    """Raise RequestError if the arguments of all calls together contain more values than a body may contain.

    Templates get decoded arguments, so each value takes memory.
    """
    calls = [call for message in messages if isinstance(given := message.get("tool_calls"), list) for call in given]
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)]
    given = [function.get("arguments") for function in functions if isinstance(function, Mapping)]
    texts = [arguments for arguments in given if isinstance(arguments, str)]
    if sum(map(len, texts)) > MAX_BRACKETS:
        check_elements(*map(str.encode, texts), what="the text of all arguments of calls", param="messages")


# ---- How a model's answers are read, and the grammar that they must fit. ------------------------------------------------


class Answers:
    """The form of a model's answers: how to read them, and the grammar that they must fit.

    source: the text of the chat template. settings: the defaults of a request's options.
    """

    def __init__(self, source: str, model: Model, settings: Settings) -> None:
        self._settings = settings
        self._model, self.format = model, detect(source)
        self.spelt = self.format.spelled(model.tokenizer.controls.words)
        """The control tokens that readers need to see."""
        self._ids = {spelling: int(model.tokenize(spelling, special=True)[0]) for spelling in self.spelt}

    def of(self, request: ChatRequest, use: AllowedTools, pieces: Sequence[TextPiece]) -> AnswerFormat:
        """Return the form of a request's answers. Raises RequestError.

        pieces: the prompt, whose end shows whether the answer starts inside its reasoning.
        """
        asked = request.asked_reasoning
        reader = partial(
            self.format.reader,
            use.types(),
            seed=secrets.token_hex(16),  # all readers of an answer give the same ids to calls
            thinks=(asked.format or self._settings.reasoning_format) != "none" or asked.is_shown is False,
            opened=_opening(pieces),
            controls=self.spelt,
        )
        return AnswerFormat(reader, self.spelt, self._grammar_spec(request, use, pieces), self._limit(request, use, pieces))

    def _grammar_spec(self, request: ChatRequest, use: AllowedTools, pieces: Sequence[TextPiece]) -> GrammarSpec | None:
        """Return the grammar that the answer must fit; None: any answer fits. Raises RequestError.

        A schema applies only to the content of the answer, and tools only to its calls: reasoning may precede both. A
        grammar that the client sent applies to the whole answer.
        """
        given, may_call = request.grammar_spec(), use.mode != "none"
        if given is not None and given.source.kind != "json_schema":
            if may_call:
                raise RequestError(f"{given.field} and tools: send one of them, or tool_choice: none", param=given.field)
            return given
        if given is None and use.mode != "required":
            return None
        reasoning = self.format.reasoning(_opening(pieces))
        if given is not None and not (may_call or reasoning or any(self.format.around)):
            return given
        writer, choices = GrammarWriter(self._ids), []
        if may_call:
            tools = [(tool.name, tool.parameters) for tool in use.tools]
            try:
                choices.append(writer.calls(self.format.written, tools, use.parallel))
            except GrammarError as error:
                raise RequestError(f"tools: {error}", param="tools", code="invalid_grammar") from None
        if given is not None and use.mode != "required":
            writer.schemas["answer"] = given.source.text
            before, after = self.format.around
            choices.append(f"{writer.text(before)} @answer {writer.text(after)}")
        body = f"({' | '.join(choices)})"
        if reasoning:
            start, end, is_open = reasoning
            body = f"{writer.reasoning('', end)} {body}" if is_open else f"{writer.reasoning(start, end)}? {body}"
        source = GrammarSource("lark", writer.lark(body), tuple(writer.schemas.items()), may_name_tokens=True)
        return GrammarSpec("tools" if given is None else given.field, source)

    def closing(self, request: ChatRequest, pieces: Sequence[TextPiece]) -> list[TextPiece]:
        """Return the pieces that end the reasoning which the prompt opens.

        Return no pieces if the prompt opens no reasoning, or if the answer may reason. An answer must not reason if the
        limit of its reasoning is 0 tokens. If the client sent its own grammar, the answer must not reason either, since
        the reasoning would have to fit this grammar, too.
        """
        reasoning, (most, message) = self.format.reasoning(_opening(pieces)), self._budget(request)
        if not reasoning or not reasoning[2] or (most and not self._has_own_grammar(request)):
            return []
        return [*([TextPiece(message, None, is_plain=True)] if message else []), TextPiece(f"{reasoning[1]}\n\n", None)]

    def _limit(self, request: ChatRequest, use: AllowedTools, pieces: Sequence[TextPiece]) -> ReasoningLimit | None:
        """Return the limit of an answer's reasoning; None: no limit. Raises RequestError.

        There is no limit if the request and the settings set none, if the model's format has no reasoning, or if the
        client sent its own grammar.
        """
        reasoning, (most, message) = self.format.reasoning(_opening(pieces)), self._budget(request)
        if most < 0 or not reasoning or self._has_own_grammar(request):
            return None
        start, end, is_open = reasoning
        if end in message:
            raise RequestError(f"it must not have the tag {end}, which follows it", param="reasoning_budget_message")
        return ReasoningLimit(
            most=most,
            start=start.encode(),
            end=end.encode(),
            calls=tuple(tag.encode() for tag in self.format.breaks) if use.types() else (),
            is_open=is_open,
            anywhere=self.format.thinks_anywhere and not (request.is_constrained or use.mode == "required"),
            closing=(*self._model.tokenize(message).tolist(), *self._model.tokenize(end, special=True).tolist()),
            piece=self._model.piece_with(self.spelt),
        )

    def _has_own_grammar(self, request: ChatRequest) -> bool:
        """Return whether the client sent a grammar that is not a schema, so that the whole answer must fit it."""
        given = request.grammar_spec() if request.is_constrained else None
        return given is not None and given.source.kind != "json_schema"

    def _budget(self, request: ChatRequest) -> tuple[int, str]:
        """Return the most tokens of reasoning (-1: no limit), and the text to insert when reasoning reaches it."""
        asked, message = request.asked_reasoning.most, request.reasoning_budget_message
        most = self._settings.reasoning_budget if asked is None else asked
        return most, self._settings.reasoning_budget_message if message is None else message


def _opening(pieces: Sequence[TextPiece]) -> str:
    """Return the text that opens the answer: the last piece of the template's own text, and all pieces after it."""
    last = next((at for at in reversed(range(len(pieces))) if pieces[at].message is None and not pieces[at].is_plain), 0)
    return "".join(piece.text for piece in pieces[last:])


TEMPLATE_BYTES = 8 << 20  # most bytes of the template's own texts between messages, with their tokens
MAX_PROMPTS = 128  # most prompts of one request
NO_BREAKPOINTS: Breakpoints = {}
NEXT_TURN = {"role": "user", "content": "?"}  # a stand-in for the user's next message


class PromptBuilder:
    """Builds prompts: renders messages, cuts out documents and tokenises.

    Safe from several threads. Callers run it in `threads`, since building a prompt may take long.

    settings: the defaults of a request's options. sessions: the store of the first instructions of each session. limit:
    the most tokens of a prompt and its answer together. room: the most bytes of requests that wait for one of `threads`.
    """

    def __init__(
        self,
        model: Model,
        template: ChatTemplate,
        answers: AnswerMemory,
        settings: Settings,
        *,
        sessions: Sessions,
        limit: int,
        room: int,
    ) -> None:
        self._model, self._answers, self._sessions, self._limit = model, answers, sessions, limit
        self._settings = settings
        self.texts, self.tokens = TextTokens(model), TokenCache(model.tokenize)
        self._template_tokens = TokenCache(partial(model.tokenize, special=True), TEMPLATE_BYTES)  # repeated in each turn
        self._first_tokens = TokenCache(partial(model.tokenize, special=True, begin=True), TEMPLATE_BYTES)
        self._infill = self._make_infill(settings.spm_infill)
        self._forms = Answers(template.source, model, settings)
        variables, asks = settings_variables(settings), settings.retrieval_prompt
        self._rendering = Rendering(template, self._forms.format.written, variables, retrieval_prompt=asks)
        self.cited = CitedAnswers()
        self.threads = PromptThreads(room)

    def close(self) -> None:
        self.threads.close()

    def prompts(self, request: CompletionRequest | InfillRequest) -> tuple[ChatPrompt, ...]:
        """Build the prompts of a text completion or of an infill request. Raises RequestError."""
        if isinstance(request, InfillRequest):
            return (self.infill(request),)
        given = list(split_prompts(request.prompt))
        if len(given) > MAX_PROMPTS:
            raise RequestError(f"prompt has {len(given):,} texts: expected at most {MAX_PROMPTS}", param="prompt")
        if isinstance(request, TextRequest) and request.suffix is not None:
            return tuple(self.infill(InfillRequest.between(item, request)) for _, item in given)
        return tuple(self.text(item, where) for where, item in given)

    def spelt(self, prompt: ChatPrompt) -> str:
        """Return the text of a prompt, with its control tokens but without its documents."""
        tokens = np.concatenate([NO_TOKENS, *(part.tokens for part in prompt.parts if isinstance(part, Fixed))])
        return self._model.detokenize(tokens, special=True)

    def infill(self, request: InfillRequest) -> ChatPrompt:
        """Build the prompt that fills a gap in a text.

        Raises RequestError, with status 501 if the model cannot fill gaps.
        """
        if self._infill is None:
            raise RequestError("this model has no tokens for filling in the middle of a text", status=501)
        length = PromptLength(self._model, self._limit)
        length.extend([request.prompt])
        return ChatPrompt(self._infill.parts(request, partial(self.tokens, request.cache_scope, tokenise=length.tokenise)))

    @property
    def can_infill(self) -> bool:
        """Whether the model can fill a gap in a text."""
        return self._infill is not None

    def _make_infill(self, suffix_first: bool) -> Infill | None:
        special, tokenizer = InfillTokens.of(self._model), self._model.tokenizer
        if special is None:
            return None
        return Infill(special, tokenizer, self.texts, limit=self._limit, suffix_first=suffix_first)

    def text(self, prompt: object, where: str = "prompt") -> ChatPrompt:
        """Build a prompt from a text, token ids, or a list of both. Raises RequestError.

        If a text spells a control token, the prompt gets this token.
        """
        tokens = self.texts.tokens(prompt, where, limit=self._limit)
        if len(tokens) >= self._limit:  # check here, so that no further prompt is tokenised after a prompt that is too long
            raise too_long(len(tokens), self._limit)
        return ChatPrompt([Fixed(tokens, "the prompt")])

    def chat(
        self,
        request: ChatRequest,
        ref: ConversationRef | None = None,
        open_turn: bool = False,
        breakpoints: Breakpoints = NO_BREAKPOINTS,
    ) -> ChatHistory:
        """Build the prompt of a chat. Raises RequestError.

        ref: the point of a conversation that the chat continues; None: it continues no conversation. open_turn: whether
        the last message, a user's, will get more documents; the prompt then ends after the documents that are known now.
        breakpoints: the cache breakpoints, each by the index of its message in the request.
        """
        check_attention(request, separates=self.separates(request))
        takes = self.takes_text_documents(request)
        build = partial(self._cut_chat, request, ref, open_turn=open_turn, breakpoints=breakpoints)
        cut = partial(cut_lists, no_numbers=numbers_refused(request)) if takes else keep_lists
        try:
            return build(cut=cut)
        except _LeftOut:
            if not takes:
                raise
            return build(cut=partial(put_back, cut))

    def _cut_chat(
        self, request: ChatRequest, ref: ConversationRef | None, *, cut: Cut, open_turn: bool, breakpoints: Breakpoints
    ) -> ChatHistory:
        """Build the prompt of a chat. Raises RequestError, and its subclass _LeftOut if the template drops documents.

        cut: finds lists of documents in the texts of messages, and cuts them out.
        """
        remembered, kind = (ref.entries, ref.kind) if ref else ((), "whole")
        given = parse_documents_of(request, auto=self.takes_tool_documents(request))
        messages, trails = request.messages, list[bytes]()
        if self.takes_text_documents(request) and not (remembered and are_new(messages, kind)):
            messages, trails = self.cited.restore(request.cache_scope, messages)
        found = cut(messages, given)
        history = continue_history(found.messages, given | found.documents, remembered, kind)
        history = replace(history, lists={at + history.shift: one for at, one in found.lists.items()})
        history, more = _cut_instructions(history, cut)
        try:
            chat = self._chat(history, request, open_turn, {at + history.shift: pin for at, pin in breakpoints.items()})
        except TemplateError as error:
            raise RequestError(str(error), param="messages") from None
        return _with_citations(replace(chat, lists=(*more, *found.report), shift=history.shift), trails, request)

    def ahead(self, request: ChatRequest, entries: Sequence[HistoryMessage]) -> ChatPrompt | None:
        """Build the part of the next turn's prompt that is known before the user sends the next message.

        entries: the whole history. Return None if the template refuses the messages, if a prompt with them is refused, or
        if the template does not show where the user's next message would begin.
        """
        messages = [*(entry.message for entry in entries), NEXT_TURN]
        try:
            parts = self._chat(History(messages, {}, entries), request).prompt.parts
        except (TemplateError, RequestError):
            return None
        next_turn = _label(len(entries), NEXT_TURN)
        known = list(itertools.takewhile(lambda part: not isinstance(part, Fixed) or part.label != next_turn, parts))
        return self._fitting(known, request) if len(known) < len(parts) else None

    def takes_tool_documents(self, request: ChatRequest) -> bool:
        return (request.tool_documents or self._settings.tool_documents) == "auto"

    def takes_text_documents(self, request: ChatRequest) -> bool:
        return (request.documents_in_text or self._settings.documents_in_text) == "auto"

    def _chat(
        self, history: History, request: ChatRequest, open_turn: bool = False, breakpoints: Breakpoints = NO_BREAKPOINTS
    ) -> ChatHistory:
        """Build a chat from its whole history.

        Raises RequestError, TemplateError if the template refuses the messages, and _LeftOut if it drops documents.
        breakpoints: the cache breakpoints, each by the index of its message in the history.
        """
        numbers = {at: len(entry.keys) for at, entry in enumerate(history.kept)}
        numbers |= {at: len(given) for at, given in history.documents.items()}
        messages, repeated = make_places(history.messages, numbers), {}
        if self.takes_tool_documents(request):
            messages, repeated = rewrite_results(messages)
        messages, moved = self._settled(messages, request)
        use = read_tools(request)
        continues = continues_answer(request, messages, prefills=self._settings.prefill_assistant)
        pieces = self._rendering.pieces(messages, request, continues)
        pieces += [] if continues else self._forms.closing(request, pieces)
        length = PromptLength(self._model, self._limit)
        length.extend([piece.text for piece in pieces])
        sets = self._document_sets(history, request, length)
        _check_places(pieces, sets, history.shift)
        entries = _entries(history, sets)
        parts: list[Fixed | DocumentSet] = []
        ends: dict[int, int] = {}  # the index of a message's last part, by message
        if len(begin := self._model.tokenizer.begin) and not _begins(pieces):
            parts.append(Fixed(begin, "the chat template", ends=False))
        end = len(messages) - 1 if open_turn else None
        shown_pieces = self._with_answers(pieces, messages, request.cache_scope)
        for shown in shown_pieces:
            piece = shown.piece
            if piece.message is None:
                parts.append(self._template_text(piece, request.cache_scope, length, first=not parts))
            else:
                message, sampled = messages[piece.message], entries[piece.message].sampled
                content = partial(self._content, message=message, sampled=sampled, scope=request.cache_scope, length=length)
                documents = sets.get(piece.message)
                if documents and documents.in_text:
                    before, place, after = piece.text.partition(PLACE)
                    if place:
                        parts.append(content(replace(shown, piece=replace(piece, text=before))))
                        length.add(parts[-1].num_tokens)
                        shown = replace(shown, piece=replace(piece, text=after))
                    else:
                        documents = None  # the documents stand in another part of the message
                if documents:
                    parts.append(sets.pop(piece.message))
                if piece.message == end and piece.message not in sets:
                    break
                parts.append(replace(content(shown), repeated=repeated.get(piece.message, ())))
                ends[piece.message] = len(parts) - 1
            if shown.rewritten is not None:
                label = _label(shown.rewritten, messages[shown.rewritten])
                parts.append(replace(parts.pop(), label=f"{label}, which the template writes in other words,"))
            length.add(parts[-1].num_tokens)
        _mark(parts, ends, breakpoints)
        if sets:
            at = next(iter(sets)) - history.shift
            raise _LeftOut(f"the chat template leaves out messages[{at}], which has documents", f"messages[{at}].documents")
        prefilled = (
            Prefilled.of(messages[-1], shown_pieces[-1].piece, parts[-1], request.shows_prefilled) if continues else None
        )
        opening = pieces[:-1] if continues and pieces[-1].message is not None else pieces
        form = self._forms.of(request, use, opening)
        prompt, kept = self._fitting(parts, request), len(history.kept)
        return ChatHistory(prompt, tuple(entries), kept, form=form, prefilled=prefilled, moved=moved)

    def _settled(
        self, messages: Sequence[Message], request: ChatRequest
    ) -> tuple[Sequence[Message], tuple[ChangedText, ...]]:
        """Return the messages for the prompt, and the changes of instructions that the prompt states.

        With `volatile: move`, the prompt has the instructions of the session's first request, and states how this
        request's instructions differ from them. The messages stay as they are if `volatile` is not `move`, if the request
        names no session or scope, or if it may not be cached.
        """
        moves = (request.volatile or self._settings.volatile) == "move"
        if not (moves and request.is_named and request.caches(self._settings.cache_prompt)):
            return messages, ()
        tools = blake2b(msgspec.json.encode(request.tools), digest_size=16).hexdigest()
        settled, moved = self._sessions.settle((request.cache_scope, request.session, tools), messages)
        return (settled, moved) if places(settled) == places(messages) else (messages, ())

    def separates(self, request: ChatRequest) -> bool:
        """Return whether each document of a chat is read separately, without attention to the other documents."""
        return (request.documents_attention or self._settings.documents_attention) == "separate"

    def _fitting(self, parts: Sequence[Fixed | DocumentSet], request: ChatRequest) -> ChatPrompt:
        """Make a prompt of these parts.

        If the prompt would be too long, leave out the lines that state the retrieval order.
        """
        if self.separates(request):
            return SeparatePrompt(parts)
        prompt = ChatPrompt(parts)
        if prompt.num_tokens < self._limit:
            return prompt
        return ChatPrompt([part.without_hint() if isinstance(part, DocumentSet) else part for part in parts])

    def _template_text(self, piece: TextPiece, scope: str, length: PromptLength, *, first: bool) -> Fixed:
        begin = first and not piece.is_plain and not (self._model.bos and piece.text.startswith(self._model.bos))
        kept = self.tokens if piece.is_plain else self._first_tokens if begin else self._template_tokens
        tokenise = partial(length.tokenise, special=not piece.is_plain, begin=begin)
        return Fixed(kept(scope, piece.text, tokenise), "the chat template", ends=False)

    def _with_answers(self, pieces: Sequence[TextPiece], messages: Sequence[Message], scope: str) -> list[Shown]:
        """Return the pieces of a prompt, with the sampled ids in place of each known answer that has reasoning or calls.

        Answers that have only content get their sampled ids in `_content`.
        """
        known: dict[int, Sampled] = {}
        for at, message in enumerate(messages):
            if message["role"] == "assistant" and (tokens := self._answers.recall(scope, answer_key(message))) is not None:
                known[at] = Sampled(self._model.detokenize(tokens, special=True), tokens)
        return place_answers(pieces, known, self._model.tokenizer.controls.touches)

    def _content(
        self, shown: Shown, *, message: Message, sampled: np.ndarray | None, scope: str, length: PromptLength
    ) -> Fixed:
        """Return the tokens of a message: the sampled ids if the model wrote the message, otherwise the tokenised text.

        If the text spells a control token, its letters are tokenised like other text.
        """
        piece, tokens = shown.piece, self._known_tokens(shown, message, sampled, scope)
        if tokens is None:
            tokens = self.tokens(scope, piece.text, length.tokenise) if piece.text else NO_TOKENS
        assert piece.message is not None
        return Fixed(tokens, _label(piece.message, message), is_question=message["role"] == "user")

    def _known_tokens(self, shown: Shown, message: Message, sampled: np.ndarray | None, scope: str) -> np.ndarray | None:
        """Return the ids that the model sampled for a message; None: they are unknown, so the message must be tokenised."""
        piece = shown.piece
        if shown.tokens is not None or message["role"] != "assistant":
            return shown.tokens
        # The sampled ids spell the whole answer, so the template must show all of it.
        is_whole = sampled is not None and piece.part == "content" and piece.text == message.get("content")
        return sampled if is_whole else self._answers.recall(scope, piece.text)

    def length(self, scope: str, document: Document) -> int:
        """Return the number of a document's tokens in a prompt."""
        return len(self.tokens(scope, document_text(document)))

    def _document_sets(self, history: History, options: Options, length: PromptLength) -> dict[int, DocumentSet]:
        """Return the set of documents of each message, by the message's index.

        A message whose documents are in `history.documents` gets a new set. Any other message keeps the set that it had in
        an earlier prompt.
        """
        sets = {at: entry.shown for at, entry in enumerate(history.kept) if entry.shown}
        shown_before: set[str] | None = None
        if (options.dedup or self._settings.dedup) == "auto":
            shown_before = {key for shown in sets.values() for key in shown.keys}
        new = {
            at: self._document_set(
                given, options, shown_before if at >= len(history.kept) else None, length, pasted=history.lists.get(at)
            )
            for at, given in sorted(history.documents.items())
            if given
        }
        return sets | new

    def _document_set(
        self,
        given: tuple[Document, ...],
        options: Options,
        shown_before: set[str] | None,
        length: PromptLength,
        *,
        pasted: PastedList | None,
    ) -> DocumentSet:
        """Tokenise documents, and make a set of them.

        shown_before: the keys of the documents that earlier turns show; None: no document is left out. A document that an
        earlier turn shows is left out, as in RAGBoost. The keys of the other documents are added to `shown_before`.
        pasted: the list in the message's text from which the documents were cut; None: they come from a field. If the
        texts of the pasted documents do not show their ids, no document is left out, and no line states the order, since a
        line of the prompt refers to documents by their ids.
        """
        hint = self._settings.order_hint if options.order_hint is None else options.order_hint
        if pasted is not None and not pasted.is_named:
            shown_before, hint = None, False
        tokenize = partial(self.tokens, options.cache_scope)
        documents, repeated = leave_out(given, shown_before or set())
        if shown_before is not None:
            shown_before.update(document.key for document in documents)
        texts = list(map(document_text, documents))
        length.extend(texts)
        tokens: list[np.ndarray] = []
        for text in texts:
            tokens.append(self.tokens(options.cache_scope, text, length.tokenise))
            length.add(len(tokens[-1]))
        is_here = documents[:1] == given[:1]  # otherwise the best document stays in an earlier turn
        price = self._settings.best_price_ms if options.best_price_ms is None else options.best_price_ms
        return DocumentSet(
            documents,
            tuple(tokens),
            policy=options.document_order or self._settings.document_order,
            best=(options.best or self._settings.best) if is_here else "free",
            best_price_ms=price if is_here else 0.0,
            hint=tokenize if hint else None,
            repeated=repeated,
            ranking=tuple(document.id for document in given) if repeated else (),
            location=tokenize(location_hint(repeated)) if repeated else NO_TOKENS,
            keep_first=options.keep_first,
            keep_last=options.keep_last,
            in_text=pasted is not None,
            number_of=tuple(pasted.number_of.items()) if pasted is not None else (),
        )


def _entries(history: History, sets: Mapping[int, DocumentSet]) -> list[HistoryMessage]:
    """Return an entry for each message of a history. A kept entry is replaced only if its message has new documents."""
    new = enumerate(history.messages[len(history.kept) :], len(history.kept))
    keys = {at: tuple(document.key for document in given) for at, given in history.documents.items()}
    kept = [
        HistoryMessage.of(history.messages[at], keys[at], sets.get(at), one_turn=entry.one_turn) if at in keys else entry
        for at, entry in enumerate(history.kept)
    ]
    return [*kept, *(HistoryMessage.of(message, keys.get(at, ()), sets.get(at)) for at, message in new)]


def _cut_instructions(history: History, cut: Cut) -> tuple[History, tuple[TextList, ...]]:
    """Cut the list of documents out of a response's instructions. Return the changed history, and a report on the list.

    The first call of `cut` did not see the instructions, since they are not among the request's messages.
    """
    if not (history.kept and history.kept[0].one_turn):
        return history, ()
    found = cut(history.messages[:1], {})
    messages = [*found.messages, *history.messages[1:]]
    documents, lists = {**history.documents, **found.documents}, {**history.lists, **found.lists}
    report = tuple(replace(one, message=-history.shift) for one in found.report)
    return replace(history, messages=messages, documents=documents, lists=lists), report


class _LeftOut(RequestError):
    def __init__(self, message: str, param: str) -> None:
        super().__init__(message, param=param)


def _check_places(pieces: Sequence[TextPiece], sets: Mapping[int, DocumentSet], shift: int) -> None:
    """Raise _LeftOut unless PLACE stands exactly once in each rendered message whose text contains documents."""
    counts = {at: 0 for at, documents in sets.items() if documents.in_text}
    for piece in pieces if counts else ():
        if piece.message in counts:
            counts[piece.message] += piece.text.count(PLACE)
    for at, count in counts.items():
        if count != 1:
            where = f"messages[{at - shift}]"
            raise _LeftOut(f"the chat template changes the text of {where}, which has documents", f"{where}.content")


def _with_citations(chat: ChatHistory, trails: Sequence[bytes], request: ChatRequest) -> ChatHistory:
    """Return the chat with its citations: the numbers that the client reads instead of the ids of documents.

    trails: a digest of the chat before each message, and one of the whole chat, as from `CitedAnswers.restore`. Without
    trails, an answer that the client sends back keeps its numbers.
    """
    sets = [entry.shown for entry in chat.entries if entry.shown is not None]
    citations = Citations.of(sets, trails[-2 if chat.prefilled else -1] if trails else b"")
    if chat.prefilled is not None:
        citations = citations.owing(chat.prefilled.content, text_of(request.messages[-1].get("content")))
    return replace(chat, citations=citations) if citations.number_of else chat


def _begins(pieces: Sequence[TextPiece]) -> bool:
    """Return whether the prompt starts with the template's own text.

    The template's own text contains BOS, or gets BOS when it is tokenised.
    """
    return bool(pieces) and pieces[0].message is None and not pieces[0].is_plain


def _mark(parts: list[Fixed | DocumentSet], ends: Mapping[int, int], breakpoints: Breakpoints) -> None:
    """Store the breakpoint of each message in the last part of this message.

    ends: the index of each message's last part, by the index of the message.
    """
    for message, pin in breakpoints.items():
        if message in ends and isinstance(part := parts[ends[message]], Fixed):
            parts[ends[message]] = replace(part, pin=pin)


def _label(at: int, message: Message) -> str:
    return f"message {at} ({message['role']})"
