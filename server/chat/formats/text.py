"""The text of an answer as a reader takes it: tags found in any cutting, and what was read since a mark kept."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import TypeVar

from ..answer import Fragment

T = TypeVar("T")
Steps = Generator[Fragment | None, None, T]
"""Reading in steps: each yields a fragment, or None where more text is needed. It yields no None once the text has ended."""

SPACE = " \t\r\n"


class Tags:
    """Strings that mark places in a text. Where two of them begin at one place, the longer one counts."""

    def __init__(self, tags: Iterable[str]) -> None:
        self.tags = tuple(sorted(filter(None, set(tags)), key=len, reverse=True))
        self._longest = len(self.tags[0]) if self.tags else 0
        self._begun = frozenset(tag[:length] for tag in self.tags for length in range(1, len(tag)))
        # `(?!)` fits nowhere.
        self._any = re.compile("|".join(map(re.escape, self.tags)) or "(?!)")
        self._first = re.compile("|".join(re.escape(first) for first in {tag[0] for tag in self.tags}) or "(?!)")

    def __contains__(self, tag: str) -> bool:
        return tag in self.tags

    def find(self, text: str, at: int, ended: bool) -> tuple[int, str]:
        """Return the place of the first tag behind `at`, and the tag.

        The tag is empty where none is whole: then the place is the earliest at which one may have begun.
        """
        begun = len(text) if ended else self._begun_at(text, at)
        found = self._any.search(text, at)
        return (found.start(), found[0]) if found and found.start() < begun else (begun, "")

    def _begun_at(self, text: str, at: int) -> int:
        """Return where the longest end of the text begins that more text may make a tag."""
        for found in self._first.finditer(text, max(at, len(text) - self._longest + 1)):
            if text[found.start() :] in self._begun:
                return found.start()
        return len(text)


class Text:
    """The unread text of an answer. Text that was read is dropped, but for what was read since a `mark`."""

    __slots__ = ("_at", "_read", "_unread", "ended")

    def __init__(self) -> None:
        self.ended = False
        self._unread, self._at = "", 0
        self._read: list[str] | None = None

    def add(self, text: str) -> None:
        self._unread, self._at = self._unread[self._at :] + text, 0

    # ---- take what is here -------------------------------------------------------------------------------------------

    @property
    def rest(self) -> str:
        """The unread text that is here."""
        return self._unread[self._at :]

    def take(self, length: int) -> str:
        """Read as many characters."""
        taken = self._unread[self._at : self._at + length]
        self._at += length
        if self._read is not None and taken:
            self._read.append(taken)
        return taken

    def before(self, tags: Tags) -> tuple[str, str]:
        """Read up to the next tag and the tag itself; without one, up to where it may begin. Returns both."""
        place, tag = tags.find(self._unread, self._at, self.ended)
        text = self.take(place - self._at)
        self.take(len(tag))
        return text, tag

    def mark(self, text: str) -> None:
        """Begin to keep what is read. text: what was read just before."""
        self._read = [text]

    def unmark(self) -> str:
        """Return what was read since the mark."""
        read, self._read = "".join(self._read or ()), None
        return read

    # ---- wait for what comes -----------------------------------------------------------------------------------------

    def peek(self) -> Steps[str]:
        """Return the next character, unread; empty at the end."""
        while self._at == len(self._unread):
            if self.ended:
                return ""
            yield None
        return self._unread[self._at]

    def skip(self, characters: str = SPACE) -> Steps[str]:
        """Read all next characters of this kind; return the one behind them, unread; empty at the end."""
        while (character := (yield from self.peek())) and character in characters:
            self.take(len(self.rest) - len(self.rest.lstrip(characters)))
        return character

    def one_of(self, *tags: str) -> Steps[str]:
        """Read one of these tags, if one comes next, the longest one; return it, or an empty text."""
        while True:
            rest = self.rest
            longer = not self.ended and any(len(tag) > len(rest) and tag.startswith(rest) for tag in tags)
            if not longer:
                return self.take(max((len(tag) for tag in tags if tag and rest.startswith(tag)), default=0))
            yield None

    def upto(self, tags: Tags, most: int) -> Steps[tuple[str, str]]:
        """Read up to the next tag, and the tag; return both. The tag is empty if none begins within `most` characters.

        Then `most` characters are read, or as many as are left.
        """
        parts: list[str] = []
        while True:
            place, tag = tags.find(self._unread, self._at, self.ended)
            is_near = place - self._at <= most
            part = self.take(min(place - self._at, most))
            parts.append(part)
            most -= len(part)
            if tag or self.ended or not is_near:
                return "".join(parts), self.take(len(tag)) if is_near else ""
            yield None
