"""The bodies of answers: OpenAI's objects, with llama-server's `timings` and our own `slotcache` beside them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from time import time
from typing import Any, Protocol

import msgspec

from ..engine.events import Delta, End, Event, Failure, Progress
from ..engine.report import Report

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


class Dialect(Protocol):
    """One API's way to say the same."""

    def first(self) -> dict[str, Any] | None:
        """A chunk before any text."""
        ...

    def delta(self, text: str) -> dict[str, Any]: ...

    def last(self, reason: str) -> dict[str, Any]: ...

    def whole(self, text: str, reason: str) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Chat:
    """`chat.completion` and its chunks."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time()))

    def _chunk(self, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return _completion(self, "chat.completion.chunk", choice)

    def first(self) -> dict[str, Any] | None:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def delta(self, text: str) -> dict[str, Any]:
        return self._chunk({"content": text}, None)

    def last(self, reason: str) -> dict[str, Any]:
        return self._chunk({}, reason)

    def whole(self, text: str, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return _completion(self, "chat.completion", choice)


@dataclass(frozen=True, slots=True)
class Text:
    """`text_completion`, whose chunks look like the whole."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time()))

    def first(self) -> dict[str, Any] | None:
        return None

    def delta(self, text: str) -> dict[str, Any]:
        return self._object(text, None)

    def last(self, reason: str) -> dict[str, Any]:
        return self._object("", reason)

    def whole(self, text: str, reason: str) -> dict[str, Any]:
        return self._object(text, reason)

    def _object(self, text: str, reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        return _completion(self, "text_completion", choice)


@dataclass(frozen=True, slots=True)
class Native:
    """llama-server's `/completion`."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time()))

    def first(self) -> dict[str, Any] | None:
        return None

    def delta(self, text: str) -> dict[str, Any]:
        return {"index": 0, "content": text, "stop": False}

    def last(self, reason: str) -> dict[str, Any]:
        return self.whole("", reason)

    def whole(self, text: str, reason: str) -> dict[str, Any]:
        stop_type = "limit" if reason == "length" else "eos"
        return {"index": 0, "content": text, "stop": True, "stop_type": stop_type, "model": self.model}


def _completion(style: Chat | Text, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's envelope of one choice."""
    return {"id": style.id, "object": kind, "created": style.created, "model": style.model, "choices": [choice]}


def whole(style: Dialect, text: str, end: End) -> bytes:
    """The body of an answer that is not streamed."""
    return encode(style.whole(text, end.reason) | _accounts(end.report) | {"usage": end.report.usage()})


async def stream(style: Dialect, events: AsyncIterator[Event], include_usage: bool) -> AsyncIterator[bytes]:
    """Server-sent events for a generation: chunks, the accounts in the last one, usage on request, [DONE]."""
    first = style.first()
    async for event in events:
        if first is not None and not isinstance(event, Progress | Failure):
            yield _data(first)
            first = None
        match event:
            case Delta(text):
                yield _data(style.delta(text))
            case Progress():
                yield _data(style.delta("") | {"prompt_progress": asdict(event)})
            case Failure(error):
                yield _data(error.body())
            case End(text, reason, report):
                if text:
                    yield _data(style.delta(text))
                yield _data(style.last(reason) | _accounts(report))
                if include_usage:
                    yield _data(style.last(reason) | {"choices": [], "usage": report.usage()} | _accounts(report))
    yield DONE


def _accounts(report: Report) -> dict[str, Any]:
    stop = {} if report.stop is None else {"stopping_word": report.stop}
    return {"timings": report.timings(), "slotcache": report.slotcache()} | stop


def _data(body: dict[str, Any]) -> bytes:
    return b"data: " + encode(body) + b"\n\n"
