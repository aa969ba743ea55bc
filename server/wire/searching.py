"""`POST /v1/search`: its fields."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from ...slots.scope import MAX_NAME
from .requests import ChatRequest, check_scope
from .retrieval import Paths, TopK
from .sampling import Json


class ChatToCome(ChatRequest, frozen=True, kw_only=True):
    """The body of a chat completion without its last question."""

    messages: list[dict[str, Json]] = field(default_factory=list)


class SearchRequest(Struct, frozen=True, kw_only=True):
    """`POST /v1/search`. stream: an event for each stage. speculate: a name for the turn whose documents are computed ahead.

    chat: of that turn; without it, the conversation of that name, or else a new chat.
    """

    query: str
    top_k: TopK | None = None
    paths: Paths = []
    min_score: float | None = None
    stream: bool = False
    speculate: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)] | None = None
    chat: ChatToCome | None = None
    cache_scope: str = ""

    def check(self) -> None:
        """Raise RequestError for a scope that is too long."""
        check_scope(self.cache_scope, "cache_scope")
