"""The documents that the messages of a request bring."""

from __future__ import annotations

import reprlib

from ...models.chat.messages import Message
from ...ordering.document import Document, DocumentError
from ...ordering.given import find_documents
from ..errors import RequestError
from ..wire.requests import ChatRequest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def parse_documents_of(request: ChatRequest, auto: bool = False) -> dict[int, tuple[Document, ...]]:
    """Return the documents of each message with a `documents` field; check the messages, too. Raises RequestError.

    auto: and of each tool's message whose content is a list of documents.
    """
    if not request.messages:
        raise RequestError("messages is empty: expected at least one", param="messages")
    for at, message in enumerate(request.messages):
        _check(message, f"messages[{at}]")
    try:
        return find_documents(request.messages, request.documents, takes_results=auto)
    except DocumentError as error:
        raise RequestError(str(error), param=error.where) from None


def check_attention(request: ChatRequest, *, separates: bool) -> None:
    """Refuse options that documents which are read separately, or jointly, would ignore. Raises RequestError."""
    if not separates:
        if request.link_tokens is not None:
            raise RequestError("link_tokens: only documents that are read separately have some", param="link_tokens")
        return
    if request.document_order not in (None, "retrieval"):
        wrong = f"document_order is {request.document_order}: documents that are read separately keep retrieval order"
        raise RequestError(wrong, param="document_order")


def _check(message: Message, where: str) -> None:
    role = message.get("role")
    if role not in ROLES:
        expected, got = ", ".join(ROLES), reprlib.repr(role)
        raise RequestError(f"{where}.role is {got}: expected one of {expected}", param=f"{where}.role")
    if not isinstance(message.get("content"), str | list | None):
        raise RequestError(f"{where}.content: expected a text or a list of parts", param=f"{where}.content")
    if "content" in message or (role == "assistant" and "tool_calls" in message):
        return
    expected = "content or tool_calls" if role == "assistant" else "content"
    raise RequestError(f"{where} has no {expected}", param=f"{where}.content")
