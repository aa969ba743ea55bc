"""Which engine the upstream is, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from time import monotonic

from ..server.errors import RequestError
from .feedback import decode
from .upstream import Headers, Upstream


@dataclass(frozen=True, slots=True)
class Engine:
    """knows_documents: requests go there as they are. tells_in_streams: a stream ends with its figures, unasked.

    text_field, no_begin: the fields of `POST /tokenize` for the text, and for no BOS token; empty without that route.
    """

    name: str
    knows_documents: bool = False
    tells_in_streams: bool = False
    text_field: str = ""
    no_begin: str = ""


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("slotcache", knows_documents=True, tells_in_streams=True, text_field="content", no_begin="add_special"),
        Engine("llama", tells_in_streams=True, text_field="content", no_begin="add_special"),
        Engine("vllm", text_field="prompt", no_begin="add_special_tokens"),
        Engine("sglang", text_field="prompt", no_begin="add_special_tokens"),
        Engine("openai"),
    )
}
ASK_AGAIN = 30.0  # seconds after an answer that there are no models
NO_ROUTE = (404, 405, 501)  # statuses of routes that an engine does not have, whoever asks
OWNERS = {"llamacpp": "llama", "vllm": "vllm", "sglang": "sglang", "slotcache": "slotcache"}
"""The `owned_by` of an engine's models."""


class Finder:
    """Finds out which engine the upstream is, once. dialect: the engine's name; auto: ask."""

    def __init__(self, upstream: Upstream, dialect: str) -> None:
        self._upstream = upstream
        self._known = ENGINES.get(dialect)
        self._until = inf

    async def engine(self, headers: Headers) -> Engine:
        """Return the engine, as the upstream's models name it. headers: of the request that wants to know."""
        if self._known is not None and monotonic() < self._until:
            return self._known
        try:
            answer = await self._upstream.fetch("GET", "/v1/models", headers)
        except RequestError:
            return ENGINES["openai"]  # for now: the request itself will tell the client what is wrong
        if answer.status not in (200, *NO_ROUTE):
            return ENGINES["openai"]  # this client may not ask, or not now: it says nothing to the next one
        self._known = ENGINES[OWNERS.get(_owner(answer.body), "openai")]
        self._until = inf if answer.status == 200 else monotonic() + ASK_AGAIN
        return self._known


def _owner(body: bytes) -> str:
    """Return the owner of the first model; empty for another body."""
    try:
        models = decode(body)
        first = models["data"][0] if isinstance(models, Mapping) else {}
        return str(first.get("owned_by", ""))
    except (LookupError, TypeError, AttributeError):
        return ""
