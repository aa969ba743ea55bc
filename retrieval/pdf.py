"""Sections of PDF: lines, columns, headings."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import hypot
from statistics import median

import pypdfium2 as pdfium
import pypdfium2.raw as raw

from .markdown import MAX_HEADING, Outline, Unreadable

# ---- Lines of print to headings, paragraphs, lists and code, by their sizes and places. ---------------------------------
#
# A line in larger letters than the body's is a heading. A paragraph ends at a wider gap than that between its lines, at
# an indented line, and at a line of another kind. Page numbers, lines at the top or the bottom of most pages, and tables
# of contents are no text.

LARGER = 1.12  # of the body's size: a heading's
WIDER = 1.3  # of the usual distance of two lines: that of two paragraphs
INDENT = 0.7  # of the size: a line that begins a paragraph
MAX_LEVELS = 6
EDGE = 2  # lines at the top and the bottom of a page that may repeat
CONTENTS = re.compile(r"(?:\. ?){5,}\s*[\divxlc]*$")  # a line of a table of contents
PAGE_NUMBER = re.compile(r"[\divxlc]{1,5}")
DIGITS = re.compile(r"\d+")
BULLET = re.compile(r"(?:[•◦▪‣·–*-]|\(?\d{1,3}[.)])\s")
DOT = re.compile(r"^[•◦▪‣·–*]\s+", re.M)  # a list's items begin with a dash in all formats
SENTENCE_END = (".", "!", "?", ":", "。", '"', "”")
HYPHENS = ("\x02", "\xad", "\ufffe")  # what a hyphen at a line's end becomes


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A printed line. size: of its letters; left, right, base: its place, from the lower left corner; all in points."""

    text: str
    page: int
    size: float
    left: float
    right: float
    base: float
    is_code: bool = False


def add_pages(pages: Sequence[Sequence[Line]], outline: Outline) -> None:
    """Add the text of pages to an outline."""
    running = _running(pages)
    lines = [line for page in pages for at, line in enumerate(page) if not _is_dropped(at, page, running)]
    if not lines:
        return
    body = _body_size(lines)
    levels = {size: min(level, MAX_LEVELS) for level, size in enumerate(_heading_sizes(lines, body), 1)}
    leading = _leading(lines, body)
    for block in _blocks(lines, body, leading):
        _add(block, levels, outline)


def _running(pages: Sequence[Sequence[Line]]) -> set[str]:
    """Return the lines at the edges of more than half of the pages, without their numbers."""
    seen: Counter[str] = Counter()
    for page in pages:
        seen.update({_without_digits(line) for line in (*page[:EDGE], *page[-EDGE:])})
    return {text for text, times in seen.items() if times > max(1, len(pages) / 2)}


def _is_dropped(at: int, page: Sequence[Line], running: set[str]) -> bool:
    is_at_edge = at < EDGE or at >= len(page) - EDGE
    text = page[at].text
    if is_at_edge and (_without_digits(page[at]) in running or PAGE_NUMBER.fullmatch(text)):
        return True
    return CONTENTS.search(text) is not None


def _without_digits(line: Line) -> str:
    return DIGITS.sub("0", line.text)


def _body_size(lines: Iterable[Line]) -> float:
    """Return the size of most letters."""
    letters: Counter[float] = Counter()
    for line in lines:
        letters[line.size] += len(line.text)
    return letters.most_common(1)[0][0]


def _heading_sizes(lines: Iterable[Line], body: float) -> list[float]:
    return sorted({line.size for line in lines if line.size > LARGER * body and not line.is_code}, reverse=True)


def _leading(lines: Sequence[Line], body: float) -> float:
    """Return the usual distance of two lines of the body."""
    gaps = [
        before.base - after.base
        for before, after in pairwise(lines)
        if before.page == after.page and before.size == after.size == body and 0 < before.base - after.base < 3 * body
    ]
    return median(gaps) if gaps else 1.2 * body


def _blocks(lines: Sequence[Line], body: float, leading: float) -> Iterator[list[Line]]:
    """Yield the lines of each heading, paragraph, list and piece of code."""
    block = [lines[0]]
    for line in lines[1:]:
        if _is_new(block, line, (body, leading)):
            yield block
            block = []
        block.append(line)
    yield block


def _is_new(block: Sequence[Line], line: Line, metrics: tuple[float, float]) -> bool:
    """Whether a line begins a block. metrics: size and leading of the body."""
    before, (body, leading) = block[-1], metrics
    is_heading = line.size > LARGER * body
    if line.is_code != before.is_code or is_heading != (before.size > LARGER * body):
        return True
    if is_heading and line.size != before.size:
        return True
    if line.page != before.page:
        return is_heading or not (line.is_code or _goes_on(before, line))
    gap = before.base - line.base
    if gap < 0:  # the next column
        return not _goes_on(before, line)
    usual = max(leading * line.size / body, leading) if is_heading else leading
    if DOT.match(line.text) and not _is_listed(block):
        return True
    if line.is_code:
        return gap > 2.5 * WIDER * usual
    if gap > WIDER * usual and not (_is_listed(block) and BULLET.match(line.text)):
        return True
    return _is_indented(block, line)


