"""Reads the printed lines of a PDF, and the filled-in fields and the notes of each page."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice, pairwise
from math import atan2, cos, degrees, hypot, radians, sin

import pypdfium2 as pdfium
import pypdfium2.raw as raw
from msgspec.structs import replace

from .layout import Bookmark, Line, Page, add_pages
from .outline import MAX_HEADING, Outline, Unreadable

FIXED_PITCH, FORCE_BOLD = 1, 1 << 18  # flags of a font
NAME = 64  # bytes read of a font's name
CODE_FONTS = ("mono", "courier", "consol", "code", "cmtt")
BOLD_FONTS = ("bold", "black", "heavy", "cmbx")
WORD = re.compile(r"\S+")
LABEL = re.compile(r"[•◦▪‣·–*-]|\(?[\dA-Za-z]{1,4}[.)]|\d+(?:\.\d+)+\.?")  # before an item or a heading
WIDE, NARROW = 1.5, 0.4  # times the size of letters: a gap that cuts a line into parts, and the width of a narrow letter
UPRIGHT = 3  # degrees by which a line may differ from the direction of the page's edges
MAX_BOOKMARKS, MAX_NOTES = 10_000, 10_000  # in a document; on a page
MAX_DAMAGED = 100  # pages in a row
NOTES = {raw.FPDF_ANNOT_LINK, raw.FPDF_ANNOT_POPUP}  # annotations without text
UNSEEN = raw.FPDF_ANNOT_FLAG_HIDDEN | raw.FPDF_ANNOT_FLAG_NOVIEW
FILLED = {raw.FPDF_FORMFIELD_TEXTFIELD, raw.FPDF_FORMFIELD_COMBOBOX, raw.FPDF_FORMFIELD_LISTBOX}
MEANINGLESS = re.compile(r"[\x00\x01\x03-\x08\x0e-\x1f\x7f-\x9f\ufffd\ue000-\uf8ff]")
MOST_MEANINGLESS = 0.1  # of a page's letters
OCR = "run OCR on it first, for example with ocrmypdf"
NO_LETTERS = f"its fonts do not say which letters they show: {OCR}"


def read_pdf(data: bytes, outline: Outline) -> None:
    """Add the headings and paragraphs of a PDF, each with its page. Raises Unreadable."""
    try:
        document = pdfium.PdfDocument(data)
    except pdfium.PdfiumError as error:
        is_locked = "password" in str(error).lower()
        raise Unreadable("it is encrypted" if is_locked else f"it is not a PDF that can be read: {error}") from None
    try:
        with suppress(pdfium.PdfiumError):
            document.init_forms()
        bookmarks = list(_bookmarks(document))
        pages = list(_pages(document, outline))
    finally:
        document.close()
    if not any(page.parts for page in pages):
        if outline.left_out["unreadable"]:
            raise Unreadable(NO_LETTERS)
        if outline.left_out["damaged_pages"]:
            raise Unreadable("it is damaged: none of its pages can be read")
        raise Unreadable(f"it has no text, as its pages are pictures: {OCR}")
    add_pages(pages, outline, bookmarks)


def _bookmarks(document: pdfium.PdfDocument) -> Iterator[Bookmark]:
    """Yield the document's bookmarks that lead to a page."""
    for entry in islice(document.get_toc(), MAX_BOOKMARKS):
        with suppress(UnicodeError):
            title = entry.get_title()
            destination = entry.get_dest()
            page = destination.get_index() if destination else None
            if page is not None and title.strip() and len(title) <= MAX_HEADING:
                yield Bookmark(title, entry.level + 1, page)


def _pages(document: pdfium.PdfDocument, outline: Outline) -> Iterator[Page]:
    """Yield all pages. A page that cannot be read is counted and yielded empty."""
    damaged = 0
    for number in range(len(document)):
        try:
            page, share = _page(document, number)
            damaged = 0
        except pdfium.PdfiumError:
            outline.left_out["damaged_pages"] += 1
            damaged += 1
            if damaged == MAX_DAMAGED:
                return
            page, share = Page([]), 0.0
        if share > MOST_MEANINGLESS:
            outline.leave_out("unreadable", " ".join(part.text for part in page.parts))
            page = Page([])
        yield page


def _page(document: pdfium.PdfDocument, number: int) -> tuple[Page, float]:
    """Return a page, and the share of its letters that are no known character (`_meaningless`).

    number: the page's number, from 0. Raises PdfiumError.
    """
    page = document[number]
    try:
        notes = list(_notes(page, document.formenv)) if raw.FPDFPage_GetAnnotCount(page) > 0 else []
        if notes and raw.FPDFPage_Flatten(page, raw.FLAT_NORMALDISPLAY) == raw.FLATTEN_SUCCESS:
            page.close()
            page = document[number]
        text_page = page.get_textpage()
        try:
            text = text_page.get_text_range()
            parts = list(_parts(text_page, text, number + 1))
            share = _meaningless(text_page, text)
        finally:
            text_page.close()
    finally:
        page.close()
    return Page([*parts, *_unshown(notes, parts, number + 1)], is_form=bool(notes)), share


