"""From the messages of a request to the parts of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..models.chat import ChatTemplate, Piece, TemplateError
from ..models.model import Model
from ..ordering.document import Document, DocumentError, parse_documents
from ..ordering.prompt import document_text, location_hint
from ..slots.radix import NO_TOKENS
from .errors import RequestError
from .prompt import ChatPrompt, DocumentSet, Fixed
from .tokens import AnswerMemory, TokenCache
from .wire import ChatRequest, Options


class PromptBuilder:
    """Renders, cuts and tokenises. Safe from several threads. order, hint, dedup: what a request that does not say gets."""

    def __init__(
        self, model: Model, template: ChatTemplate, answers: AnswerMemory, order: str, hint: bool, dedup: str
    ) -> None:
        self._model, self._template, self._answers = model, template, answers
        self._order, self._hint, self._dedup = order, hint, dedup
        self._tokens = TokenCache(model.tokenize)

    def text(self, prompt: str | list[Any]) -> ChatPrompt:
        """A prompt that is text, control tokens included, or token ids. Raises RequestError."""
        tokens = self._ids(prompt) if isinstance(prompt, list) else self._model.tokenize(prompt, special=True, begin=True)
        return ChatPrompt([Fixed(tokens, "the prompt")])

    def chat(self, request: ChatRequest, open_turn: bool = False) -> ChatPrompt:
        """The parts of a chat with documents. Raises RequestError.

        open_turn: documents of the last message, a user's, are still to come, so what follows them is left out.
        """
        documents = _documents(request)
        messages = [{name: value for name, value in message.items() if name != "documents"} for message in request.messages]
        try:
            pieces = self._template.pieces(messages, tools=request.tools, **request.chat_template_kwargs)
        except TemplateError as error:
            raise RequestError(str(error), param="messages") from None
        parts: list[Fixed | DocumentSet] = []
        held: set[str] | None = set() if (request.dedup or self._dedup) == "auto" else None
        end = len(messages) - 1 if open_turn else None
        for piece in pieces:
            if piece.message is not None and piece.message == end:
                break
            if piece.message is None:
                parts.append(self._template_text(piece.text, first=not parts))
                continue
            if given := documents.pop(piece.message, None):
                parts.append(self._document_set(given, request, held))
            parts.append(self._content(piece, messages[piece.message], request.cache_scope))
        if documents:
            at = next(iter(documents))
            raise RequestError(
                f"the chat template leaves out messages[{at}], which has documents", param=f"messages[{at}].documents"
            )
        return ChatPrompt(parts)

    def _ids(self, prompt: list[Any]) -> np.ndarray:
        most = self._model.num_vocab - 1
        for at, token in enumerate(prompt):
            if type(token) is not int or not 0 <= token <= most:
                raise RequestError(f"prompt[{at}] is {token!r}: expected a token id from 0 to {most}", param=f"prompt[{at}]")
        return np.array(prompt, np.int32)

    def _template_text(self, text: str, first: bool) -> Fixed:
        begin = first and not (self._model.bos and text.startswith(self._model.bos))
        return Fixed(self._model.tokenize(text, special=True, begin=begin), "the chat template", ends=False)

    def _content(self, piece: Piece, message: Mapping[str, Any], scope: str) -> Fixed:
        """A message's text; an answer of ours as it was sampled. Control tokens in it are just text."""
        role = message["role"]
        sampled = self._answers.recall(scope, piece.text) if role == "assistant" else None
        tokens = self._tokens(piece.text) if sampled is None else sampled
        return Fixed(tokens, f"message {piece.message} ({role})")

    def _document_set(self, given: tuple[Document, ...], options: Options, held: set[str] | None) -> DocumentSet:
        """held: keys of the documents of earlier turns, which are not shown again (RAGBoost, 5.4); None to show all."""
        hint = self._hint if options.order_hint is None else options.order_hint
        repeated = tuple(document.id for document in given if held and document.key in held)
        documents = tuple(document for document in given if not held or document.key not in held)
        if held is not None:
            held.update(document.key for document in documents)
        return DocumentSet(
            documents,
            tuple(self._tokens(document_text(document)) for document in documents),
            options.document_order or self._order,
            self._tokens if hint else None,
            repeated,
            self._tokens(location_hint(repeated)) if repeated else NO_TOKENS,
        )


def _documents(request: ChatRequest) -> dict[int, tuple[Document, ...]]:
    """The documents of each message that has some; also checks the messages themselves. Raises RequestError."""
    if not request.messages:
        raise RequestError("messages is empty: expected at least one", param="messages")
    found: dict[int, tuple[Document, ...]] = {}
    for at, message in enumerate(request.messages):
        where = f"messages[{at}]"
        if not isinstance(message.get("role"), str):
            raise RequestError(f"{where}.role: expected a text such as 'user'", param=f"{where}.role")
        if not isinstance(message.get("content"), str | list | None):
            raise RequestError(f"{where}.content: expected a text or a list of parts", param=f"{where}.content")
        if message.get("documents"):
            if message["role"] != "user":
                raise RequestError(f"{where}.documents: only user messages have documents", param=f"{where}.documents")
            found[at] = _parsed(message["documents"], f"{where}.documents")
    if request.documents:
        last = max((at for at, message in enumerate(request.messages) if message["role"] == "user"), default=None)
        if last is None:
            raise RequestError("documents belong to the last user message, and there is none", param="documents")
        if last in found:
            raise RequestError(f"documents and messages[{last}].documents: give one of them", param="documents")
        found[last] = _parsed(request.documents, "documents")
    return found


def _parsed(values: Any, where: str) -> tuple[Document, ...]:
    if not isinstance(values, list):
        raise RequestError(f"{where}: expected a list", param=where)
    try:
        return parse_documents(values, where)
    except DocumentError as error:
        raise RequestError(str(error), param=error.where) from None
