"""Which engine the upstream is, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from ..server.errors import RequestError
from .upstream import Headers, Upstream


@dataclass(frozen=True, slots=True)
class Engine:
    """knows_documents: requests go there as they are. tells_in_streams: a stream ends with its figures, unasked."""

    name: str
    knows_documents: bool = False
    tells_in_streams: bool = False


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("slotcache", knows_documents=True, tells_in_streams=True),
        Engine("llama", tells_in_streams=True),
        Engine("vllm"),
        Engine("sglang"),
        Engine("openai"),
    )
}
OWNERS = {"llamacpp": "llama", "vllm": "vllm", "sglang": "sglang", "slotcache": "slotcache"}
"""The `owned_by` of an engine's models."""


class Finder:
    """Finds out which engine the upstream is, once. dialect: the engine's name; auto: ask."""

    def __init__(self, upstream: Upstream, dialect: str) -> None:
        self._upstream = upstream
        self._known = ENGINES.get(dialect)

    async def engine(self, headers: Headers) -> Engine:
        """Return the engine, as the upstream's models name it. headers: of the request that wants to know."""
        if self._known is not None:
            return self._known
        asked = [(name, value) for name, value in headers if name in (b"authorization", b"x-api-key")]
        try:
            async with self._upstream.ask("GET", "/v1/models", asked, b"") as response:
                body = b"".join([piece async for piece in self._upstream.pieces(response)])
                status = response.status
        except RequestError:
            return ENGINES["openai"]  # for now: the request itself will tell the client what is wrong
        engine = ENGINES[OWNERS.get(_owner(body), "openai")]
        if status == 200:
            self._known = engine
        return engine


def _owner(body: bytes) -> str:
    """Return the owner of the first model; empty for another body."""
    try:
        models = msgspec.json.decode(body)
        first = models["data"][0] if isinstance(models, Mapping) else {}
        return str(first.get("owned_by", ""))
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError, AttributeError):
        return ""
