"""One turn of a chat on its way: what was asked, what its prompt holds, and what there is to remember at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np

from ...slots.request import Layout
from ..wire import ChatRequest
from .conversations import Origin
from .history import Chat, Entry


@dataclass(frozen=True, slots=True)
class Turn:
    """id: of its answer. origin: what it goes on from; None where it has nothing to do with a conversation.

    options: the request as JSON, but for what is in `chat`.
    """

    id: str
    options: bytes
    chat: Chat
    origin: Origin | None

    @classmethod
    def of(cls, id: str, asked: ChatRequest, chat: Chat, origin: Origin | None) -> Self:
        """The turn of a request whose messages and documents are in `chat`."""
        return cls(id, msgspec.json.encode(msgspec.structs.replace(asked, messages=[], documents=None)), chat, origin)

    def entries(self, layout: Layout, text: str, sampled: np.ndarray | None) -> tuple[Entry, ...]:
        """The whole conversation once the answer is. sampled: its ids (int32) where they spell exactly `text`."""
        return (*self.chat.placed(layout), Entry.of({"role": "assistant", "content": text}, sampled=sampled))

    def report(self, remembered: bool) -> dict[str, object] | None:
        """What the answer says of its conversation. messages: of the prompt; messages_kept: of them, as remembered."""
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
