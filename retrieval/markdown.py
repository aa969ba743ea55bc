"""Reads Markdown, plain text, and tables in text form such as CSV."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from itertools import islice

from .charsets import decode
from .outline import BETWEEN_CELLS, COMMENTS, FRONT_MATTER, Outline

# ---- Plain text: paragraphs, and the lines of a log. --------------------------------------------------------------------

PARAGRAPH = re.compile(r"\S[^\n]*(?:\n[^\S\n]*\S[^\n]*)*")
SHORT_LINE = 60  # characters: if lines are shorter on average, their ends carry meaning


LOGGED = re.compile(
    r"\W{0,2}(?:\d{4}[-/.]\d\d[-/.]\d\d|\d\d[-/.]\d\d[-/.]\d{2,4}|[A-Z][a-z]{2} [ \d]\d) ?.?\d\d:\d\d"
    r"|\W{0,2}\d\d:\d\d:\d\d|\S{1,80} \S{1,80} \S{1,80} \[\d\d/[A-Z][a-z]{2}/\d{4}:"
)
"""The time at the start of a log line, or after the names in a line of a web server's log."""
LOOKED_AT, LEAST_LOGGED = 200, 20  # lines that show whether a text is a log; the least lines of a log


def read_text(data: bytes, outline: Outline) -> None:
    """Add the paragraphs of a plain text, which are separated by blank lines."""
    text = normalise_lines(decode(data))
    outline.has_records = _is_log(text)
    add_paragraphs(text, outline)


def add_paragraphs(text: str, outline: Outline, start: int = 0, stop: int | None = None, *, is_file: bool = True) -> None:
    """Add the paragraphs of `text[start:stop]`. is_file: positions in the text are positions in the file."""
    for match in PARAGRAPH.finditer(text, start, len(text) if stop is None else stop):
        paragraph = match[0]
        has_lines = len(paragraph) < SHORT_LINE * (paragraph.count("\n") + 1) and "\n" in paragraph
        span = match.span() if is_file else None
        outline.add_block(paragraph, span=span, has_lines=has_lines or outline.has_records)


def _is_log(text: str) -> bool:
    """Whether most lines of a text begin with a time."""
    lines = [line for _, line in islice(_lines(text), LOOKED_AT) if line.strip()]
    return len(lines) >= LEAST_LOGGED and 2 * sum(LOGGED.match(line) is not None for line in lines) > len(lines)


