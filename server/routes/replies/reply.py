"""An answer as bytes: what all APIs have in common, and the stream of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from time import time
from typing import Protocol

import msgspec

from ...engine.view import Chances, Delta, End, Event, Failure, Fields, Generation, Progress, Report
from ...errors import RequestError
from ...wire.requests import Options
from .probabilities import Piece, Probabilities

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The fields that every body of an answer carries. options: the request's, without its texts.

    num_prompts: the answer has `options.n` choices of each. generations: of the choices, in order. verbose: the answer shows
    its prompt and its options, as in llama-server. warnings: about the request's fields. piece: the bytes of a token.
    """

    id: str
    model: str
    fingerprint: str
    options: Options
    num_prompts: int = 1
    generations: Sequence[Generation] = ()
    verbose: bool = False
    warnings: tuple[str, ...] = ()
    piece: Piece = lambda token: b""
    created: int = field(default_factory=lambda: int(time()))

    @property
    def num_each(self) -> int:
        """The choices of each prompt."""
        return self.options.n or 1

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.num_each

    def probabilities(self) -> list[Probabilities]:
        """Return the writers of the choices' probabilities."""
        return [Probabilities(self.piece, self.options.post_sampling_probs) for _ in range(self.num_choices)]

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.options.stream_options is not None and self.options.stream_options.include_usage

    def notes(self) -> Fields:
        """Return the fields of a whole answer, or of a stream's last chunk, that only some requests have."""
        return {"warnings": self.warnings} if self.warnings else {}

    def head(self, kind: str) -> Fields:
        """Return the fields that OpenAI's objects begin with. kind: of the object."""
        made: Fields = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return made | {"system_fingerprint": self.fingerprint}

    def progress(self, progress: Progress) -> Fields:
        """Return the fields of a progress."""
        fields: Fields = {"prompt_progress": asdict(progress)}
        return fields | {"timings": progress.timings()} if self.options.timings_per_token else fields

    def times(self, index: int, delta: Delta) -> Fields:
        """Return the times of an answer so far, if they are wanted with each piece of it."""
        if not self.options.timings_per_token:
            return {}
        return {"timings": self.generations[index].timings(delta.num_generated)}

    def usage(self, ends: Sequence[End]) -> Fields:
        """Return OpenAI's `usage` over all choices; the choices of one prompt count it once."""
        prompts, reports = ends[:: self.num_each], [end.report for end in ends]
        num_prompt, num_generated = sum(end.report.num_prompt for end in prompts), sum(r.num_generated for r in reports)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(end.report.num_cached for end in prompts)},
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice of an answer that is sent whole. deltas: all of it, in the pieces in which it came."""

    deltas: tuple[Delta, ...]
    end: End

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(delta.tokens for delta in self.deltas))

    @property
    def chances(self) -> tuple[Chances, ...]:
        return tuple(chain.from_iterable(delta.chances for delta in self.deltas))

    def whole(self) -> Delta:
        """Return it as one piece."""
        return Delta(self.text, self.tokens, self.chances, is_last=True)


class Dialect(Protocol):
    """One API's shape of an answer. Each method but `whole` returns the server-sent events for one event of a choice."""

    envelope: Envelope

    def begin(self) -> list[bytes]:
        """Called once, before the first text or the first end."""
        ...

    def progress(self, index: int, progress: Progress) -> list[bytes]: ...

    def delta(self, index: int, delta: Delta) -> list[bytes]: ...

    def end(self, index: int, end: End) -> list[bytes]:
        """The end of a choice. Its text and tokens have come as a delta before."""
        ...

    def close(self, ends: Sequence[End]) -> list[bytes]:
        """Called once, after the last end, with all ends in order of the choices."""
        ...

    def fail(self, error: RequestError) -> list[bytes]:
        """The answer ends with an error; nothing follows."""
        ...

    def whole(self, answers: Sequence[Answer]) -> Fields | list[Fields]:
        """Return the body of an answer that is not streamed."""
        ...


async def stream(dialect: Dialect, events: AsyncIterator[tuple[int, Event]]) -> AsyncIterator[bytes]:
    """Yield the server-sent events of an answer. events: with the index of their choice, up to each choice's end."""
    ends: dict[int, End] = {}
    begun = False
    async for index, event in events:
        sent: list[bytes] = []
        if not begun and isinstance(event, Delta | End):
            begun, sent = True, dialect.begin()
        match event:
            case Progress():
                sent += dialect.progress(index, event)
            case Delta():
                sent += dialect.delta(index, event)
            case End(text, tokens=tokens):
                if text or tokens:
                    sent += dialect.delta(index, event.delta())
                sent += dialect.end(index, event)
                ends[index] = event
            case Failure(error):
                sent += dialect.fail(error)
        yield b"".join(sent)
        if isinstance(event, Failure):
            return
    yield b"".join(dialect.close([ends[index] for index in sorted(ends)]))


def accounts(report: Report) -> Fields:
    """Return llama-server's `timings`, and our own `slotcache` beside them."""
    fields: Fields = {"timings": report.timings(), "slotcache": report.slotcache()}
    return fields if report.stop is None else fields | {"stopping_word": report.stop}


def event(body: Fields, name: str | None = None) -> bytes:
    """Return a server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode(body) + b"\n\n"
