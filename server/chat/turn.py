"""One turn of a chat, from the request to the history that is stored when its answer is complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np

from ...slots.request import Layout
from ..wire.requests import ChatRequest
from .answer import message
from .conversation import Origin
from .history import Chat, Entry


@dataclass(frozen=True, slots=True)
class Turn:
    """A request for an answer. id: the answer's. origin: of its conversation; None if it belongs to none.

    options: the request as JSON, without its messages and documents, which are in `chat`.
    """

    id: str
    options: bytes
    chat: Chat
    origin: Origin | None

    @classmethod
    def of(cls, id: str, asked: ChatRequest, chat: Chat, origin: Origin | None) -> Self:
        """Make the turn of a request whose messages and documents are in `chat`."""
        return cls(id, msgspec.json.encode(msgspec.structs.replace(asked, messages=[], documents=None)), chat, origin)

    def entries(self, layout: Layout, text: str, sampled: np.ndarray | None) -> tuple[Entry, ...]:
        """Return the conversation with its answer. sampled: the answer's ids (int32) if they spell exactly `text`."""
        reader = self.chat.reader()
        answer = message([*reader.push(text), *reader.finish()])
        is_content = answer == {"role": "assistant", "content": text}
        return (*self.chat.place_entries(layout), Entry.of(answer, sampled=sampled if is_content else None))

    def report(self, remembered: bool) -> dict[str, object] | None:
        """Return the answer's `conversation` field. messages: in the prompt; messages_kept: of these, from the store."""
        if self.origin is None:
            return None
        return {
            "id": self.origin.id,
            "previous": self.origin.answer or None,
            "turns": sum(entry.role == "user" for entry in self.chat.entries),
            "messages": len(self.chat.entries),
            "messages_kept": self.chat.num_kept,
            "remembered": remembered,
        }