def normalise_lines(text: str) -> str:
    """Return a text with single line feeds as line ends."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


# ---- Tables in text form, such as CSV. ----------------------------------------------------------------------------------

DELIMITERS = ",;\t|"


def read_table(data: bytes, outline: Outline) -> None:
    """Add the rows of a table. The first row names the columns, and shows which sign separates cells."""
    lines = normalise_lines(decode(data)).split("\n")
    first = next((line for line in lines if line.strip()), "")
    try:
        table = list(csv.reader((f"{line}\n" for line in lines), delimiter=max(DELIMITERS, key=first.count)))
        rows = [BETWEEN_CELLS.join(" ".join(cell.split()) for cell in row) for row in table if any(map(str.strip, row))]
    except csv.Error:  # a quotation mark without an end
        rows = [line for line in lines if line.strip()]
    outline.has_records = True
    outline.add_block("\n".join(rows), has_lines=True, head="".join(rows[:1]))


# ---- Markdown. ----------------------------------------------------------------------------------------------------------

HEADING = re.compile(r" {0,3}(#{1,6})(?![^ \t])(.*)")
CLOSING = re.compile(r"(?<![^ \t])#+$")  # after a heading
ATTRIBUTES = re.compile(r"(?<![ \t])[ \t]*\{[#.:][^{}]*\}$")  # `{#anchor}`
UNDERLINE = re.compile(r" {0,3}(=+|-+)[ \t]*$")
FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")  # inline code may begin with as many, and ends in its line
LIST_OR_TABLE = re.compile(r"\s*(?:[-*+]|\d{1,9}[.)])\s|\s*\|")
TABLE_HEAD = re.compile(
    r"(?=[^\n]*\|)[^\n]*+\n(?=[^\n|]*\|)[ \t]*+\|?[ \t]*+:?-++:?[ \t]*+(?:\|[ \t]*+:?-++:?[ \t]*+)*+\|?[ \t]*+(?=\n)"
)
FRONT = re.compile(
    r"---[ \t]*\n(?>(?:[\w\"'.-]+[ \t]*:|[ \t#}\]]|-[ \t])[^\n]*\n|\n)+?(?:---|\.\.\.)[ \t]*(?:\n|$)"
    r"|\+\+\+[ \t]*\n(?:[^\n]*\n)*?\+\+\+[ \t]*(?:\n|$)"
)
"""The front matter of a text, in YAML or TOML."""
TITLE = re.compile(r"^title[ \t]*[:=][ \t]*(.+)$", re.M)


def read_markdown(data: bytes, outline: Outline) -> None:
    """Add the headings and blocks of a Markdown file."""
    add_markdown(normalise_lines(decode(data)), outline)


def add_markdown(text: str, outline: Outline, *, is_file: bool = True) -> None:
    """Add the headings and blocks of Markdown.

    is_file: whether the text is a whole file, so that a place in the text is also a place in the file.
    """
    front = FRONT.match(text) if is_file else None
    if front:
        outline.leave_out(FRONT_MATTER, front[0])
        named = TITLE.search(front[0])
        title = named[1].strip(" \t\"'>|") if named else ""
        if f"\n# {title}\n" not in text:
            outline.add_heading(0, title)
    text = _without_comments(text, outline)
    block = _BlockLines(outline, text, has_places=is_file)
    fence = ""
    for start, line in _lines(text, front.end() if front else 0):
        stop, mark = start + len(line), line.lstrip()[:1]
        if fence:
            block.extend(start, stop)
            if _closes(line, fence):
                block.finish(has_lines=True)
                fence = ""
        elif not mark:
            block.finish()
        elif mark not in "`~#=-":
            block.extend(start, stop)
        elif opening := FENCE.match(line):
            block.finish()
            fence = opening[1]
            block.extend(start, stop)
        elif heading := HEADING.match(line):
            block.finish()
            title = CLOSING.sub("", heading[2].strip(" \t")).rstrip(" \t")
            outline.add_heading(len(heading[1]), ATTRIBUTES.sub("", title))
        elif (underline := UNDERLINE.match(line)) and block.is_line:
            outline.add_heading(1 if underline[1][0] == "=" else 2, block.take())
        else:
            block.extend(start, stop)
    block.finish(has_lines=bool(fence))


class _BlockLines:
    """The lines of the current block."""

    def __init__(self, outline: Outline, text: str, *, has_places: bool) -> None:
        self._outline, self._text, self._has_places = outline, text, has_places
        self._start = self._stop = -1

    @property
    def is_line(self) -> bool:
        """Whether the block is one line of prose, which an underline makes a heading."""
        start, stop = self._start, self._stop
        return start >= 0 and self._text.find("\n", start, stop) < 0 and not LIST_OR_TABLE.match(self._text, start, stop)

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
        span = (self._start, self._stop) if self._has_places else None
        if text := self.take():
            head = None if has_lines else TABLE_HEAD.match(text)
            has_lines = has_lines or bool(LIST_OR_TABLE.match(text)) or head is not None
            self._outline.add_block(text, has_lines=has_lines, span=span, head=head[0] if head else "")


OPENED, CLOSED = "<!--", "-->"


def _without_comments(text: str, outline: Outline) -> str:
    """Return a Markdown text with spaces in place of its comments. The letters of comments are counted.

    A comment inside code is part of the code, and a comment without an end is text.
    """
    if OPENED not in text:
        return text
    last, fence, kept, at = text.rfind(CLOSED), "", [], 0
    for start, line in _lines(text):
        stop = start + len(line)
        if start >= at and (found := FENCE.match(line)) and (not fence or _closes(line, fence)):
            fence = "" if fence else found[1]
        if fence:
            continue
        looked, ticks = max(start, at), 0
        while 0 <= (opened := text.find(OPENED, looked, stop)) < last:
            ticks += text.count("`", looked, opened)
            looked = opened + 1
            if ticks % 2 == 0:
                looked = text.index(CLOSED, opened + 2) + len(CLOSED)
                kept += [text[at:opened], re.sub(r"[^\n]", " ", text[opened:looked])]
                outline.leave_out(COMMENTS, text[opened:looked])
                at = looked
    return "".join([*kept, text[at:]])


def _closes(line: str, fence: str) -> bool:
    return line.strip().startswith(fence) and not line.strip().strip(fence[0])


def _lines(text: str, start: int = 0) -> Iterator[tuple[int, str]]:
    """Yield the start of each line, and the line without its end."""
    while start < len(text):
        stop = text.find("\n", start)
        stop = len(text) if stop < 0 else stop
        yield start, text[start:stop]
        start = stop + 1
