"""The text of generated tokens: UTF-8, stop strings, reasoning tags."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class ContentParts(Protocol):
    """Cuts the text of an answer into parts. Each part is a tuple: its text, and whether it is content.

    Stop strings end an answer only in parts that are content.

    num_unsettled: the number of added characters that no returned part contains yet.
    """

    num_unsettled: int

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Add text, and return the parts that are now complete."""
        ...

    def finish(self, is_cut: bool) -> list[tuple[str, bool]]:
        """Return the last parts.

        is_cut: the answer ended at its limit.
        """
        ...


class TextStream:
    """Decodes one answer's tokens while the answer is generated.

    The results of all calls of `push` and of `finish`, joined, are the answer decoded as UTF-8, with U+FFFD for invalid
    bytes. The text does not depend on how tokens split its bytes. The text ends before the first stop string. If several
    stop strings start at one place, `stopped` is the shortest of them.

    stop: stop strings; empty ones are ignored.
    piece: returns a token's bytes.
    parts: cuts the text into parts, for answers in which only some parts can contain a stop string. A stop string that
    extends over two parts is not found. If `parts` is None, the whole text can contain stop strings.
    """

    __slots__ = ("_decoder", "_partial", "_parts", "_piece", "_stop", "_unsettled", "stopped")

    def __init__(self, stop: Sequence[str], piece: Callable[[int], bytes], parts: ContentParts | None = None) -> None:
        self.stopped: str | None = None
        """The stop string that ended the answer."""
        self._stop = tuple(dict.fromkeys(word for word in stop if word))
        self._piece = piece
        self._decoder = getincrementaldecoder("utf-8")("replace")
        # Never longer than the longest stop string, so the cost of a push does not depend on the answer's length.
        self._unsettled = ""
        self._partial = [PartialWords(word) for word in self._stop]
        self._parts = parts if self._stop else None

    def push(self, token: int) -> str:
        """Add a token, and return the new text that cannot become part of a stop string; empty after a stop string."""
        text = self._decoder.decode(self._piece(token))
        return self._settle(text, final=False) if self._parts is None else self._settle_parts(self._parts.push(text))

    def finish(self, is_cut: bool = False) -> str:
        """Return the remaining text, up to a stop string if it contains one. Call this once, after the last token.

        is_cut: the answer ended at its limit.
        """
        text = self._decoder.decode(b"", final=True)
        if self._parts is None:
            return self._settle(text, final=True)
        settled = self._settle_parts([*self._parts.push(text), *self._parts.finish(is_cut)])
        return settled + self._settle("", final=True)

    @property
    def num_unsettled(self) -> int:
        """The number of decoded characters that have not been returned yet."""
        return len(self._unsettled) + (self._parts.num_unsettled if self._parts else 0)

    def _settle_parts(self, parts: Sequence[tuple[str, bool]]) -> str:
        settled = ""
        for text, is_content in parts:
            settled += self._settle(text if is_content else "", final=not is_content)
            if not is_content and self.stopped is None:
                settled += text
                for partial in self._partial:
                    partial.length = 0
        return settled

    def _settle(self, text: str, *, final: bool) -> str:
        if self.stopped is not None:
            return ""
        self._unsettled += text
        for partial in self._partial:
            partial.push(text)
        settled_end = len(self._unsettled) if final else self._first_unfinished()
        found = self._first_stop()
        if found is not None and found[0] <= settled_end:
            # Another stop string that starts earlier may still become whole. Then this one has to wait.
            start, self.stopped = found
            settled, self._unsettled = self._unsettled[:start], ""
        else:
            settled, self._unsettled = self._unsettled[:settled_end], self._unsettled[settled_end:]
        return settled

    def _first_stop(self) -> tuple[int, str] | None:
        """Return the start of the earliest whole stop string, and the string; None if there is none."""
        found = ((self._unsettled.find(word), word) for word in self._stop)
        return min((hit for hit in found if hit[0] >= 0), key=lambda hit: (hit[0], len(hit[1])), default=None)

    def _first_unfinished(self) -> int:
        """Return where the earliest incomplete stop string starts; the text's end if there is none."""
        return len(self._unsettled) - max((partial.length for partial in self._partial), default=0)


