"""Reads spreadsheets. A sheet is a section, and its rows stay rows.

The module itself reads the format XLSX, which Excel has had since 2007. An XLSX file does not store empty cells, and gives
each number a format that says how the number is displayed. The library calamine reads the formats XLS and XLSB.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from xml.etree.ElementTree import Element, iterparse

import python_calamine as calamine

from .charsets import decode, label_of
from .html import read_markup
from .markdown import read_table
from .outline import BETWEEN_CELLS, Outline, Unreadable
from .package import MAX_TEXT, OLD_FORMAT, Package, broken_as, child_of, get, int_of, tag_of

WORKBOOK = "xl/workbook.xml"
ZIP = b"PK\x03\x04"
MAX_GAP = 64  # bars in place of adjacent empty cells
LOCKED = "it is encrypted: save it without a password"
ENCRYPTED = "EncryptedPackage".encode("utf-16-le")  # in an XLSX workbook with a password
COLUMN = re.compile(r"([A-Z]{1,3})[0-9]*")
EPOCH, EPOCH_1904 = datetime(1899, 12, 30), datetime(1904, 1, 1)
LAST_DAY = 2_957_003  # 31 December 9999, in days from the later epoch
PRECISION = 15  # significant digits of a number

Row = Mapping[int, str]
"""The texts of the non-empty cells of a row, by column, in order."""


# ---- Rows to blocks, for all spreadsheets. ------------------------------------------------------------------------------


@dataclass(slots=True)
class _SheetTable:
    """Rows under a head."""

    rows: list[Row] = field(default_factory=list)
    head: Row = field(default_factory=dict)


class CellLetters:
    """Counts the letters of a workbook, and limits their number, because one text can fill a million cells."""

    def __init__(self) -> None:
        self._left = MAX_TEXT

    def taken(self, text: str, times: int = 1) -> str:
        """Return the text of a cell in one line, and count it. Raises Unreadable if the workbook has too many letters.

        times: the number of cells with this text.
        """
        self._left -= (len(text) + 1) * times
        if self._left < 0:
            raise Unreadable(f"its cells have more than {MAX_TEXT >> 20} Mi letters")
        return " ".join(text.split())


def add_sheet(outline: Outline, name: str, rows: Iterable[Row]) -> None:
    """Add a sheet. The sheet's name is a heading, and the first row of each table names the table's columns.

    After an empty row, a row of several cells without numbers starts another table. All other rows continue the current
    table. A single cell in a row above a table is a paragraph. Columns that are empty in the whole table are left out.
    """
    outline.has_records = True
    outline.add_heading(1, name)
    for table in _tables(rows):
        columns = sorted({column for row in table.rows for column in row})
        places = {column: place for place, column in enumerate(columns)}
        lines = [_line(row, places) for row in table.rows]
        outline.add_block("\n".join(lines), has_lines=True, head=_line(table.head, places) if len(lines) > 1 else "")


def _tables(rows: Iterable[Row]) -> Iterator[_SheetTable]:
    table, was_empty = _SheetTable(), True
    for row in rows:
        if not row:
            was_empty = True
            continue
        if was_empty and table.rows and (not table.head or (len(row) > 1 and not any(map(_is_number, row.values())))):
            yield table
            table = _SheetTable()
        if not table.head and len(row) > 1:
            if table.rows:
                yield table
            table = _SheetTable(head=row)
        table.rows.append(row)
        was_empty = False
    if table.rows:
        yield table


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text[1:2].isdigit()


def _line(row: Row, places: Mapping[int, int]) -> str:
    parts: list[str] = []
    last = 0
    for column, text in row.items():
        place = places.get(column, last)
        parts += [BETWEEN_CELLS * min(place - last, MAX_GAP), text]
        last = place
    return "".join(parts)


# ---- XLSX. --------------------------------------------------------------------------------------------------------------


def read_xlsx(data: bytes, outline: Outline) -> None:
    """Add the sheets of an Excel workbook. Raises Unreadable."""
    if data.startswith(OLD_FORMAT):
        read_calamine(data, outline)  # an old workbook with this suffix, or an encrypted workbook, for which it raises
        return
    with broken_as("an Excel workbook"):
        package = Package(data, [0])
        _Workbook(package, package.main_part(WORKBOOK, "an Excel workbook"), outline).read()


class _Workbook:
    def __init__(self, package: Package, name: str, outline: Outline) -> None:
        self._package, self._outline, self._cells = package, outline, CellLetters()
        self._relations = package.relations(name)
        root = package.part(name)
        self._root = root if root is not None else Element("workbook")
        about = child_of(self._root, "workbookPr")
        self._epoch = EPOCH_1904 if get(about, "date1904") in ("1", "true") else EPOCH
        self._strings = list(self._shared())
        self._formats = [*self._styles()]

    def _part(self, kind: str) -> str:
        return next((target for relation, target in self._relations.values() if relation == kind), "")

    def _shared(self) -> Iterator[str]:
        if (name := self._part("sharedStrings")) in self._package:
            for _, element in iterparse(io.BytesIO(self._package.read(name))):
                if tag_of(element) == "si":
                    yield _text_of(element)
                    element.clear()

    def _styles(self) -> Iterator[NumberFormat]:
        """Yield the number format of each style."""
        root = self._package.part(self._part("styles"))
        own: dict[int, str] = {}
        for element in root if root is not None else ():
            if tag_of(element) == "numFmts":
                own = {int_of(get(format, "numFmtId"), 0): get(format, "formatCode") for format in element}
            elif tag_of(element) == "cellXfs":
                known: dict[int, NumberFormat] = {}
                for style in element:
                    number = int_of(get(style, "numFmtId"), 0)
                    if number not in known:
                        known[number] = NumberFormat(own.get(number, BUILT_IN.get(number, "")))
                    yield known[number]

    def read(self) -> None:
        sheets = child_of(self._root, "sheets")
        for sheet in sheets if sheets is not None else ():
            kind, target = self._relations.get(_id_of(sheet), ("", ""))
            if kind != "worksheet" or target not in self._package:  # a chart
                continue
            rows = self._rows(self._package.read(target))
            if get(sheet, "state") in ("hidden", "veryHidden"):
                for row in rows:
                    self._outline.leave_out("hidden", " ".join(row.values()))
                continue
            add_sheet(self._outline, get(sheet, "name"), rows)
            for inner, part in self._package.relations(target).values():
                self._add_part(inner, part)

    def _add_part(self, kind: str, name: str) -> None:
        """Add the text boxes of a sheet, and count its comments."""
        if kind not in ("comments", "threadedComment", "drawing") or (root := self._package.part(name)) is None:
            return
        for paragraph in root.iter():
            if kind != "drawing" and tag_of(paragraph) in ("comment", "threadedComment"):
                self._outline.leave_out("comments", " ".join(paragraph.itertext()))
            elif kind == "drawing" and tag_of(paragraph) == "p":
                self._outline.add_block(_text_of(paragraph))

    def _rows(self, data: bytes) -> Iterator[Row]:
        """Yield the rows of a sheet. One empty row stands for any number of missing rows."""
        last = 0
        parent: Element | None = None
        for event, element in iterparse(io.BytesIO(data), ("start", "end")):
            tag = tag_of(element)
            if event == "start":
                parent = element if tag == "sheetData" else parent
            elif tag == "row":
                number = int_of(get(element, "r"), last + 1)
                if number > last + 1:
                    yield {}
                last = number
                yield self._row(element)
                if parent is not None:
                    parent.clear()

    def _row(self, element: Element) -> Row:
        row: dict[int, str] = {}
        column = -1
        for cell in element:
            place = COLUMN.match(get(cell, "r"))
            column = _column(place[1]) if place else column + 1
            if text := self._cells.taken(self._text(cell)):
                row[column] = text
        return dict(sorted(row.items()))

    def _text(self, cell: Element) -> str:
        """Return a cell as Excel displays it.

        For a cell with a formula, return the formula's last result, or the formula if it has no result.
        """
        kind = cell.get("t", "n")
        value = child_of(cell, "v")
        text = (value.text or "") if value is not None else ""
        if kind == "inlineStr":
            return _text_of(cell)
        if kind == "s":
            number = int_of(text, -1)
            return self._strings[number] if 0 <= number < len(self._strings) else ""
        if kind == "b":
            return {"1": "TRUE", "0": "FALSE"}.get(text, text)
        if not text:
            formula = child_of(cell, "f")
            return f"={formula.text}" if formula is not None and formula.text else ""
        if kind != "n":
            return text.replace("T00:00:00", "") if kind == "d" else text
        style = int_of(cell.get("s", ""), 0)
        try:
            number = float(text)
        except ValueError:
            return text
        return self._formats[style].shown(number, self._epoch) if 0 <= style < len(self._formats) else plain(number)


def _id_of(sheet: Element) -> str:
    """Return the id of a sheet's relation, from the attribute `id` that has a namespace.

    An attribute `id` without a namespace, which sheets also have in some files, is ignored.
    """
    return next((value for key, value in sheet.attrib.items() if key.endswith("}id")), "")


def _text_of(element: Element) -> str:
    """Return the text of a string or a paragraph, without its phonetic readings."""
    parts: list[str] = []
    for inner in element:
        if tag_of(inner) == "t":
            parts.append(inner.text or "")
        elif tag_of(inner) in ("r", "is", "fld"):
            parts.append(_text_of(inner))
        elif tag_of(inner) == "br":
            parts.append(" ")
    return "".join(parts)


def _column(letters: str) -> int:
    number = 0
    for letter in letters:
        number = 26 * number + ord(letter) - 64
    return number - 1


# ---- Numbers as they are shown. -----------------------------------------------------------------------------------------

BUILT_IN = {
    **{1: "0", 2: "0.00", 3: "#,##0", 4: "#,##0.00", 9: "0%", 10: "0.00%", 11: "0.00E+00"},
    **{14: "yyyy-mm-dd", 15: "d-mmm-yy", 16: "d-mmm", 17: "mmm-yy", 18: "h:mm", 19: "h:mm:ss", 20: "h:mm", 21: "h:mm:ss"},
    **{22: "yyyy-mm-dd h:mm", 45: "mm:ss", 46: "[h]:mm:ss", 47: "mm:ss"},
    **dict.fromkeys((37, 38, 41, 42), "#,##0"),
    **dict.fromkeys((39, 40, 43, 44), "#,##0.00"),
    **dict.fromkeys((*range(27, 32), 36, *range(50, 59)), "yyyy-mm-dd"),
    **dict.fromkeys(range(32, 36), "h:mm:ss"),
    48: "0.0E+0",
}
"""Built-in formats, whose codes are not in the file. Excel displays dates and money by the country of the reader."""

TOKEN = re.compile(
    r'"(?P<quoted>[^"]*)"|\\(?P<escaped>.)|\[\$(?P<money>[^\]-]*)[^\]]*\]|\[(?P<elapsed>[hms]+)\]|\[[^\]]*\]|[_*].'
    r"|(?P<general>General)|(?P<digits>[0#?][0#?,]*(?:\.[0#?]*)?,*|\.[0#?]+)|(?P<power>E[+-][0#?]+)|(?P<percent>%)"
    r"|(?P<day>[yYdDgGeE]+)|(?P<clock>[hHsS]+|AM/PM)|(?P<month>[mM]+)|(?P<other>.)",
    re.S,
)


class NumberFormat:
    """A parsed format code: a date, a time, or a number with its decimals and the text around it."""

    def __init__(self, code: str) -> None:
        found = [(match.lastgroup or "", match[match.lastgroup or 0]) for match in TOKEN.finditer(_positive(code))]
        kinds = {kind for kind, _ in found}
        self._is_elapsed = "elapsed" in kinds
        self._has_day = "day" in kinds or ("month" in kinds and not kinds & {"clock", "elapsed"})
        self._has_clock = bool(kinds & {"clock", "elapsed"})
        self._is_percent, self._is_power = "percent" in kinds, "power" in kinds
        numbers = [text for kind, text in found if kind == "digits"]
        digits = numbers[0] if len(numbers) == 1 else ""  # several are a fraction, or a number with special groups
        self._width = digits.partition(".")[0].count("0")
        self._decimals = min(sum(mark in "0#?" for mark in digits.partition(".")[2]), PRECISION) if digits else None
        self._is_fixed = digits.partition(".")[2].count("0") == self._decimals
        self._has_groups = "," in digits.partition(".")[0].rstrip(",")
        self._scale = 1000.0 ** (len(digits) - len(digits.rstrip(",")))
        at = next((at for at, (kind, _) in enumerate(found) if kind in ("digits", "general")), len(found))
        around = {"quoted", "escaped", "money", "other"}
        self._has_number = digits != "" or "general" in kinds
        self._before = "".join(text for kind, text in found[:at] if kind in around)
        self._after = "".join(text for kind, text in found[at:] if kind in around)

    def shown(self, number: float, epoch: datetime) -> str:
        """Return a number as the format displays it. Dates always have the form of ISO 8601."""
        if (self._has_day or self._has_clock) and 0 <= number <= LAST_DAY:
            moment = epoch + timedelta(seconds=round(number * 86400))
            if self._is_elapsed or (number < 1 and not self._has_day):
                return duration(timedelta(seconds=round(number * 86400)))
            return moment.date().isoformat() if not self._has_clock else shown(moment if self._has_day else moment.time())
        if not self._has_number or abs(number) >= 1e15:
            return plain(number)
        sign = "-" if number < 0 else ""
        if self._decimals is None:
            return f"{sign}{self._before}{plain(abs(number))}{self._after}".strip()
        value = abs(number) * (100 if self._is_percent else 1) / self._scale
        text = f"{value:.{self._decimals}e}" if self._is_power else f"{value:{',' * self._has_groups}.{self._decimals}f}"
        if not self._is_fixed and not self._is_power:
            text = text.rstrip("0").rstrip(".")
        if self._width > 1 and not self._has_groups and not self._is_power:
            text = "0" * (self._width - len(text.partition(".")[0])) + text
        return f"{sign}{self._before}{text}{'%' * self._is_percent}{self._after}".strip()


def _positive(code: str) -> str:
    """Return a format's section for positive numbers. The section ends at the first semicolon that is not quoted."""
    for match in TOKEN.finditer(code):
        if match["other"] == ";":
            return code[: match.start()]
    return code


