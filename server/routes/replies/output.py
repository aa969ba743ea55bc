"""The output items of a response, as fragments come, with the events of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...chat.answer import CallArguments, CallStart, Content, Fragment, Thought
from ...engine.view import Fields
from ...wire.sealed import seal


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of item. prefix: of its ids. text: the name of the events with its text. field: where the item has the text.

    part, parts: the type of the part that holds the text, and the name of its events; empty where there is no part. index:
    the field with the number of the part.
    """

    name: str
    prefix: str
    text: str
    field: str
    part: str = ""
    parts: str = ""
    index: str = ""


MESSAGE = Kind(
    name="message",
    prefix="msg",
    text="response.output_text",
    field="content",
    part="output_text",
    parts="response.content_part",
    index="content_index",
)
THOUGHT = Kind(
    name="reasoning",
    prefix="rs",
    text="response.reasoning_text",
    field="content",
    part="reasoning_text",
    parts="response.content_part",
    index="content_index",
)
SUMMARY = Kind(
    name="reasoning",
    prefix="rs",
    text="response.reasoning_summary_text",
    field="summary",
    part="summary_text",
    parts="response.reasoning_summary_part",
    index="summary_index",
)
CALL = Kind(name="function_call", prefix="fc", text="response.function_call_arguments", field="arguments")


@dataclass(slots=True)
class _Item:
    """One item. named: of a call, its fields beside the arguments. seals: reasoning is sealed in it, too."""

    kind: Kind
    id: str
    named: Fields
    seals: bool
    texts: list[str] = field(default_factory=list)

    def begin(self) -> Iterator[Fields]:
        yield {"type": "response.output_item.added", "item": self.shown("in_progress", parts=[])}
        if self.kind.part:
            yield self._event(f"{self.kind.parts}.added") | {"part": self._part("")}

    def add(self, text: str) -> Iterator[Fields]:
        self.texts.append(text)
        yield self._event(f"{self.kind.text}.delta") | {"delta": text} | self._logprobs()

    def end(self, status: str) -> Iterator[Fields]:
        text = "".join(self.texts)
        done = {"text": text} if self.kind.part else {"arguments": text, "name": self.named["name"]}
        yield self._event(f"{self.kind.text}.done") | done | self._logprobs()
        if self.kind.part:
            yield self._event(f"{self.kind.parts}.done") | {"part": self._part(text)}
        yield {"type": "response.output_item.done", "item": self.shown(status, parts=[self._part(text)])}

    def shown(self, status: str, parts: list[Fields]) -> Fields:
        """Return the item itself. parts: with its text; none while it begins."""
        item: Fields = {"type": self.kind.name, "id": self.id, "status": status}
        if self.kind is MESSAGE:
            return item | {"role": "assistant", "content": parts}
        if self.kind is CALL:
            return item | self.named | {"arguments": "".join(self.texts)}
        sealed = {"encrypted_content": seal("".join(self.texts))} if self.seals and parts else {}
        return item | {"summary": [], "content": []} | {self.kind.field: parts} | sealed

    def _part(self, text: str) -> Fields:
        part: Fields = {"type": self.kind.part, "text": text}
        return part | {"annotations": [], "logprobs": []} if self.kind is MESSAGE else part

    def _event(self, name: str) -> Fields:
        event: Fields = {"type": name, "item_id": self.id}
        return event | {self.kind.index: 0} if self.kind.index else event

    def _logprobs(self) -> Fields:
        return {"logprobs": []} if self.kind is MESSAGE else {}


class Output:
    """The items of one response. suffix: of their ids. summarises: thoughts are summaries. seals: as in `_Item`."""

    def __init__(self, suffix: str, *, summarises: bool, seals: bool) -> None:
        self.items: list[Fields] = []
        self._suffix, self._seals = suffix, seals
        self._thought = SUMMARY if summarises else THOUGHT
        self._open: _Item | None = None

    def push(self, fragment: Fragment) -> Iterator[Fields]:
        """Yield the events of a fragment."""
        match fragment:
            case Content(text):
                yield from self._write(MESSAGE, text)
            case Thought(text):
                yield from self._write(self._thought, text)
            case CallStart(_, id, name):
                yield from self._begin(CALL, {"call_id": id, "name": name})
            case CallArguments(_, text):
                yield from self._write(CALL, text)

    def finish(self, status: str) -> Iterator[Fields]:
        """Yield the events of the end. A response without any item gets an empty message. status: of its last item."""
        if self._open is None and not self.items:
            yield from self._begin(MESSAGE)
        yield from self._end(status)

    def _write(self, kind: Kind, text: str) -> Iterator[Fields]:
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(kind)
        assert self._open is not None
        yield from self._numbered(self._open.add(text))

    def _begin(self, kind: Kind, named: Fields | None = None) -> Iterator[Fields]:
        yield from self._end("completed")
        self._open = _Item(kind, f"{kind.prefix}_{self._suffix}_{len(self.items)}", named or {}, self._seals)
        yield from self._numbered(self._open.begin())

    def _end(self, status: str) -> Iterator[Fields]:
        if self._open is None:
            return
        for event in self._numbered(self._open.end(status)):
            yield event
        self.items.append(event["item"])  # pyright: ignore
        self._open = None

    def _numbered(self, events: Iterator[Fields]) -> Iterator[Fields]:
        for event in events:
            yield event | {"output_index": len(self.items)}
