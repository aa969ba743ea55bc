"""The tokens of a prompt as each engine tells them in its answer, read while the answer passes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from .chat import NO_JSON
from .events import data_of, split

FIGURES = re.compile(rb'"(?:usage|timings|slotcache)"\s*:\s*\{')  # in a text of the answer the quotes would be escaped


@dataclass(frozen=True, slots=True)
class Told:
    """The tokens of a prompt, and those of them that were cached; None: not told.

    documents: ids in the order of the prompt; empty: not told.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    documents: tuple[str, ...] = ()

    @classmethod
    def read(cls, answer: object) -> Told:
        """Return what a decoded answer, or a chunk of it, tells."""
        usage, timings = _part(answer, "usage"), _part(answer, "timings")
        cached = _first(
            _number(_part(usage, "prompt_tokens_details"), "cached_tokens"),  # OpenAI, vLLM, SGLang, llama-server
            _number(usage, "prompt_cache_hit_tokens"),  # DeepSeek
            _number(timings, "cache_n"),  # llama-server
        )
        computed = _number(timings, "prompt_n")
        prompt = computed + cached if computed is not None and cached is not None else None
        return cls(_first(_number(usage, "prompt_tokens"), prompt), cached, _ids(_part(answer, "slotcache")))

    def __or__(self, later: Told) -> Told:
        """Return the newest of each figure."""
        return Told(
            _first(later.prompt_tokens, self.prompt_tokens),
            _first(later.cached_tokens, self.cached_tokens),
            later.documents or self.documents,
        )


class Listener:
    """Reads the figures of an answer. hides_usage: the client did not ask for the chunk with the usage."""

    def __init__(self, hides_usage: bool) -> None:
        self._hides_usage = hides_usage
        self.told: Told | None = None

    def events(self, events: bytes) -> bytes:
        if not FIGURES.search(events):
            return events
        return b"".join(event for event in split(events) if self._is_shown(event))

    def body(self, status: int, body: bytes) -> None:
        if status == 200:
            self.told = Told.read(decode(body))

    def _is_shown(self, event: bytes) -> bool:
        if not FIGURES.search(event):
            return True
        chunk = decode(data_of(event))
        self.told = (self.told or Told()) | Told.read(chunk)
        return not (self._hides_usage and _part(chunk, "choices") == [] and _part(chunk, "usage") is not None)


def decode(data: bytes) -> object:
    """Return decoded JSON; None for something else."""
    try:
        return msgspec.json.decode(data)
    except NO_JSON:
        return None


def _ids(report: object) -> tuple[str, ...]:
    documents = _part(report, "documents")
    ids = [_part(document, "id") for document in documents] if isinstance(documents, list) else []
    return tuple(id for id in ids if isinstance(id, str))


def _part(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, Mapping) else None


def _number(value: object, name: str) -> int | None:
    number = _part(value, name)
    return number if isinstance(number, int) and number >= 0 else None


def _first(*numbers: int | None) -> int | None:
    return next((number for number in numbers if number is not None), None)