class PartialWords:
    """Finds the longest prefix of a word that a text ends with. The prefix is always shorter than the word.

    length: how many characters the found prefix has.

    The algorithm is by Knuth, Morris and Pratt: the time per character does not depend on the length of the word.
    """

    __slots__ = ("_borders", "_word", "length")

    def __init__(self, word: str) -> None:
        self._word, self.length = word, 0
        # The length of the longest border of each prefix of the word, computed as far as needed.
        self._borders = [0, 0]

    def push(self, text: str) -> None:
        """Add text."""
        for character in text:
            length = self._longer(self.length, character)
            if length == len(self._borders):
                self._borders.append(self._longer(self._borders[-1], self._word[length - 1]))
            self.length = length if length < len(self._word) else self._borders[length]

    def _longer(self, length: int, character: str) -> int:
        while length and self._word[length] != character:
            length = self._borders[length]
        return length + (self._word[length] == character)


# ---- Reasoning of limited length: at the limit the sampler chooses the tokens that end reasoning. -----------------------


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReasoningLimit:
    """The limit of reasoning in one answer.

    most: the most tokens of reasoning in the whole answer, even if it reasons several times.
    start, end: the tags around reasoning, as bytes.
    calls: the tags of tool calls, if these tags also end reasoning.
    is_open: the prompt ends inside reasoning.
    anywhere: a start tag after content also starts reasoning. If `anywhere` is false, a start tag after content counts as
    content.
    closing: the ids of the tokens to add at the limit: an optional message, then the end tag.
    piece: returns the bytes of a token in the answer.
    """

    most: int
    start: bytes
    end: bytes
    calls: tuple[bytes, ...] = ()
    is_open: bool
    anywhere: bool = False
    closing: tuple[int, ...]
    piece: Callable[[int], bytes]


class ReasoningClock:
    """Counts the tokens of an answer's reasoning.

    closing: the ids of the tokens with which the answer must continue once `is_over` is true.
    """

    def __init__(self, limit: ReasoningLimit) -> None:
        self._limit, self._thinks, self._count = limit, limit.is_open, 0
        self.closing = limit.closing
        self._ends, self._may_begin = (limit.end, *limit.calls), True
        self._longest = max(map(len, (limit.start, *self._ends)))
        self._tail = b""  # the newest text after the last tag, in which the next tag may have started
        self._characters = getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> None:
        """Add a token."""
        piece = self._limit.piece(token)
        self._characters.decode(piece)
        self._count += self._thinks
        self._tail += piece
        while after := self._after_end() if self._thinks else self._after_start():
            self._thinks, self._tail = not self._thinks, self._tail[after:]
            self._may_begin = self._limit.anywhere
        self._tail = self._tail[-self._longest :]

    def _after_end(self) -> int:
        """Return the place in the newest text after the first tag that ends reasoning; 0 if there is no such tag."""
        found = ((at, at + len(tag)) for tag in self._ends if (at := self._tail.find(tag)) >= 0)
        return min(found, default=(0, 0))[1]

    def _after_start(self) -> int:
        """Return the place in the newest text after the first tag that starts reasoning; 0 if there is no such tag."""
        start = self._limit.start
        if self._limit.anywhere:
            at = self._tail.find(start)
            return at + len(start) if at >= 0 else 0
        self._tail = self._tail.lstrip()
        self._may_begin = self._may_begin and start.startswith(self._tail[: len(start)])
        return len(start) if self._may_begin and len(self._tail) >= len(start) else 0

    @property
    def is_over(self) -> bool:
        """Whether reasoning must end now.

        At the limit, the model may be in the middle of a character or of the end tag. Reasoning may go on past the limit for
        a few tokens, until the character or the tag is complete.
        """
        late = self._count - self._limit.most
        if not self._thinks or late < 0:
            return False
        return late >= len(self._limit.end) or not (self._characters.getstate()[0] or self._is_ending())

    def _is_ending(self) -> bool:
        """Return whether the newest text ends with the start of the end tag."""
        end = self._limit.end
        return any(self._tail.endswith(end[:length]) for length in range(1, len(end)))
