"""From a chat with `retrieval` to the query, and from what was found to the chat with its documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

from ...retrieval import Hit, Query
from ..errors import RequestError
from ..wire.requests import ChatRequest, Json
from ..wire.retrieval import Retrieval
from ..wire.searching import SearchRequest
from .library import Library


def query_of(asked: ChatRequest, library: Library) -> Query:
    """Return the query of a chat: its own, or the last question. Raises RequestError where there is none."""
    wish = asked.retrieval if isinstance(asked.retrieval, Retrieval) else Retrieval()
    text = _last_question(asked) if wish.query is None else wish.query
    top_k, paths = wish.top_k or library.top_k, tuple(wish.paths)
    return Query(text=text, top_k=top_k, paths=paths, min_score=wish.min_score)


def query_of_search(asked: SearchRequest, library: Library) -> Query:
    top_k, paths = asked.top_k or library.top_k, tuple(asked.paths)
    return Query(text=asked.query, top_k=top_k, paths=paths, min_score=asked.min_score)


def _last_question(asked: ChatRequest) -> str:
    at = _last_user(asked)
    if at is None:
        raise RequestError("retrieval: expected a message of a user, or a query of its own", param="retrieval")
    content = asked.messages[at].get("content")
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return "\n".join(text for text in texts if isinstance(text, str))


def _last_user(asked: ChatRequest) -> int | None:
    users = (at for at, message in enumerate(asked.messages) if message.get("role") == "user")
    return max(users, default=None)


def fitting(hits: Sequence[Hit], room: int) -> list[Hit]:
    """Return the first hits, at least one, that have no more tokens together than there is room for."""
    tokens = accumulate(hit.chunk.tokens for hit in hits)
    return list(hits[: max(sum(total <= room for total in tokens), 1)])


def with_documents(asked: ChatRequest, hits: Iterable[Hit]) -> ChatRequest:
    """Return a chat whose last question has more documents, behind those that the client sent."""
    chunks = [hit.chunk for hit in hits]
    found: list[Json] = [{"id": chunk.id, "title": chunk.title, "text": chunk.text} for chunk in chunks]
    asked, at = msgspec.structs.replace(asked, retrieval=True), _last_user(asked)
    if not found or at is None:
        return asked
    given = asked.messages[at].get("documents")
    if not isinstance(given, list):
        return msgspec.structs.replace(asked, documents=[*(asked.documents or []), *found])
    messages = [*asked.messages]
    messages[at] = {**messages[at], "documents": [*given, *found]}
    return msgspec.structs.replace(asked, messages=messages)
