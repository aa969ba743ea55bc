"""An answer that goes on with the last message: whether it does, what it begins with, and the reader of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from ...models.chat.marks import Piece
from ...models.chat.messages import Message, begun_content
from ..errors import RequestError
from ..wire.requests import ChatRequest
from .answer import Content, Fragment, Reader, Thought
from .parts import Part


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """The beginning of an answer. is_shown: to the client.

    content: of the message so far. tokens: its ids (int32) in the prompt; None where they spell something else, too.
    """

    reasoning: str
    content: str
    tokens: np.ndarray | None
    is_shown: bool

    @classmethod
    def of(cls, message: Message, piece: Piece, part: Part, is_shown: bool) -> Self:
        """Make the beginning of a message. piece: the last of the prompt. part: the same as tokens."""
        content, reasoning = begun_content(message, "the last message's content"), message.get("reasoning_content")
        is_whole = piece.message is not None and piece.part == "content" and piece.text == content
        tokens = part.tokens if is_whole and isinstance(part.tokens, np.ndarray) else None
        return cls(str(reasoning or ""), content, tokens, is_shown)

    @property
    def fragments(self) -> list[Fragment]:
        thought: list[Fragment] = [Thought(self.reasoning)] if self.reasoning else []
        return [*thought, Content(self.content)] if self.content else thought

    def read_whole(self, rest: Callable[[], Reader]) -> Callable[[], Reader]:
        """Return a maker of readers of the whole answer. rest: makes readers of the text that the model adds."""
        return lambda: _Begun(self.fragments, rest())

    def join(self, sampled: np.ndarray) -> np.ndarray:
        """Return the ids (int32) of the beginning, as far as they are known, and of what the model added."""
        return sampled if self.tokens is None else np.concatenate([self.tokens, sampled])


class _Begun:
    """Reads an answer from its beginning."""

    def __init__(self, begun: Sequence[Fragment], rest: Reader) -> None:
        self._begun, self._rest = list(begun), rest

    def push(self, text: str) -> list[Fragment]:
        begun, self._begun = self._begun, []
        return [*begun, *self._rest.push(text)]

    def finish(self) -> list[Fragment]:
        return [*self._begun, *self._rest.finish()]


def continues_answer(request: ChatRequest, messages: Sequence[Message], *, prefills: bool) -> bool:
    """Return whether the model is to go on with the last message. Raises RequestError if it cannot.

    messages: the whole history. prefills: an answer at the end is gone on with although the request does not say so.
    """
    last, asked = messages[-1], bool(request.continue_final_message)
    if not asked and not (prefills and last["role"] == "assistant"):
        return False
    where = "continue_final_message" if asked else "messages"
    if last["role"] != "assistant":
        raise RequestError("continue_final_message: the last message is not an assistant's", param=where)
    if not asked and len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise RequestError("messages: expected at most one assistant message at the end", param=where)
    if last.get("tool_calls"):
        raise RequestError(f"{where}: an assistant message with tool calls cannot be continued", param=where)
    if request.continue_final_message == "reasoning_content" and last.get("content"):
        raise RequestError(f"{where}: the last message has content, so its reasoning is over", param=where)
    return True
