"""Reads reStructuredText and Org. Headings are recognised; all other text is kept as written."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .charsets import decode
from .markdown import add_paragraphs, normalise_lines
from .outline import COMMENTS, FRONT_MATTER, Outline

ADORNMENT = re.compile(r"([!-/:-@\[-`{-~])\1{2,}[ \t]*$")
STARS = re.compile(r"(\*+)[ \t]+(.*?)(?:[ \t]+:[\w@#%:]+:)?[ \t]*$")
ORG_TITLE = re.compile(r"#\+title:[ \t]*(.*)", re.I)
KEYWORD = re.compile(r"[ \t]*#\+(?!caption)\w+:", re.I)
BEGIN = re.compile(r"[ \t]*#\+begin_(\w+)", re.I)
DRAWER = re.compile(r"[ \t]*:(?:PROPERTIES|LOGBOOK):[ \t]*$", re.I)


def read_rst(data: bytes, outline: Outline) -> None:
    """Add the sections of reStructuredText. An underlined line is a heading.

    The sign of the underline decides the heading's level.
    """
    text = normalise_lines(decode(data))
    lines = list(_lines(text))
    signs: list[tuple[str, bool]] = []
    start = at = 0
    while at < len(lines):
        has_over = _is_framed(lines, at)
        title = lines[at + has_over][1] if at + has_over < len(lines) else ""
        under = ADORNMENT.match(lines[at + has_over + 1][1]) if at + has_over + 1 < len(lines) else None
        is_title = under is not None and title.strip() and (has_over or not title[0].isspace())
        if not is_title or not under or len(under[0].rstrip()) < len(title.strip()) or ADORNMENT.match(title):
            at += 1
            continue
        if not has_over and at and lines[at - 1][1].strip():  # the last line of a paragraph or the head of a table
            at += 1
            continue
        add_paragraphs(text, outline, start, lines[at][0])
        sign = (under[1], has_over)
        if sign not in signs:
            signs.append(sign)
        outline.add_heading(signs.index(sign) + 1, title)
        at += 2 + has_over
        start = lines[at][0] if at < len(lines) else len(text)
    add_paragraphs(text, outline, start)


def _is_framed(lines: list[tuple[int, str]], at: int) -> bool:
    """Whether a title between two equal lines of signs starts here."""
    if at + 2 >= len(lines):
        return False
    over = lines[at][1].rstrip()
    return ADORNMENT.match(over) is not None and lines[at + 2][1].rstrip() == over


def read_org(data: bytes, outline: Outline) -> None:
    """Add the sections of an Org file. Drawers, keywords and comments are left out."""
    text = normalise_lines(decode(data))
    start, block, is_drawer = 0, "", False
    for at, line in _lines(text):
        stop, kind = at + len(line), ""
        stars = STARS.match(line)
        if block:
            block = "" if line.strip().lower().startswith(f"#+end_{block}") else block
            continue
        if opening := BEGIN.match(line):
            block = opening[1].lower()
            continue
        if is_drawer:
            kind, is_drawer = FRONT_MATTER, line.strip().lower() != ":end:" and stars is None
        elif DRAWER.match(line):
            kind, is_drawer = FRONT_MATTER, True
        elif KEYWORD.match(line):
            kind = FRONT_MATTER
        elif line.startswith("# "):
            kind = COMMENTS
        if not kind and not stars:
            continue
        add_paragraphs(text, outline, start, at)
        start = stop
        if stars:
            outline.add_heading(len(stars[1]), stars[2])
        elif title := ORG_TITLE.match(line):
            outline.add_heading(0, title[1])
        else:
            outline.leave_out(kind, line)
    add_paragraphs(text, outline, start)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    at = 0
    for line in text.split("\n"):
        yield at, line
        at += len(line) + 1
