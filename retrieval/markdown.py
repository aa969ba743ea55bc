"""Sections of Markdown and of plain text."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

# ---- A document's text as all formats are read: sections under headings, and blocks in them. ----------------------------

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
    """Collects the headings and blocks of a document in their order.

    left_out: the letters that are left out on purpose, by kind, such as those of navigation.
    """

    def __init__(self) -> None:
        self.sections = [Section(())]
        self.left_out: Counter[str] = Counter()
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


# ---- Bytes to text, and plain text to paragraphs. -----------------------------------------------------------------------

MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
SAMPLE = 8192  # bytes that tell a text from binary data
PARAGRAPH = re.compile(r"\S[^\n]*(?:\n[^\S\n]*\S[^\n]*)*")
SHORT_LINE = 60  # characters: lines that are shorter on average were broken on purpose


def decode(data: bytes, declared: str = "") -> str:
    """Return a file's text. declared: the encoding that it names. Raises Unreadable for binary data."""
    for mark, encoding in MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, "replace")
    if b"\0" in data[:SAMPLE]:
        raise Unreadable("it is binary: only text, HTML, PDF and DOCX are read")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode(_known(declared) or "cp1252", "replace")


def _known(encoding: str) -> str:
    """Return the name of a text encoding that Python has, else nothing."""
    try:
        info = codecs.lookup(encoding)
    except (LookupError, ValueError):
        return ""
    return info.name if getattr(info, "_is_text_encoding", True) else ""


def read_text(data: bytes, outline: Outline) -> None:
    """Add the paragraphs of a plain text: runs of lines between blank ones."""
    text = normalise_lines(decode(data))
    for match in PARAGRAPH.finditer(text):
        paragraph = match[0]
        has_lines = len(paragraph) < SHORT_LINE * (paragraph.count("\n") + 1) and "\n" in paragraph
        outline.add_block(paragraph, span=match.span(), has_lines=has_lines)


def normalise_lines(text: str) -> str:
    """Return a text whose lines end in one character each."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$")
ATTRIBUTES = re.compile(r"[ \t]*\{[#.:][^{}]*\}$")  # `{#anchor}`
UNDERLINE = re.compile(r" {0,3}(=+|-+)[ \t]*$")
FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
LIST_OR_TABLE = re.compile(r"\s*(?:[-*+]|\d{1,9}[.)])\s|\s*\|")


def read_markdown(data: bytes, outline: Outline) -> None:
    """Add the headings and blocks of a Markdown file."""
    text = normalise_lines(decode(data))
    block = _BlockLines(outline, text)
    fence = ""
    for start, line in _lines(text):
        stop = start + len(line)
        if fence:
            block.extend(start, stop)
            if line.strip().startswith(fence) and not line.strip().strip(fence[0]):
                block.finish(has_lines=True)
                fence = ""
        elif opening := FENCE.match(line):
            block.finish()
            fence = opening[1]
            block.extend(start, stop)
        elif not line.strip():
            block.finish()
        elif heading := HEADING.match(line):
            block.finish()
            outline.add_heading(len(heading[1]), ATTRIBUTES.sub("", heading[2] or ""))
        elif (underline := UNDERLINE.match(line)) and block.is_line:
            outline.add_heading(1 if underline[1][0] == "=" else 2, block.take())
        else:
            block.extend(start, stop)
    block.finish(has_lines=bool(fence))


class _BlockLines:
    """The lines of the block that is being read."""

    def __init__(self, outline: Outline, text: str) -> None:
        self._outline, self._text = outline, text
        self._start = self._stop = -1

    @property
    def is_line(self) -> bool:
        """Whether it is one line of prose, which an underline makes a heading."""
        text = self._text[self._start : self._stop]
        return self._start >= 0 and "\n" not in text and not LIST_OR_TABLE.match(text)

    def extend(self, start: int, stop: int) -> None:
        self._start = start if self._start < 0 else self._start
        self._stop = stop

    def take(self) -> str:
        """Return the text and begin a new block."""
        text = self._text[self._start : self._stop] if self._start >= 0 else ""
        self._start = self._stop = -1
        return text

    def finish(self, has_lines: bool = False) -> None:
        """Add the block to the outline, if it has any line."""
        span = (self._start, self._stop)
        if text := self.take():
            has_lines = has_lines or bool(LIST_OR_TABLE.match(text))
            self._outline.add_block(text, has_lines=has_lines, span=span)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line without its end, and where it starts."""
    start = 0
    while start < len(text):
        stop = text.find("\n", start)
        stop = len(text) if stop < 0 else stop
        yield start, text[start:stop]
        start = stop + 1
