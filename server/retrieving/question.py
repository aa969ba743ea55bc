"""From a chat with `retrieval` to the query, and from what was found to the chat with its documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, takewhile

import msgspec

from ...ordering.document import Document
from ...ordering.given import TOOLS
from ...retrieval import Hit, Query
from ..errors import RequestError
from ..wire.requests import ChatRequest, Json
from ..wire.retrieval import Retrieval
from ..wire.searching import SearchRequest
from .library import Library


def query_of(asked: ChatRequest, library: Library) -> Query | None:
    """Return the query of a chat: its own, or the last question. Raises RequestError where there is none.

    None: the chat goes on with results of tools alone, behind a question whose documents it has.
    """
    wish = asked.retrieval if isinstance(asked.retrieval, Retrieval) else Retrieval()
    text = _last_question(asked) if wish.query is None else wish.query
    if text is None:
        return None
    top_k, paths = wish.top_k or library.top_k, tuple(wish.paths)
    return Query(text=text, top_k=top_k, paths=paths, min_score=wish.min_score)


def query_of_search(asked: SearchRequest, library: Library) -> Query:
    top_k, paths = asked.top_k or library.top_k, tuple(asked.paths)
    return Query(text=asked.query, top_k=top_k, paths=paths, min_score=asked.min_score)


def _last_question(asked: ChatRequest) -> str | None:
    at = _last(asked, "user")
    if at is None and _last(asked, *TOOLS) is not None:
        return None
    if at is None:
        raise RequestError("retrieval: expected a message of a user, or a query of its own", param="retrieval")
    content = asked.messages[at].get("content")
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return "\n".join(text for text in texts if isinstance(text, str))


def _last(asked: ChatRequest, *roles: str) -> int | None:
    """Return the index of the last message of some roles."""
    return max((at for at, message in enumerate(asked.messages) if message.get("role") in roles), default=None)


def fitting(hits: Sequence[Hit], room: int, length: Callable[[Document], int]) -> list[Hit]:
    """Return the first hits, at least one, that have no more tokens together than there is room for.

    length: returns the tokens of a document in the prompt. The index only estimates them.
    """
    totals = accumulate(length(hit.document) for hit in hits)
    return list(hits[: max(sum(1 for _ in takewhile(lambda total: total <= room, totals)), 1)])


def with_documents(asked: ChatRequest, hits: Iterable[Hit]) -> ChatRequest:
    """Return a chat whose last question has more documents, behind those that the client sent.

    Without a question they belong to the last result of a tool.
    """
    chunks = [hit.chunk for hit in hits]
    found: list[Json] = [{"id": chunk.id, "title": chunk.title, "text": chunk.text} for chunk in chunks]
    asked, question = msgspec.structs.replace(asked, retrieval=True), _last(asked, "user")
    at = _last(asked, *TOOLS) if question is None else question
    if not found or at is None:
        return asked
    given = asked.messages[at].get("documents")
    if given is None and question is None:
        given = []
    if not isinstance(given, list):
        return msgspec.structs.replace(asked, documents=[*(asked.documents or []), *found])
    messages = [*asked.messages]
    messages[at] = {**messages[at], "documents": [*given, *found]}
    return msgspec.structs.replace(asked, messages=messages)
