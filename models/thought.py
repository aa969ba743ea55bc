"""Thoughts of a bounded length: after so many tokens the model is made to end them."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ThoughtLimit:
    """The most tokens that the thoughts of one answer may have together.

    start, end: the tags around a thought, as bytes; is_open: the prompt ends in a thought. closing: the ids that end one:
    a message, if there is one, and the tag. piece: the bytes of a token in the answer.
    """

    most: int
    start: bytes
    end: bytes
    is_open: bool
    closing: tuple[int, ...]
    piece: Callable[[int], bytes]


class ThoughtClock:
    """Counts the tokens of an answer's thoughts."""

    def __init__(self, limit: ThoughtLimit) -> None:
        self._limit, self._thinks, self._count = limit, limit.is_open, 0
        self._tail = b""  # where a tag may have begun
        self._characters = getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> None:
        """Add a token."""
        piece = self._limit.piece(token)
        self._characters.decode(piece)
        self._count += self._thinks
        tag = self._limit.end if self._thinks else self._limit.start
        self._tail += piece
        if tag in self._tail:
            self._thinks, self._tail = not self._thinks, b""
        self._tail = self._tail[-len(tag) :]

    @property
    def is_over(self) -> bool:
        """Whether a thought must end here: not between the bytes of a character."""
        return self._thinks and self._count >= self._limit.most and not self._characters.getstate()[0]
