"""Markdown to sections. The text of a block stays as it is written: models read Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .section import Outline
from .text import decode, normalise_lines

HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$")
ATTRIBUTES = re.compile(r"[ \t]*\{[#.:][^{}]*\}$")  # `{#anchor}`
UNDERLINE = re.compile(r" {0,3}(=+|-+)[ \t]*$")
FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
LIST_OR_TABLE = re.compile(r"\s*(?:[-*+]|\d{1,9}[.)])\s|\s*\|")


def read_markdown(data: bytes, outline: Outline) -> None:
    """Add the headings and blocks of a Markdown file."""
    text = normalise_lines(decode(data))
    block = _Block(outline, text)
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


class _Block:
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
