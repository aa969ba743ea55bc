"""Tokens of new documents, counted by the upstream behind the requests' back."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from ..ordering.document import Document
from ..ordering.prompt import document_text
from ..server.errors import RequestError
from .engines import NO_ROUTE, Engine
from .feedback import decode
from .lengths import Lengths
from .upstream import Headers, Upstream, credentials_of

MAX_WAITING = 200  # documents; the tokens of more are guessed by their characters
LONGEST = 50_000  # characters, likewise


@dataclass(frozen=True, slots=True)
class Waiting:
    """A document to be counted. headers, model: of the request that brought it: no other client's key sends its text."""

    text: str
    engine: Engine
    headers: Headers
    model: bytes


class Counting:
    """Asks the upstream's `/tokenize` once for each new document, one at a time. Used by one event loop."""

    def __init__(self, upstream: Upstream, lengths: Lengths) -> None:
        self._upstream, self._lengths = upstream, lengths
        self._waiting: OrderedDict[str, Waiting] = OrderedDict()  # by the documents' keys
        self._working: asyncio.Task[None] | None = None
        self._has_route = True

    def add(self, documents: Iterable[Document], engine: Engine, headers: Headers, model: bytes) -> None:
        """Have documents counted. headers: of the request that brought them. model: the name in it, as JSON."""
        if not self._has_route or not engine.text_field:
            return
        own = credentials_of(headers)
        for document in documents:
            if len(self._waiting) < MAX_WAITING and len(document.text) <= LONGEST and document.key not in self._lengths:
                self._waiting.setdefault(document.key, Waiting(document_text(document), engine, own, model))
        if self._waiting and (self._working is None or self._working.done()):
            self._working = asyncio.create_task(self._work())

    def stop(self) -> None:
        if self._working is not None:
            self._working.cancel()

    async def _work(self) -> None:
        """Count all that wait; give up if the upstream cannot: the next new document is another try."""
        while self._waiting:
            key, asked = self._waiting.popitem(last=False)
            body = {"model": msgspec.Raw(asked.model), asked.engine.text_field: asked.text, asked.engine.no_begin: False}
            try:
                answer = await self._upstream.fetch("POST", "/tokenize", asked.headers, msgspec.json.encode(body))
            except RequestError:
                self._waiting.clear()
                return
            if (tokens := _number(answer.body)) is not None:
                self._lengths.count(key, tokens)
            elif answer.status in NO_ROUTE:
                self._has_route = False
                self._waiting.clear()


def _number(body: bytes) -> int | None:
    """Return the number of tokens in an answer; None for something else."""
    answer = decode(body)
    tokens = answer.get("tokens") if isinstance(answer, Mapping) else None
    return len(tokens) if isinstance(tokens, list) else None
