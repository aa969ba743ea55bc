"""The documents that the messages of a request bring."""

from __future__ import annotations

import reprlib

from ...models.chat.messages import Message
from ...ordering.document import Document, DocumentError, parse_documents
from ..errors import RequestError
from ..wire.requests import ChatRequest
from .results import TOOLS, documents_in

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
HOLDERS = ("user", *TOOLS)  # roles whose messages may have documents


def parse_documents_of(request: ChatRequest, auto: bool = False) -> dict[int, tuple[Document, ...]]:
    """Return the documents of each message with a `documents` field; check the messages, too. Raises RequestError.

    auto: and of each tool's message whose content is a list of documents.
    """
    if not request.messages:
        raise RequestError("messages is empty: expected at least one", param="messages")
    found: dict[int, tuple[Document, ...]] = {}
    for at, message in enumerate(request.messages):
        where = f"messages[{at}]"
        _check(message, where)
        given = message.get("documents")
        if given and message["role"] not in HOLDERS:
            raise RequestError(f"{where}.documents: only users and tools have documents", param=f"{where}.documents")
        if given is not None:
            found[at] = _parse_list(given, f"{where}.documents")
        elif auto and message["role"] in TOOLS and (listed := documents_in(message, f"{where}.content")):
            found[at] = listed
    if request.documents is None:
        return found
    last = max((at for at, message in enumerate(request.messages) if message["role"] == "user"), default=None)
    if last is None and request.documents:
        raise RequestError("documents belong to the last user message, and there is none", param="documents")
    if last is not None:
        if found.get(last) and request.documents:
            raise RequestError(f"documents and messages[{last}].documents: give one of them", param="documents")
        found[last] = found.get(last) or _parse_list(request.documents, "documents")
    return found


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


def _parse_list(values: object, where: str) -> tuple[Document, ...]:
    if not isinstance(values, list):
        raise RequestError(f"{where}: expected a list", param=where)
    try:
        return parse_documents(values, where)
    except DocumentError as error:
        raise RequestError(str(error), param=error.where) from None
