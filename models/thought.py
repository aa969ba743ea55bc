"""Thoughts of a bounded length: at the limit the sampler chooses the tokens that end one."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ThoughtLimit:
    """The most tokens that the thoughts of one answer may have together.

    start, end: the tags around a thought, as bytes. calls: the tags of calls, where they end a thought, too. is_open: the
    prompt ends in a thought. anywhere: thoughts may come behind content; else only first, and later tags are content.
    closing: the ids that end one: a message, if there is one, and the tag. piece: the bytes of a token in the answer.
    """

    most: int
    start: bytes
    end: bytes
    calls: tuple[bytes, ...] = ()
    is_open: bool
    anywhere: bool = False
    closing: tuple[int, ...]
    piece: Callable[[int], bytes]


class ThoughtClock:
    """Counts the tokens of an answer's thoughts. closing: the ids to go on with where one `is_over`."""

    def __init__(self, limit: ThoughtLimit) -> None:
        self._limit, self._thinks, self._count = limit, limit.is_open, 0
        self.closing = limit.closing
        self._ends, self._may_begin = (limit.end, *limit.calls), True
        self._longest = max(map(len, (limit.start, *self._ends)))
        self._tail = b""  # behind the last tag, where the next one may have begun
        self._characters = getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> None:
        """Add a token."""
        piece = self._limit.piece(token)
        self._characters.decode(piece)
        self._count += self._thinks
        self._tail += piece
        while behind := self._behind_end() if self._thinks else self._behind_start():
            self._thinks, self._tail = not self._thinks, self._tail[behind:]
            self._may_begin = self._limit.anywhere
        self._tail = self._tail[-self._longest :]

    def _behind_end(self) -> int:
        """Return the place behind the first tag that ends a thought; 0 if none is here."""
        found = ((at, at + len(tag)) for tag in self._ends if (at := self._tail.find(tag)) >= 0)
        return min(found, default=(0, 0))[1]

    def _behind_start(self) -> int:
        """Return the place behind the first tag that begins a thought; 0 if none is here."""
        start = self._limit.start
        if self._limit.anywhere:
            at = self._tail.find(start)
            return at + len(start) if at >= 0 else 0
        self._tail = self._tail.lstrip()
        self._may_begin = self._may_begin and start.startswith(self._tail[: len(start)])
        return len(start) if self._may_begin and len(self._tail) >= len(start) else 0

    @property
    def is_over(self) -> bool:
        """Whether a thought must end here: not within a character, nor where the model is about to end it by itself."""
        late = self._count - self._limit.most
        if not self._thinks or late < 0:
            return False
        return late >= len(self._limit.end) or not (self._characters.getstate()[0] or self._is_ending())

    def _is_ending(self) -> bool:
        """Whether the newest text is the beginning of the tag."""
        end = self._limit.end
        return any(self._tail.endswith(end[:length]) for length in range(1, len(end)))
