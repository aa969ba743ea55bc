"""Anthropic's `message`, whole and as a stream of events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from ...chat.answer import CallArguments, CallStart, Content, Fragment, Reader, Thought
from ...engine.view import Delta, End, Fields, Progress
from ...errors import RequestError
from ...wire.sealed import seal
from .reply import Answer, Envelope, event

DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""By the type of a block: the type of its deltas, and their field."""


@dataclass(slots=True)
class _Block:
    """One block of the content. named: the id and the name of a call. sealed: its text stands in the signature only."""

    type: str
    named: Fields = field(default_factory=dict)
    sealed: bool = False
    texts: list[str] = field(default_factory=list)

    def begun(self) -> Fields:
        """Return the block without its text."""
        return self._with({}, "", "")

    def whole(self) -> Fields:
        text = "".join(self.texts)
        return self._with(_decoded(text) if self.type == "tool_use" else {}, "" if self.sealed else text, self.signature())

    def signature(self) -> str:
        return seal("".join(self.texts)) if self.sealed else ""

    def _with(self, input: object, text: str, signature: str) -> Fields:
        fields: dict[str, Fields] = {
            "text": {"text": text},
            "thinking": {"thinking": text, "signature": signature},
            "tool_use": self.named | {"input": input},
        }
        return {"type": self.type} | fields[self.type]


class Messages:
    """The dialect of `/v1/messages`. reader: of the answer. lengths: the prompt's tokens, and the cached ones of these.

    shows_thoughts: false leaves their text out; sealed in the signature, it comes back with the history. caches: whether the
    prompt is left in the cache.
    """

    def __init__(
        self,
        envelope: Envelope,
        reader: Reader,
        lengths: Callable[[], tuple[int, int]],
        *,
        shows_thoughts: bool,
        caches: bool,
    ) -> None:
        self.envelope, self._reader, self._lengths = envelope, reader, lengths
        self._shows_thoughts, self._caches = shows_thoughts, caches
        self._blocks: list[_Block] = []
        self._is_open = False  # the last block

    def begin(self) -> list[bytes]:
        message = self._message([]) | {"usage": self._usage(*self._lengths(), num_generated=0)}
        return self._sent([{"type": "message_start", "message": message}, {"type": "ping"}])

    def progress(self, index: int, progress: Progress) -> list[bytes]:
        return self._sent([{"type": "ping"}])

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        return self._read(self._reader.push(delta.text))

    def end(self, index: int, end: End) -> list[bytes]:
        rest = self._read(self._reader.finish())
        first = [] if self._blocks else self._sent(self._begin(_Block("text")))
        return [*rest, *first, *self._sent(self._end())]

    def close(self, ends: Sequence[End]) -> list[bytes]:
        (end,) = ends
        changed: Fields = {"type": "message_delta", "delta": self._reason(end)}
        return self._sent([changed | self._costs(end), {"type": "message_stop"}])

    def fail(self, error: RequestError) -> list[bytes]:
        return self._sent([error.message_body()])

    def whole(self, answers: Sequence[Answer]) -> Fields:
        (answer,) = answers
        self.delta(0, Delta(answer.text))
        self.end(0, answer.end)
        message = self._message([block.whole() for block in self._blocks])
        return message | self._reason(answer.end) | self._costs(answer.end)

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def _read(self, fragments: Sequence[Fragment]) -> list[bytes]:
        return self._sent(event for fragment in fragments for event in self._push(fragment))

    def _push(self, fragment: Fragment) -> Iterator[Fields]:
        match fragment:
            case Content(text):
                yield from self._write("text", text)
            case Thought(text):
                yield from self._write("thinking", text)
            case CallStart(_, id, name):
                yield from self._begin(_Block("tool_use", {"id": id, "name": name}))
            case CallArguments(_, text):
                yield from self._write("tool_use", text)

    def _write(self, type: str, text: str) -> Iterator[Fields]:
        if not self._is_open or self._blocks[-1].type != type:
            yield from self._begin(_Block(type, sealed=type == "thinking" and not self._shows_thoughts))
        block = self._blocks[-1]
        block.texts.append(text)
        if not block.sealed:
            kind, name = DELTAS[type]
            yield self._change({"type": kind, name: text})

    def _begin(self, block: _Block) -> Iterator[Fields]:
        yield from self._end()
        self._blocks.append(block)
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block.begun()}

    def _end(self) -> Iterator[Fields]:
        if not self._is_open:
            return
        if self._blocks[-1].type == "thinking":
            yield self._change({"type": "signature_delta", "signature": self._blocks[-1].signature()})
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}
        self._is_open = False

    def _change(self, delta: Fields) -> Fields:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    # ---- the message -------------------------------------------------------------------------------------------------

    def _message(self, content: list[Fields]) -> Fields:
        envelope = self.envelope
        about: Fields = {"id": envelope.id, "type": "message", "role": "assistant", "model": envelope.model}
        return about | {"content": content, "stop_reason": None, "stop_sequence": None} | envelope.notes()

    def _reason(self, end: End) -> Fields:
        if end.reason == "length":
            is_full = end.report.num_generated < self.envelope.options.limit()
            return {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens", "stop_sequence": None}
        if end.report.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": end.report.stop}
        calls = any(block.type == "tool_use" for block in self._blocks)
        return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}

    def _costs(self, end: End) -> Fields:
        """Return the usage of the whole answer, and our own `slotcache` beside it."""
        report = end.report
        usage = self._usage(report.num_prompt, report.num_cached, num_generated=report.num_generated)
        return {"usage": usage, "slotcache": report.slotcache()}

    def _usage(self, num_prompt: int, num_cached: int, *, num_generated: int) -> Fields:
        """Return the usage, in which the prompt's tokens are parted: read from the cache, left in it, and the others.

        The last token of a prompt is always computed, so it counts as one of the others.
        """
        created = max(num_prompt - num_cached - 1, 0) if self._caches else 0
        return {
            "input_tokens": num_prompt - num_cached - created,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": created,
            "output_tokens": num_generated,
        }

    def _sent(self, events: Iterator[Fields] | list[Fields]) -> list[bytes]:
        return [event(body, str(body["type"])) for body in events]


def _decoded(arguments: str) -> object:
    """Return the arguments of a call as an object; an empty one if they were cut off."""
    try:
        decoded = msgspec.json.decode(arguments.encode("utf-8", "surrogatepass"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}
