"""The common form of documents of all formats: sections under headings, and blocks in them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field


class Unreadable(Exception):
    """A file whose text cannot be read. The message is the reason, for a user."""


CONTROLS = {code: None for code in (*range(9), 11, *range(14, 32), 127, 0xFEFF, 0xFFFE)} | {12: "\n", 13: None, 0xAD: None}
"""Control characters and soft hyphens, which mean nothing in a prompt."""

CONTROL = re.compile(f"[{''.join(map(re.escape, map(chr, sorted(CONTROLS))))}]")

MAX_HEADING = 200  # characters: a longer one is a paragraph in large letters
ENCODED = re.compile(r"(?<![\w+/=-])[\w+/-]{60,}=*(?:[ \t]*\n[ \t>]*[\w+/-]{60,}=*)*(?:[ \t]*\n[ \t>]*[\w+/-]+=+)?", re.A)
STRETCH = 30  # letters: half of a line
LEAST_ENCODED = 200  # letters of base64 or of hexadecimal digits: a picture, a key or a checksum of many

BETWEEN_CELLS = " | "  # of a row of a table

FRONT_MATTER, COMMENTS, ENCODED_DATA = "front_matter", "comments", "encoded_data"
"""Kinds of text that is left out on purpose, under which it is counted."""


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph, a list, a table or a piece of code.

    start, stop: the block's place, in characters: of a text file, or of the text that was read from another file. page:
    from 1; None in formats without pages. has_lines: the line ends carry meaning, as in code, lists and tables. head:
    the lines of a table that name its columns.
    """

    text: str
    start: int
    stop: int
    page: int | None = None
    has_lines: bool = False
    head: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """The blocks from one heading up to the next. headings: the path to it, the outermost first; empty before the first."""

    headings: tuple[str, ...]
    page: int | None = None
    blocks: list[Block] = field(default_factory=list)


class Outline:
    """Collects the headings and blocks of a document in their order.

    left_out: the number of letters that are left out on purpose, by kind, such as navigation. has_records: the document
    consists of a table's or a log's rows. shift: is added to the level of each heading, in a file inside another file.
    """

    def __init__(self) -> None:
        self.sections = [Section(())]
        self.left_out: Counter[str] = Counter()
        self.has_records = False
        self.shift = 0
        self._levels: list[int] = []  # of the headings of the current section
        self._end = 0  # of the text so far

    @property
    def has_text(self) -> bool:
        return any(section.blocks or section.headings for section in self.sections)

    def leave_out(self, kind: str, text: str) -> None:
        """Count the letters of a text that is not added."""
        if letters := sum(map(len, text.split())):
            self.left_out[kind] += letters

    def add_heading(self, level: int, text: str, page: int | None = None) -> None:
        """Start a section. level: 1 is the outermost; levels may be skipped."""
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
        """Add a file inside this one, below the last heading."""
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

        span: the block's place, in formats that are text themselves. head: as in `Block`.
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
        """Return letters that may be encoded data; empty if they are."""
        if not _is_encoded(found[0]):
            return found[0]
        self.leave_out(ENCODED_DATA, found[0])
        return ""


def _has_long_words(text: str) -> bool:
    """Whether some stretch has no space, as in each line of encoded data. Looks at each letter once at most."""
    return any(text.find(" ", at, at + STRETCH) < 0 for at in range(0, len(text) - STRETCH, STRETCH))


def _is_encoded(letters: str) -> bool:
    """Whether letters are base64 or hexadecimal, and not a long name."""
    kinds = re.search(r"\d", letters), re.search("[a-z]", letters), re.search("[A-Z]", letters)
    return (
        len(letters) >= LEAST_ENCODED and kinds[0] is not None and (all(kinds) or not re.search(r"[^\da-fA-F\s>]", letters))
    )