def _goes_on(before: Line, line: Line) -> bool:
    """Whether a line on the next page or in the next column belongs to the same paragraph."""
    return not before.text.endswith(SENTENCE_END) and not BULLET.match(line.text)


def _is_indented(block: Sequence[Line], line: Line) -> bool:
    before = block[-1]
    is_first = line.left > before.left + INDENT * line.size and abs(before.size - line.size) < 1
    return is_first and len(block) > 1 and not _is_listed(block) and before.text.endswith(SENTENCE_END)


def _is_listed(block: Sequence[Line]) -> bool:
    return BULLET.match(block[0].text) is not None


def _add(block: Sequence[Line], levels: dict[float, int], outline: Outline) -> None:
    first = block[0]
    if first.is_code:
        outline.add_block("\n".join(_code(block)), first.page, has_lines=True)
        return
    text = _joined(block)
    if first.size in levels and len(text) <= MAX_HEADING:
        outline.add_heading(levels[first.size], text, first.page)
    else:
        outline.add_block(text, first.page, has_lines="\n" in text)


def _code(block: Sequence[Line]) -> Iterator[str]:
    """Yield lines of code with their indentation, of which a PDF has only the places."""
    left = min(line.left for line in block)
    for line in block:
        yield " " * min(round((line.left - left) / (0.6 * line.size or 1)), 40) + line.text


def _joined(block: Sequence[Line]) -> str:
    """Return the text of lines: one line again, or one for each item of a list. Hyphenated words become whole."""
    is_listed = _is_listed(block)
    text = block[0].text
    for line in block[1:]:
        if is_listed and BULLET.match(line.text):
            text += "\n" + line.text
        elif text.endswith(HYPHENS):
            text = text[:-1] + line.text
        else:
            text += " " + line.text
    return DOT.sub("- ", text) if is_listed else text


FIXED_PITCH = 1  # of a font's flags
NAME = 64  # bytes of a font's name that are looked at
CODE_FONTS = ("mono", "courier", "consol", "code", "cmtt")


def read_pdf(data: bytes, outline: Outline) -> None:
    """Add the headings and paragraphs of a PDF, each with its page. Raises Unreadable."""
    try:
        document = pdfium.PdfDocument(data)
    except pdfium.PdfiumError as error:
        is_locked = "password" in str(error).lower()
        raise Unreadable("it is encrypted" if is_locked else f"it is not a PDF that can be read: {error}") from None
    try:
        pages = [list(_lines(document, number)) for number in range(len(document))]
    except pdfium.PdfiumError as error:
        raise Unreadable(f"it is damaged: {error}") from None
    finally:
        document.close()
    if not any(pages):
        raise Unreadable("it has no text: pages that are pictures are not read")
    add_pages(pages, outline)


def _lines(document: pdfium.PdfDocument, number: int) -> Iterator[Line]:
    """Yield the lines of a page, from 0, in the order in which they were written."""
    page = document[number]
    try:
        text_page = page.get_textpage()
        try:
            yield from _lines_of(text_page, number + 1)
        finally:
            text_page.close()
    finally:
        page.close()


def _lines_of(page: pdfium.PdfTextPage, number: int) -> Iterator[Line]:
    start = 0
    for text in page.get_text_range().split("\r\n"):
        stripped = text.strip()
        if stripped:
            first = start + _units(text[: text.index(stripped[0])])
            letters = (first, first + _units(stripped) - 1)
            yield _line(page, stripped, letters, number)
        start += _units(text) + 2


def _units(text: str) -> int:
    """Return the length of a text as PDFium counts it, in UTF-16."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def _line(page: pdfium.PdfTextPage, text: str, letters: tuple[int, int], number: int) -> Line:
    first, last = (max(raw.FPDFText_GetCharIndexFromTextIndex(page, index), 0) for index in letters)
    x, y, end = ctypes.c_double(), ctypes.c_double(), ctypes.c_double()
    raw.FPDFText_GetCharOrigin(page, last, end, y)
    raw.FPDFText_GetCharOrigin(page, first, x, y)
    return Line(
        text=text,
        page=number,
        size=_size(page, first),
        left=x.value,
        right=end.value,
        base=y.value,
        is_code=_is_code(page, first),
    )


def _size(page: pdfium.PdfTextPage, letter: int) -> float:
    """Return the size of a letter's font on the page, in points."""
    matrix = raw.FS_MATRIX()
    scale = hypot(matrix.c, matrix.d) if raw.FPDFText_GetMatrix(page, letter, matrix) else 1.0
    return round(2 * raw.FPDFText_GetFontSize(page, letter) * (scale or 1.0)) / 2


def _is_code(page: pdfium.PdfTextPage, letter: int) -> bool:
    name, flags = ctypes.create_string_buffer(NAME), ctypes.c_int()
    raw.FPDFText_GetFontInfo(page, letter, name, NAME, flags)
    font = name.value.decode("utf-8", "replace").lower()
    return bool(flags.value & FIXED_PITCH) or any(part in font for part in CODE_FONTS)
