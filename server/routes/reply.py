"""The bodies of answers: OpenAI's objects, with llama-server's `timings` and our own `slotcache` beside them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from time import time
from typing import Protocol

import msgspec

from ..engine.view import Delta, End, Event, Failure, Fields, Progress, Report

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


class Dialect(Protocol):
    """One API's shape of an answer."""

    def first(self) -> Fields | None:
        """Return a chunk that comes before any text, if the API has one."""
        ...

    def delta(self, text: str) -> Fields: ...

    def last(self, reason: str) -> Fields: ...

    def whole(self, text: str, reason: str) -> Fields: ...


@dataclass(frozen=True, slots=True)
class Chat:
    """`chat.completion` and its chunks."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time()))

    def _chunk(self, delta: Fields, reason: str | None) -> Fields:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return _completion(self, "chat.completion.chunk", choice)

    def first(self) -> Fields | None:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def delta(self, text: str) -> Fields:
        return self._chunk({"content": text}, None)

    def last(self, reason: str) -> Fields:
        return self._chunk({}, reason)

    def whole(self, text: str, reason: str) -> Fields:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return _completion(self, "chat.completion", choice)


@dataclass(frozen=True, slots=True)
class Text:
    """`text_completion`, whose chunks look like the whole."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time()))

    def first(self) -> Fields | None:
        return None

    def delta(self, text: str) -> Fields:
        return self._object(text, None)

    def last(self, reason: str) -> Fields:
        return self._object("", reason)

    def whole(self, text: str, reason: str) -> Fields:
        return self._object(text, reason)

    def _object(self, text: str, reason: str | None) -> Fields:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        return _completion(self, "text_completion", choice)


@dataclass(frozen=True, slots=True)
class Native:
    """llama-server's `/completion`."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time()))

    def first(self) -> Fields | None:
        return None

    def delta(self, text: str) -> Fields:
        return {"index": 0, "content": text, "stop": False}

    def last(self, reason: str) -> Fields:
        return self.whole("", reason)

    def whole(self, text: str, reason: str) -> Fields:
        stop_type = "limit" if reason == "length" else "eos"
        return {"index": 0, "content": text, "stop": True, "stop_type": stop_type, "model": self.model}


def _completion(style: Chat | Text, kind: str, choice: Fields) -> Fields:
    """Return OpenAI's envelope of one choice."""
    return {"id": style.id, "object": kind, "created": style.created, "model": style.model, "choices": [choice]}


def whole(style: Dialect, text: str, end: End) -> bytes:
    """Return the body of an answer that is not streamed."""
    return encode(style.whole(text, end.reason) | _accounts(end.report) | {"usage": end.report.usage()})


async def stream(style: Dialect, events: AsyncIterator[Event], include_usage: bool) -> AsyncIterator[bytes]:
    """Yield server-sent events for a generation: chunks, the accounts in the last one, usage on request, [DONE]."""
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


def _accounts(report: Report) -> Fields:
    accounts: Fields = {"timings": report.timings(), "slotcache": report.slotcache()}
    return accounts if report.stop is None else accounts | {"stopping_word": report.stop}


def _data(body: Fields) -> bytes:
    return b"data: " + encode(body) + b"\n\n"