def _meaningless(page: pdfium.PdfTextPage, text: str) -> float:
    """Return the share of letters that are no known character: their font does not say which character each letter shows.

    PDFium omits some letters that are no known character from `text`. The number of omitted letters is the difference
    between PDFium's count of all letters and the length of `text`.
    """
    num_hidden = raw.FPDFText_CountChars(page) - _units(text)
    letters = sum(map(len, text.split()))
    return (len(MEANINGLESS.findall(text)) + max(num_hidden, 0)) / max(letters, 1)


# ---- The parts of lines. ------------------------------------------------------------------------------------------------


Word = tuple[str, int, int]
"""A word, its place in the text of a page, and its length there, in UTF-16 units."""


def _parts(page: pdfium.PdfTextPage, text: str, number: int) -> Iterator[Line]:
    """Yield the lines of a page in the order in which the PDF draws them, each cut at its wide gaps."""
    units = _units(text)
    letters = _Letters(page, number, is_direct=raw.FPDFText_CountChars(page) == units)
    words_of = _words if units == len(text) else _words_in_units
    start = 0
    for line in text.split("\r\n"):
        words, length = words_of(line, start)
        if words:
            yield from letters.parts(words)
        start += length + 2


def _words(line: str, start: int) -> tuple[list[Word], int]:
    """Return the words of a line that begins at `start`, and the line's length. Each letter must be one UTF-16 unit."""
    return [(match[0], start + match.start(), len(match[0])) for match in WORD.finditer(line)], len(line)


def _words_in_units(line: str, start: int) -> tuple[list[Word], int]:
    """Return the same as `_words`, for letters that may be two UTF-16 units."""
    words: list[Word] = []
    at = end = 0
    for match in WORD.finditer(line):
        at += _units(line[end : match.start()])
        length, end = _units(match[0]), match.end()
        words.append((match[0], start + at, length))
        at += length
    return words, at + _units(line[end:])


