"""Bytes to text, and plain text to paragraphs."""

from __future__ import annotations

import codecs
import re

from .section import Outline, Unreadable

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
