"""The places where an answer names or quotes a document of its prompt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from ...ordering import Document

MOST = 1000  # citations of an answer by ids, and as many by words: the account of an answer is made in the event loop
QUOTED_WORDS = 5  # that a quotation has at least
BRACKETS = re.compile(r"\[([^\][\n]{1,400})\]")
NAME = re.compile(r"[^\s,;]+")
WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Citation:
    """A span of an answer, in characters, and the document that it cites. quote: by its words, else by its id."""

    id: str
    start: int
    stop: int
    quote: bool = False

    def shown(self) -> dict[str, object]:
        cited: dict[str, object] = {"id": self.id, "start": self.start, "stop": self.stop}
        return cited | ({"quote": True} if self.quote else {})


class _Word(NamedTuple):
    text: str
    start: int
    stop: int


class Sources:
    """Documents, by the words that follow each other in them. It takes memory and time as their text is long."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents = list(documents)
        self._ids = {document.id for document in self._documents}
        self._words = [[word.text for word in _words(document.text)] for document in self._documents]
        self._places: dict[str, tuple[int, int]] = {}  # of the first words: the document, and the first word's number
        for at, words in enumerate(self._words):
            for first in range(len(words) - QUOTED_WORDS + 1):
                self._places.setdefault(_key(words[first : first + QUOTED_WORDS]), (at, first))

    def cited(self, text: str) -> list[Citation]:
        """Return the citations of an answer, in their order."""
        found = [*islice(self._named(text), MOST), *islice(self._quoted(text), MOST)]
        return sorted(found, key=lambda one: (one.start, one.stop))

    def _named(self, text: str) -> Iterator[Citation]:
        """Yield the ids in brackets: alone with them, and of several each by itself."""
        for bracket in BRACKETS.finditer(text):
            if bracket[1] in self._ids:
                yield Citation(bracket[1], bracket.start(), bracket.end())
                continue
            for name in NAME.finditer(text, bracket.start(1), bracket.end(1)):
                if name[0] in self._ids:
                    yield Citation(name[0], name.start(), name.end())

    def _quoted(self, text: str) -> Iterator[Citation]:
        words, at = list(_words(text)), 0
        texts = [word.text for word in words]
        while at + QUOTED_WORDS <= len(words):
            place = self._places.get(_key(texts[at : at + QUOTED_WORDS]))
            if place is None:
                at += 1
                continue
            document, first = place
            length = _common_length(texts, at, self._words[document], first)
            yield Citation(self._documents[document].id, words[at].start, words[at + length - 1].stop, quote=True)
            at += length


def _words(text: str) -> Iterator[_Word]:
    return (_Word(found[0].casefold(), found.start(), found.end()) for found in WORD.finditer(text))


def _key(words: Sequence[str]) -> str:
    return " ".join(words)


def _common_length(words: Sequence[str], at: int, others: Sequence[str], first: int) -> int:
    """Return how many words are the same from a place of each on."""
    most = min(len(words) - at, len(others) - first)
    return next((n for n in range(most) if words[at + n] != others[first + n]), most)
