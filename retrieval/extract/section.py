"""A document's text as all formats are read: sections under headings, and blocks in them."""

from __future__ import annotations

from dataclasses import dataclass, field

CONTROLS = {code: None for code in (*range(9), 11, *range(14, 32), 127, 0xFEFF, 0xFFFE)} | {12: "\n", 13: None, 0xAD: None}
"""Control characters and soft hyphens, which mean nothing in a prompt."""

MAX_HEADING = 200  # characters: a longer one is a paragraph in large letters


class Unreadable(Exception):
    """A file whose text cannot be had. The message is the reason, as a user reads it."""


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph, a list, a table or a piece of code.

    start, stop: its place, in characters of the file where that is text, else of the text that was read from it. page: from
    1; None in formats without pages. has_lines: its line ends carry meaning, as in code, lists and tables.
    """

    text: str
    start: int
    stop: int
    page: int | None = None
    has_lines: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """The blocks from one heading up to the next. headings: the path to it, the outermost first; empty before the first."""

    headings: tuple[str, ...]
    page: int | None = None
    blocks: list[Block] = field(default_factory=list)


class Outline:
    """Collects the headings and blocks of a document in their order."""

    def __init__(self) -> None:
        self.sections = [Section(())]
        self._levels: list[int] = []  # of the headings of the current section
        self._end = 0  # of the text so far

    @property
    def has_text(self) -> bool:
        return any(section.blocks or section.headings for section in self.sections)

    def add_heading(self, level: int, text: str, page: int | None = None) -> None:
        """Begin a section. level: 1 is the outermost; levels may be left out."""
        heading = " ".join(text.translate(CONTROLS).split())
        if len(heading) > MAX_HEADING:
            self.add_block(text, page)
            return
        if not heading:
            return
        while self._levels and self._levels[-1] >= level:
            self._levels.pop()
        path = self.sections[-1].headings[: len(self._levels)]
        self._levels.append(level)
        self.sections.append(Section((*path, heading), page))
        self._end += len(heading) + 2

    def add_block(
        self, text: str, page: int | None = None, *, has_lines: bool = False, span: tuple[int, int] | None = None
    ) -> None:
        """Add a block, unless it is blank. span: its place, in formats that are text themselves."""
        text = text.translate(CONTROLS)
        text = text.strip("\n").rstrip() if has_lines else text.strip()
        if text:
            start, stop = span or (self._end, self._end + len(text))
            self.sections[-1].blocks.append(Block(text, start, stop, page=page, has_lines=has_lines))
            self._end = stop + 2
