"""Turns sampled tokens into text that may be sent: whole characters only, and no part of a stop string."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence


class TextStream:
    """Turns one answer's tokens into text as they come.

    `piece` gives a token's bytes. The pushes and `finish()` joined are the answer decoded as UTF-8, invalid bytes as
    U+FFFD, up to the stop string that begins earliest (of several that begin there, the shortest). However the bytes
    are split over tokens, the text is the same. Empty stop strings are ignored.
    """

    __slots__ = ("_begun", "_decoder", "_held", "_piece", "_stop", "cut", "stopped")

    def __init__(self, stop: Sequence[str], piece: Callable[[int], bytes]) -> None:
        self.stopped: str | None = None
        """The stop string that ended the answer."""
        self.cut = 0
        """The bytes of the answer from that stop string on."""
        self._stop = tuple(dict.fromkeys(word for word in stop if word))
        self._piece = piece
        self._decoder = getincrementaldecoder("utf-8")("replace")
        # Never longer than the longest stop string: this, and not the answer's length, is what a push costs.
        self._held = ""
        self._begun = [Begun(word) for word in self._stop]

    def push(self, token: int) -> str:
        """Add a token and return the text that is settled by it; empty once stopped."""
        return self._settle(self._decoder.decode(self._piece(token)), final=False)

    def finish(self) -> str:
        """Return the text still held back. Call it once, after the last token; it may find a stop string, too."""
        return self._settle(self._decoder.decode(b"", final=True), final=True)

    def num_before_cut(self, tokens: Sequence[int]) -> int:
        """Return how many of the answer's last tokens come before its stop string, or share a piece with it."""
        left, num_tokens = self.cut, len(tokens)
        for token in reversed(tokens):
            left -= len(self._piece(token))
            if left < 0:
                break
            num_tokens -= 1
        return num_tokens

    def _settle(self, text: str, *, final: bool) -> str:
        if self.stopped is not None:
            return ""
        self._held += text
        for begun in self._begun:
            begun.push(text)
        hold = len(self._held) if final else self._first_unfinished()
        found = self._first_stop()
        if found is not None and found[0] <= hold:
            # A stop string that may still turn out to begin earlier goes first: then this one waits.
            start, self.stopped = found
            settled, self.cut, self._held = self._held[:start], len(self._held[start:].encode()), ""
        else:
            settled, self._held = self._held[:hold], self._held[hold:]
        return settled

    def _first_stop(self) -> tuple[int, str] | None:
        """Return the start of the earliest whole stop string, and the string."""
        found = ((self._held.find(word), word) for word in self._stop)
        return min((hit for hit in found if hit[0] >= 0), key=lambda hit: (hit[0], len(hit[1])), default=None)

    def _first_unfinished(self) -> int:
        """Return the start of the earliest stop string that may still become whole; without one, the end of the text."""
        return len(self._held) - max((begun.length for begun in self._begun), default=0)


class Begun:
    """Finds how much of a word, less than all of it, a text ends with: `length` characters.

    The algorithm of Knuth, Morris and Pratt: the time of a character does not depend on the length of the word.
    """

    __slots__ = ("_borders", "_word", "length")

    def __init__(self, word: str) -> None:
        self._word, self.length = word, 0
        # For each prefix of the word, the length of its longest border; computed as far as the text has come.
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