def _units(text: str) -> int:
    """Return the length of a text as PDFium counts it, in UTF-16."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


class _Letters:
    """Sizes, places and fonts of the letters of a page."""

    def __init__(self, page: pdfium.PdfTextPage, number: int, is_direct: bool) -> None:
        """number: the page's number, from 1. is_direct: whether PDFium's number of each letter is its index in the text."""
        self._page, self._number, self._is_direct = page.raw, number, is_direct
        self._x, self._y = ctypes.c_double(), ctypes.c_double()
        self._box, self._matrix = raw.FS_RECTF(), raw.FS_MATRIX()
        self._name, self._flags = ctypes.create_string_buffer(NAME), ctypes.c_int()

    def parts(self, words: Sequence[Word]) -> Iterator[Line]:
        """Yield the parts of a line, given its words."""
        first = self._letter(words[0][1])
        size, angle = self._size_and_angle(first)
        is_code, is_bold = self._font(first)
        is_bold = is_bold and self._font(self._last(words[-1]))[1]
        way = (cos(radians(angle)), sin(radians(angle)))
        line = Line(
            text="", page=self._number, size=size, left=0, right=0, base=0, angle=angle, is_code=is_code, is_bold=is_bold
        )
        starts = [0] if is_code else [0, *self._starts(words, size, way)]
        for start, stop in pairwise([*starts, len(words)]):
            left, base = self._origin(self._letter(words[start][1]), way)
            right = self._end(self._last(words[stop - 1]), way)
            text = " ".join(word for word, _, _ in words[start:stop])
            yield replace(line, text=text, left=left, right=right, base=base)

    def _starts(self, words: Sequence[Word], size: float, way: tuple[float, float]) -> Iterator[int]:
        """Yield the indexes of the words after a wide gap.

        The end of a word is looked up only if the next word begins far enough away for a wide gap.
        """
        part, before = 0, 0.0
        get, page, x, y = raw.FPDFText_GetCharOrigin, self._page, self._x, self._y
        is_direct, along, up = self._is_direct, *way
        for at, word in enumerate(words):
            get(page, word[1] if is_direct else self._letter(word[1]), x, y)
            begin = x.value * along + y.value * up if up else x.value * along
            if at and begin - before > (WIDE + NARROW * words[at - 1][2]) * size:
                is_label = at == part + 1 and LABEL.fullmatch(words[part][0])
                if not is_label and begin - self._end(self._last(words[at - 1]), way) > WIDE * size:
                    yield at
                    part = at
            before = begin

    def _last(self, word: Word) -> int:
        return self._letter(word[1] + word[2] - 1)

    def _letter(self, at: int) -> int:
        return at if self._is_direct else max(raw.FPDFText_GetCharIndexFromTextIndex(self._page, at), 0)

    def _origin(self, letter: int, way: tuple[float, float]) -> tuple[float, float]:
        """Return the start of a letter, along and across the direction of writing."""
        raw.FPDFText_GetCharOrigin(self._page, letter, self._x, self._y)
        x, y = self._x.value, self._y.value
        return x * way[0] + y * way[1], y * way[0] - x * way[1]

    def _end(self, letter: int, way: tuple[float, float]) -> float:
        """Return the end of a letter along the direction of writing."""
        box = self._box
        raw.FPDFText_GetLooseCharBox(self._page, letter, box)
        x = box.right if way[0] > 0 else box.left
        y = box.top if way[1] > 0 else box.bottom
        return x * way[0] + y * way[1]

    def _size_and_angle(self, letter: int) -> tuple[float, int]:
        """Return the size of a letter on the page, in points, and the angle of its line, in degrees."""
        matrix = self._matrix
        has_matrix = raw.FPDFText_GetMatrix(self._page, letter, matrix)
        scale, angle = (hypot(matrix.c, matrix.d), round(degrees(atan2(matrix.b, matrix.a)))) if has_matrix else (1.0, 0)
        upright = 90 * round(angle / 90)
        angle = upright % 360 if abs(angle - upright) <= UPRIGHT else angle % 360
        size = round(2 * raw.FPDFText_GetFontSize(self._page, letter) * (scale or 1.0)) / 2
        if size <= 0:  # a font of type 3 may have no size
            raw.FPDFText_GetLooseCharBox(self._page, letter, self._box)
            size = round(2 * abs(self._box.top - self._box.bottom)) / 2
        return max(size, 0.5), angle

    def _font(self, letter: int) -> tuple[bool, bool]:
        """Return whether a letter has a font for code, and whether it is bold."""
        raw.FPDFText_GetFontInfo(self._page, letter, self._name, NAME, self._flags)
        return _kind(self._name.value, self._flags.value)


@lru_cache(maxsize=256)
def _kind(name: bytes, flags: int) -> tuple[bool, bool]:
    """Return whether a font is for code, and whether it is bold."""
    font = name.decode("utf-8", "replace").lower()
    is_code = bool(flags & FIXED_PITCH) or any(part in font for part in CODE_FONTS)
    return is_code, bool(flags & FORCE_BOLD) or any(part in font for part in BOLD_FONTS)


# ---- The filled-in fields and the notes of a page. ----------------------------------------------------------------------


def _notes(page: pdfium.PdfPage, form: pdfium.PdfFormEnv | None) -> Iterator[tuple[str, str, raw.FS_RECTF]]:
    """Yield the name, the text and the place of each visible form field, note and signature."""
    for index in range(min(raw.FPDFPage_GetAnnotCount(page), MAX_NOTES)):
        note = raw.FPDFPage_GetAnnot(page, index)
        if not note:
            continue
        try:
            kind = raw.FPDFAnnot_GetSubtype(note)
            if kind in NOTES or raw.FPDFAnnot_GetFlags(note) & UNSEEN:
                continue
            place = raw.FS_RECTF()
            raw.FPDFAnnot_GetRect(note, place)
            if kind != raw.FPDF_ANNOT_WIDGET:
                yield "", _string(lambda *into, note=note: raw.FPDFAnnot_GetStringValue(note, b"Contents", *into)), place
            elif form is not None:
                yield *_filled(note, form), place
        finally:
            raw.FPDFPage_CloseAnnot(note)


def _filled(field: object, form: pdfium.PdfFormEnv) -> tuple[str, str]:
    """Return the name and the value of a field; both empty for a password."""
    is_secret = raw.FPDFAnnot_GetFormFieldFlags(form, field) & raw.FPDF_FORMFLAG_TEXT_PASSWORD
    if raw.FPDFAnnot_GetFormFieldType(form, field) not in FILLED or is_secret:
        return "", ""
    gets = (raw.FPDFAnnot_GetFormFieldAlternateName, raw.FPDFAnnot_GetFormFieldName, raw.FPDFAnnot_GetFormFieldValue)
    label, name, value = (_string(lambda *into, get=get: get(form, field, *into)) for get in gets)
    return label or name, value


def _string(get: Callable[..., int]) -> str:
    """Return a text that PDFium writes into a buffer, as UTF-16 with a final zero."""
    size = get(None, 0)
    buffer = (ctypes.c_ushort * (size // 2 + 1))()
    get(buffer, size)
    return bytes(buffer)[: max(size - 2, 0)].decode("utf-16-le", "ignore")


def _unshown(notes: Sequence[tuple[str, str, raw.FS_RECTF]], parts: Sequence[Line], number: int) -> Iterator[Line]:
    """Yield the lines of notes and filled-in fields that are missing from the page's text, each at its place on the page.

    The first line of a field has the field's name before it.
    """
    shown = {word for part in parts for word in WORD.findall(part.text)} if notes else set()
    size = parts[0].size if parts else 10.0
    for name, text, place in notes:
        for at, line in enumerate(text.splitlines()):
            if not shown.issuperset(WORD.findall(line)):
                shown_text = f"{name}: {line}" if name and not at else line
                base = place.top - (at + 1) * 1.2 * size
                yield Line(text=shown_text, page=number, size=size, left=place.left, right=place.right, base=base)