def plain(number: float) -> str:
    """Return a number without a format, rounded so that binary rounding errors do not show."""
    return f"{number:.{PRECISION}g}"


def duration(span: timedelta) -> str:
    minutes, seconds = divmod(span.days * 86400 + span.seconds, 60)
    return f"{minutes // 60}:{minutes % 60:02}" + (f":{seconds:02}" if seconds else "")


def shown(value: object) -> str:
    """Return a cell's value as text."""
    match value:
        case bool():
            return str(value).upper()
        case float():
            return plain(value)
        case datetime() if value.time() == time():
            return value.date().isoformat()
        case datetime():
            return value.isoformat(" ", "seconds").removesuffix(":00")
        case time():
            return value.isoformat("seconds").removesuffix(":00")
        case date():
            return value.isoformat()
        case timedelta():
            return duration(value)
        case _:
            return str(value)


# ---- XLS and XLSB. ------------------------------------------------------------------------------------------------------


def read_xls(data: bytes, outline: Outline) -> None:
    """Add the sheets of an old Excel workbook, or HTML or rows of text in a file with the suffix of such a workbook."""
    if data.startswith((OLD_FORMAT, ZIP)):
        read_calamine(data, outline)
    elif (text := decode(data, label_of(data))).lstrip()[:1] == "<":
        read_markup(text, outline)
    else:
        read_table(data, outline)


def read_calamine(data: bytes, outline: Outline) -> None:
    """Add the sheets of a workbook of any format that calamine reads. Raises Unreadable."""
    cells = CellLetters()
    if data.startswith(OLD_FORMAT) and ENCRYPTED in data:
        raise Unreadable(LOCKED)
    with broken_as("an Excel workbook"):
        if data.startswith(ZIP):
            Package(data, [0]).check()
        try:
            book = calamine.load_workbook(io.BytesIO(data))
        except calamine.PasswordError:
            raise Unreadable(LOCKED) from None
        for about in book.sheets_metadata:
            if about.typ != calamine.SheetTypeEnum.WorkSheet:
                continue
            sheet = book.get_sheet_by_name(about.name)
            rows = (
                {column: text for column, value in enumerate(row) if value != "" and (text := cells.taken(shown(value)))}
                for row in sheet.iter_rows()
            )
            if about.visible == calamine.SheetVisibleEnum.Visible:
                add_sheet(outline, about.name, rows)
                continue
            for row in rows:
                outline.leave_out("hidden", " ".join(row.values()))
