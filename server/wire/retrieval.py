"""The fields of a search in the server's documents."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

MAX_TOP_K = 100
MAX_PATHS, MAX_PATH = 100, 4096

TopK = Annotated[int, Meta(ge=1, le=MAX_TOP_K)]
Paths = Annotated[list[Annotated[str, Meta(max_length=MAX_PATH)]], Meta(max_length=MAX_PATHS)]


class Retrieval(Struct, frozen=True, kw_only=True):
    """How a chat's documents are searched. query: in place of the last question. paths: of files and folders to look in."""

    top_k: TopK | None = None
    query: str | None = None
    paths: Paths = []
    min_score: float | None = None
