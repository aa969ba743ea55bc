"""PDF to sections. A PDF has no headings or paragraphs, only letters at places: `typeset` finds the rest."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from math import hypot

import pypdfium2 as pdfium
import pypdfium2.raw as raw

from .section import Outline, Unreadable
from .typeset import Line, add_pages

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
