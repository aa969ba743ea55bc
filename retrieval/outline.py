"""The common form of documents of all formats: sections under headings, made of blocks."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field


class Unreadable(Exception):
    """The text of a file cannot be read. The message tells a user why."""


CONTROLS = {code: None for code in (*range(9), 11, *range(14, 32), 127, 0xFEFF, 0xFFFE)} | {12: "\n", 13: None, 0xAD: None}
"""Control characters and soft hyphens, which mean nothing in a prompt."""

CONTROL = re.compile(f"[{''.join(map(re.escape, map(chr, sorted(CONTROLS))))}]")

MAX_HEADING = 200  # characters: a longer heading is a paragraph in large letters
ENCODED = re.compile(r"(?<![\w+/=-])[\w+/-]{60,}=*(?:[ \t]*\n[ \t>]*[\w+/-]{60,}=*)*(?:[ \t]*\n[ \t>]*[\w+/-]+=+)?", re.A)
STRETCH = 30  # letters: half a line of encoded data
LEAST_ENCODED = 200  # letters of base64 or hexadecimal digits: a picture, a key or many checksums

BETWEEN_CELLS = " | "  # separates the cells of a table row

FRONT_MATTER, COMMENTS, ENCODED_DATA = "front_matter", "comments", "encoded_data"
"""Kinds of text that is left out on purpose. `Outline.left_out` counts letters by kind."""


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph, a list, a table or a piece of code.

    start, stop: the block's place, in characters from the start of a text file, or of the text extracted from another file.
    page: the page number, from 1; None in formats without pages.
    has_lines: whether line ends carry meaning, as in code, lists and tables.
    head: the lines of a table that name its columns.
    """

    text: str
    start: int
    stop: int
    page: int | None = None
    has_lines: bool = False
    head: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """The blocks from one heading to the next.

    headings: all headings that the blocks are under, outermost first; empty for blocks before the first heading.
    """

    headings: tuple[str, ...]
    page: int | None = None
    blocks: list[Block] = field(default_factory=list)


class Outline:
    """Collects the headings and blocks of a document in order.

    left_out: the number of letters left out on purpose, by kind, such as navigation.
    has_records: whether the document consists of rows of a table or a log.
    shift: a number added to each heading's level, for a file inside another file.
    """

    def __init__(self) -> None:
        self.sections = [Section(())]
        self.left_out: Counter[str] = Counter()
        self.has_records = False
        self.shift = 0
        self._levels: list[int] = []  # levels of the current section's headings
        self._end = 0  # the end of the text so far

    @property
    def has_text(self) -> bool:
        return any(section.blocks or section.headings for section in self.sections)

    def leave_out(self, kind: str, text: str) -> None:
        """Count the letters of a text that is not added."""
        if letters := sum(map(len, text.split())):
            self.left_out[kind] += letters

    def add_heading(self, level: int, text: str, page: int | None = None) -> None:
        """Start a section. level: 0 for a document's title, else from 1; levels may be skipped."""
        heading = " ".join(text.translate(CONTROLS).split())
        if len(heading) > MAX_HEADING:
            self.add_block(text, page)
            return
        if not heading:
            return
        level += self.shift
        while self._levels and self._levels[-1] >= level:
            self._levels.pop()
        path = self.sections[-1].headings[: len(self._levels)]
        self._levels.append(level)
        self.sections.append(Section((*path, heading), page))
        self._end += len(heading) + 2

    def add_outline(self, inner: Outline) -> None:
        """Add the outline of an embedded file below the last heading."""
        depth = len(self._levels)
        for section in inner.sections:
            if section.headings:
                self.add_heading(depth + len(section.headings), section.headings[-1], section.page)
            for block in section.blocks:
                self.add_block(block.text, block.page, has_lines=block.has_lines, head=block.head)
        self.left_out += inner.left_out

    def add_block(
        self,
        text: str,
        page: int | None = None,
        *,
        has_lines: bool = False,
        span: tuple[int, int] | None = None,
        head: str = "",
    ) -> None:
        """Add a block, unless it is blank. Encoded data in the text is left out.

        span: start and stop of the block in a text file.
        head: as in `Block`.
        """
        if CONTROL.search(text):
            text = text.translate(CONTROLS)
        if len(text) >= LEAST_ENCODED and _has_long_words(text):
            text = ENCODED.sub(self._leave_out, text)
        text = text.strip("\n").rstrip() if has_lines else text.strip()
        if text:
            start, stop = span or (self._end, self._end + len(text))
            self.sections[-1].blocks.append(Block(text, start, stop, page=page, has_lines=has_lines, head=head))
            self._end = stop + 2

    def _leave_out(self, found: re.Match[str]) -> str:
        """If the matched letters are encoded data, count them as left out and return an empty text; else return them."""
        if not _is_encoded(found[0]):
            return found[0]
        self.leave_out(ENCODED_DATA, found[0])
        return ""


def _has_long_words(text: str) -> bool:
    """Whether `STRETCH` letters in a row have no space, as in encoded data. The check looks at each letter at most once."""
    return any(text.find(" ", at, at + STRETCH) < 0 for at in range(0, len(text) - STRETCH, STRETCH))


def _is_encoded(letters: str) -> bool:
    """Whether letters are base64 or hexadecimal digits rather than a long name."""
    kinds = re.search(r"\d", letters), re.search("[a-z]", letters), re.search("[A-Z]", letters)
    return (
        len(letters) >= LEAST_ENCODED and kinds[0] is not None and (all(kinds) or not re.search(r"[^\da-fA-F\s>]", letters))
    )
