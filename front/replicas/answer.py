"""What an answer of slotcache tells of a replica's cache, read while the answer passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct
from starlette.types import Message

from ..events import data_of, split

TOLD = b'"slotcache"'
LARGEST = 16 << 20  # bytes of an answer's JSON that are read


class DocumentReuse(Struct, frozen=True):
    id: str
    tokens: int
    cached_tokens: int


class Conversation(Struct, frozen=True):
    id: str
    remembered: bool


class Told(Struct, frozen=True):
    documents: list[DocumentReuse] = []
    conversation: Conversation | None = None


class Answered(Struct, frozen=True):
    """An answer, or the last chunk of one. response: the answer itself, in an event of a response."""

    id: str = ""
    slotcache: Told | None = None
    response: Answered | None = None


DECODER = msgspec.json.Decoder(Answered)


@dataclass(slots=True)
class Answer:
    """An answer as far as it has passed. status: 0 before its head. told: None before its end. body: of no stream."""

    status: int = 0
    id: str = ""
    told: Told | None = None
    is_stream: bool = False
    body: bytearray = field(default_factory=bytearray)

    def read(self, message: Message) -> None:
        """Read one ASGI message. Those of a stream hold whole events."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.is_stream = any(
                name.lower() == b"content-type" and b"event-stream" in value for name, value in message["headers"]
            )
        elif self.is_stream:
            for event in split(message.get("body", b"")) if TOLD in message.get("body", b"") else ():
                self._take(data_of(event))
        elif len(self.body) <= LARGEST:
            self.body += message.get("body", b"")
            if not message.get("more_body"):
                self._take(self.body)

    @property
    def documents(self) -> list[DocumentReuse]:
        """The documents of the prompt in its order; none, if it tells none."""
        return self.told.documents if self.told else []

    @property
    def remembered(self) -> Iterator[tuple[str, str]]:
        """Yield the kind and the id of all that the replica has stored for later requests."""
        if self.told and (conversation := self.told.conversation) and conversation.remembered:
            yield "conversation", conversation.id
            yield "answer", self.id

    def _take(self, data: bytes | bytearray) -> None:
        if TOLD not in data:
            return
        try:
            found = DECODER.decode(data)
        except (msgspec.DecodeError, RecursionError):
            return
        found = found.response or found
        if found.slotcache is not None:
            self.id, self.told = found.id, found.slotcache
