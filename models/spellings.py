"""Finds the spellings of special tokens in a text, as llama.cpp does: longer ones first, then from the left."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import cached_property

Trie = dict[str, "Trie"]
END = ""  # the key of a trie node at which a word ends


class Spellings:
    """Finds special tokens by how they are spelt.

    A scan from the left that takes the longest word at each place gives llama.cpp's result, except in vocabularies where
    one word may begin inside another that is no longer (`>>A<<` and `<|end|>` share a `<`). In these a place is sure only
    if no other spelling crosses it.
    """

    def __init__(self, words: Collection[str]) -> None:
        self.words = frozenset(filter(None, words))
        self._longest = max(map(len, self.words), default=0)
        self._pattern = _compiled(self.words)
        self._cross = self._may_cross()

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield start and stop of each spelling, from the left, the longest at each place."""
        return (found.span() for found in self._pattern.finditer(text))

    def is_sure(self, text: str, start: int, stop: int) -> bool:
        """Whether llama.cpp finds this spelling, too: no other spelling crosses either end."""
        for at in range(max(start - self._longest + 1, 0), stop) if self._cross else ():
            other = self._pattern.match(text, at)
            if other and at != start and other.end() > (start if at < start else stop):
                return False
        return True

    def touches(self, text: str) -> bool:
        """Whether `text` holds a spelling, or begins with the end of one or ends with the beginning of one.

        Such a text might become a spelling in the context of a template. Case and blanks around the text do not count.
        """
        text = text.strip().lower()
        lengths = range(1, min(len(text) + 1, self._longest))
        return (
            self._lower.search(text) is not None
            or any(text[-length:] in self._beginnings for length in lengths)
            or any(text[:length] in self._ends for length in lengths)
        )

    @cached_property
    def _lower(self) -> re.Pattern[str]:
        return _compiled({word.lower() for word in self.words})

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(word[:length].lower() for word in self.words for length in range(1, len(word)))

    @cached_property
    def _ends(self) -> frozenset[str]:
        return frozenset(word[length:].lower() for word in self.words for length in range(1, len(word)))

    def _may_cross(self) -> bool:
        """Whether a word, no shorter than another, can begin inside the other, where a scan takes the other."""
        begins: dict[str, list[str]] = {}
        for word in self.words:
            for length in range(1, len(word)):
                begins.setdefault(word[:length], []).append(word)
        return any(
            other != word and len(other.encode()) >= len(word.encode()) and self._takes(word, word[:at] + other)
            for word in self.words
            for at in range(1, len(word))
            for other in begins.get(word[at:], ())
        )

    def _takes(self, word: str, text: str) -> bool:
        found = self._pattern.match(text)
        return found is not None and found[0] == word


def _compiled(words: Collection[str]) -> re.Pattern[str]:
    return re.compile(_alternatives(_trie(words)) if words else "(?!)")


def _trie(words: Collection[str]) -> Trie:
    root: Trie = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[END] = {}
    return root


def _alternatives(node: Trie) -> str:
    """Write a regular expression for the words of a trie, the longest first. A flat list of thousands would be slow."""
    stem = ""
    while len(node) == 1 and END not in node:
        ((character, node),) = node.items()
        stem += re.escape(character)
    branches = [re.escape(character) + _alternatives(rest) for character, rest in node.items() if character != END]
    if not branches:
        return stem
    return f"{stem}(?:{'|'.join(branches)}){'?' if END in node else ''}"
