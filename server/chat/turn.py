"""One turn of a chat, from the request to the history that is stored when its answer is complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np

from ...models.chat.messages import Message
from ...slots.request import Layout
from ..wire.requests import ChatRequest
from .answer import message
from .answered import answer_key
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
        return cls(id, msgspec.json.encode(asked.for_next_turn()), chat, origin)

    def read(self, text: str) -> tuple[Message, str, bool]:
        """Return the whole message of an answer, the key of its ids, and whether it is content alone. text: the model's.

        Ids of content alone may be found by its text, as they hold no control token.
        """
        reader = self.chat.whole_reader()
        answer = message([*reader.push(text), *reader.finish()])
        whole = self.chat.begun.content + text if self.chat.begun else text
        is_content = answer == {"role": "assistant", "content": whole} and not any(
            tag in text for tag in self.chat.form.spelt
        )
        return answer, whole if is_content else answer_key(answer), is_content

    def ids(self, sampled: np.ndarray) -> np.ndarray:
        """Return the ids (int32) of the whole answer, as far as they are known. sampled: those of the model's text."""
        return self.chat.begun.join(sampled) if self.chat.begun else sampled

    def entries(self, layout: Layout, answer: Message, sampled: np.ndarray | None) -> tuple[Entry, ...]:
        """Return the conversation with its answer. sampled: the ids (int32) of its content, if it is nothing more."""
        return (*self.chat.place_entries(layout), Entry.of(answer, sampled=sampled))

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
