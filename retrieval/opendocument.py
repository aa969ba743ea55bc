"""Reads OpenDocument texts, slides and sheets, from a ZIP file or from one XML file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element

from .html import MAX_COLUMNS, numeral
from .outline import BETWEEN_CELLS, Outline, Unreadable
from .package import Package, broken_as, child_of, get, int_of, lines_of, parse, tag_of
from .sheets import LOCKED, CellLetters, Row, add_sheet

CONTENT, STYLES, MANIFEST = "content.xml", "styles.xml", "META-INF/manifest.xml"
KIND = "an OpenDocument file"
MAX_CHAIN = 20  # styles in a chain of parents
MAX_INDENT = 10  # list levels that are indented
MAX_SPACES = 1000  # spaces that one element may stand for
LAST_ROW, LAST_COLUMN = 1 << 20, 1 << 14  # the limits of a sheet
SPACES = re.compile(r"\s+")
INDEXES = {"table-of-content", "alphabetical-index", "illustration-index", "table-index", "object-index", "user-index"}
EDGES = {"footer": "running_heads", "header": "running_heads", "date-time": "running_heads", "page-number": "page_numbers"}
"""Frames that every slide repeats, mapped to the kind under which their text is counted."""
CODE_STYLES = {"preformatted_20_text", "source_20_code", "code"}
UNREAD = {
    "forms",
    "sequence-decls",
    "variable-decls",
    "user-field-decls",
    "shapes",
    "event-listeners",
    "desc",
    "binary-data",
}


def read_opendocument(data: bytes, outline: Outline) -> None:
    """Add the text, the slides or the sheets of a document. Raises Unreadable."""
    with broken_as(KIND):
        if data.startswith(b"PK"):
            package = Package(data, [0])
            manifest = package.part(MANIFEST)
            if manifest is not None and any(tag_of(element) == "encryption-data" for element in manifest.iter()):
                raise Unreadable(LOCKED)
            root, styles = package.part(CONTENT), package.part(STYLES)
        else:
            root = styles = parse(data)
        body = child_of(root, "body")
        if root is None or body is None:
            raise Unreadable(f"it is a ZIP file without {CONTENT}: not {KIND}")
        document = _OdfDocument(outline, [part for part in (root, styles) if part is not None])
        for part in body:
            document.read(part)


@dataclass(slots=True)
class _OdfText:
    """The text of a paragraph, the numbered notes in it, and the text boxes to add after it."""

    parts: list[str] = field(default_factory=list)
    notes: list[tuple[int, Element]] = field(default_factory=list)
    boxes: list[Element] = field(default_factory=list)

    def __str__(self) -> str:
        return "".join(self.parts)


class _OdfStyles:
    """The styles of a document: their names and parents, whether they are hidden, and the numbering of lists."""

    def __init__(self, roots: list[Element]) -> None:
        self._parents: dict[str, str] = {}
        self._hidden: set[str] = set()
        self._lists: dict[str, dict[int, tuple[str, str, int]]] = {}  # by level: numeral style, suffix, first number
        for element in (element for root in roots for group in root for element in group):
            name = get(element, "name")
            if tag_of(element) == "style":
                self._parents[name] = get(element, "parent-style-name")
                if any(
                    get(about, "display") in ("none", "false") or get(about, "visibility") == "hidden" for about in element
                ):
                    self._hidden.add(name)
            elif tag_of(element) == "list-style":
                self._lists[name] = dict(map(_level, element))

    def is_a(self, name: str, kinds: set[str]) -> bool:
        """Whether a style has one of these names, or is based on such a style."""
        for _ in range(MAX_CHAIN):
            if name.lower() in kinds:
                return True
            name = self._parents.get(name, "")
        return False

    def is_hidden(self, element: Element) -> bool:
        return get(element, "style-name") in self._hidden or get(element, "display") == "none"

    def level(self, name: str, depth: int) -> tuple[str, str, int]:
        return self._lists.get(name, {}).get(depth, ("", "", 1))


def _level(element: Element) -> tuple[int, tuple[str, str, int]]:
    """Return a list level (from 1), and its numeral style, suffix and first number. The style is empty for bullets."""
    kind = get(element, "num-format") if tag_of(element) == "list-level-style-number" else ""
    return int_of(get(element, "level"), 1), (kind, get(element, "num-suffix"), int_of(get(element, "start-value"), 1))


class _OdfDocument:
    def __init__(self, outline: Outline, roots: list[Element]) -> None:
        self._outline, self._roots = outline, roots
        self._styles = _OdfStyles(roots)
        self._num_notes = 0
        self._title = 0  # 1 after a title, so that headings are below it
        self._page: int | None = None  # the number of the current slide

    def read(self, part: Element) -> None:
        match tag_of(part):
            case "presentation" | "drawing":
                pages = (child for child in part if tag_of(child) == "page")
                for number, page in enumerate(pages, 1):
                    self._add_page(page, number)
            case "spreadsheet":
                cells = CellLetters()
                for table in (child for child in part if tag_of(child) == "table"):
                    self._add_sheet(table, cells)
            case _:
                self._add_all(part)
                self._add_edges()

    # ---- texts ---------------------------------------------------------------------------------------------------------

    def _add_all(self, element: Element) -> None:
        """Add the paragraphs, lists and tables in an element, at any depth."""
        code: list[str] = []
        for child in element:
            if tag_of(child) == "p" and self._styles.is_a(get(child, "style-name"), CODE_STYLES):
                code.append(self._line_of(child, keeps=True))
                continue
            if code:
                self._outline.add_block("\n".join(code), self._page, has_lines=True)
                code = []
            self._add(child)
        if code:
            self._outline.add_block("\n".join(code), self._page, has_lines=True)

    def _add(self, child: Element) -> None:
        tag = tag_of(child)
        if tag in ("p", "h"):
            self._add_paragraph(child)
        elif tag == "list" and not any(tag_of(inner) == "h" for inner in child.iter()):
            boxes = _OdfText()
            lines = list(self._items(child, get(child, "style-name"), 0, boxes))
            self._outline.add_block("\n".join(lines), self._page, has_lines=True)
            self._add_waiting(boxes)
        elif tag == "table":
            self._add_table(child)
        elif tag == "tracked-changes":
            self._outline.leave_out("deleted", _deleted(child))
        elif tag in INDEXES:
            self._outline.leave_out("contents", " ".join(child.itertext()))
        elif tag == "annotation":
            self._outline.leave_out("comments", " ".join(child.itertext()))
        elif tag not in UNREAD:
            if tag == "section" and self._styles.is_hidden(child):
                self._outline.leave_out("hidden", " ".join(child.itertext()))
            else:
                self._add_all(child)

    def _add_paragraph(self, element: Element) -> None:
        text = _OdfText()
        self._collect(element, text)
        raw = lines_of(str(text))
        if self._styles.is_a(get(element, "style-name"), {"title"}):
            self._outline.add_heading(1, raw, self._page)
            self._title = 1
        elif tag_of(element) == "h":
            self._outline.add_heading(int_of(get(element, "outline-level"), 1) + self._title, raw, self._page)
        else:
            self._outline.add_block(raw, self._page, has_lines="\n" in raw)
        self._add_waiting(text)

    def _add_waiting(self, text: _OdfText) -> None:
        """Add the notes and boxes of a paragraph after it."""
        for number, note in text.notes:
            self._outline.add_block(f"[{number}] {self._line_of(note)}", self._page)
        for box in text.boxes:
            self._add_all(box)

    def _items(self, element: Element, style: str, depth: int, boxes: _OdfText) -> Iterator[str]:
        """Yield the lines of a list, each item with its marker."""
        kind, suffix, number = self._styles.level(style, depth + 1)
        for item in element:
            if tag_of(item) not in ("list-item", "list-header"):
                continue
            number = int_of(get(item, "start-value"), number)
            indent = "  " * min(depth, MAX_INDENT)
            marker = "" if tag_of(item) == "list-header" else f"{numeral(number, kind)}{suffix} " if kind else "- "
            number += tag_of(item) == "list-item"
            for child in item:
                if tag_of(child) == "list":
                    yield from self._items(child, get(child, "style-name") or style, depth + 1, boxes)
                elif tag_of(child) in ("p", "h"):
                    text = _OdfText()
                    self._collect(child, text)
                    boxes.notes += text.notes
                    boxes.boxes += text.boxes
                    if line := " ".join(str(text).split()):
                        yield indent + marker + line
                        marker = "  " * bool(marker)

    def _add_table(self, table: Element) -> None:
        """Add a table as rows with a bar between cells."""
        lines: list[str] = []
        for row in _inside(table, "table-row"):
            texts: list[str] = []
            for cell in (cell for cell in row if tag_of(cell) in ("table-cell", "covered-table-cell")):
                texts.append(self._line_of(cell))
                repeated = int_of(get(cell, "number-columns-repeated"), 1) - 1
                texts += texts[-1:] * min(max(repeated, 0), MAX_COLUMNS - len(texts))
            lines.append(BETWEEN_CELLS.join(texts).rstrip(BETWEEN_CELLS))
        lines = [line for line in lines if line]
        self._outline.add_block("\n".join(lines), self._page, has_lines=True, head="".join(lines[:1]))

    def _add_edges(self) -> None:
        """Add the headers and footers of all pages, each text once, after all other text."""
        seen: set[str] = set()
        masters = (group for root in self._roots for group in root if tag_of(group) == "master-styles")
        for edge in (edge for group in masters for master in group for edge in master):
            if tag_of(edge).startswith(("header", "footer")):
                text = self._line_of(edge)
                if text in seen:
                    self._outline.leave_out("running_heads", text)
                else:
                    self._outline.add_block(text)
                seen.add(text)

    # ---- slides --------------------------------------------------------------------------------------------------------

    def _add_page(self, page: Element, number: int) -> None:
        if self._styles.is_hidden(page):
            self._outline.leave_out("hidden", " ".join(page.itertext()))
            return
        self._page = number
        titles = [self._line_of(frame) for frame in page if get(frame, "class") == "title"]
        self._outline.add_heading(1, " ".join(titles) or f"Slide {number}", number)
        for child in page:
            kind = get(child, "class")
            if kind in EDGES:
                self._outline.leave_out(EDGES[kind], " ".join(child.itertext()))
            elif tag_of(child) == "notes":
                notes = " ".join(self._line_of(frame) for frame in child if get(frame, "class") == "notes").strip()
                self._outline.add_block(f"Notes: {notes}" if notes else "", number)
            elif kind != "title":
                self._add(child)
        self._page = None

    # ---- sheets --------------------------------------------------------------------------------------------------------

    def _add_sheet(self, table: Element, cells: CellLetters) -> None:
        """Add a sheet. If the sheet is hidden, its letters are only counted."""
        rows = self._rows(table, cells)
        if self._styles.is_hidden(table):
            for row in rows:
                self._outline.leave_out("hidden", " ".join(row.values()))
        else:
            add_sheet(self._outline, get(table, "name"), rows)

    def _rows(self, table: Element, cells: CellLetters) -> Iterator[Row]:
        """Yield the rows of a sheet. One element may stand for many equal rows. Of equal empty rows, only one is yielded."""
        for element in _inside(table, "table-row"):
            row: dict[int, str] = {}
            column = 0
            times = min(max(int_of(get(element, "number-rows-repeated"), 1), 1), LAST_ROW)
            for cell in (cell for cell in element if tag_of(cell) in ("table-cell", "covered-table-cell")):
                wide = min(max(int_of(get(cell, "number-columns-repeated"), 1), 1), LAST_COLUMN)
                if text := self._line_of(cell):
                    row |= dict.fromkeys(range(column, column + wide), cells.taken(text, times * wide))
                column += wide
            for _ in range(times if row else 1):
                yield row

    # ---- in a line -----------------------------------------------------------------------------------------------------

    def _line_of(self, element: Element, keeps: bool = False) -> str:
        """Return the text of an element as one line, even if it has several paragraphs. keeps: keep spaces, as in code."""
        text = _OdfText()
        self._collect(element, text)
        inner = [self._line_of(part) for part in (*(note for _, note in text.notes), *text.boxes)]
        return str(text) if keeps else " ".join(" ".join([str(text), *inner]).split())

    def _collect(self, element: Element, text: _OdfText) -> None:
        """Collect the text in an element."""
        text.parts.append(SPACES.sub(" ", element.text or ""))
        for child in element:
            tag = tag_of(child)
            if tag == "span" and self._styles.is_hidden(child):
                self._outline.leave_out("hidden", "".join(child.itertext()))
            elif collect := COLLECT.get(tag):
                collect(self, child, text)
            elif tag not in UNREAD:
                self._collect(child, text)
            text.parts.append(SPACES.sub(" ", child.tail or ""))

    def _collect_spaces(self, element: Element, text: _OdfText) -> None:
        text.parts.append(" " * min(max(int_of(get(element, "c"), 1), 1), MAX_SPACES))

    def _collect_paragraph(self, element: Element, text: _OdfText) -> None:
        text.parts.append(" ")
        self._collect(element, text)

    def _collect_note(self, element: Element, text: _OdfText) -> None:
        self._num_notes += 1
        text.parts.append(f"[{self._num_notes}]")
        body = child_of(element, "note-body")
        if body is not None:
            text.notes.append((self._num_notes, body))

    def _collect_comment(self, element: Element, text: _OdfText) -> None:
        self._outline.leave_out("comments", " ".join(element.itertext()))

    def _collect_ruby(self, element: Element, text: _OdfText) -> None:
        base, reading = child_of(element, "ruby-base"), child_of(element, "ruby-text")
        if base is not None:
            self._collect(base, text)
        if reading is not None and (read := "".join(reading.itertext()).strip()):
            text.parts.append(f"({read})")


COLLECT: dict[str, Callable[[_OdfDocument, Element, _OdfText], None]] = {
    "s": _OdfDocument._collect_spaces,
    "tab": lambda self, element, text: text.parts.append("\t"),
    "line-break": lambda self, element, text: text.parts.append("\n"),
    "p": _OdfDocument._collect_paragraph,
    "h": _OdfDocument._collect_paragraph,
    "note": _OdfDocument._collect_note,
    "annotation": _OdfDocument._collect_comment,
    "annotation-end": lambda self, element, text: None,
    "ruby": _OdfDocument._collect_ruby,
    "text-box": lambda self, element, text: text.boxes.append(element),
}
"""Elements with a reader of their own. In all other elements, the text is collected."""


def _deleted(element: Element) -> str:
    """Return the deleted text of all changes, without their authors and times."""
    regions = (change for change in element.iter() if tag_of(change) == "deletion")
    return " ".join(
        text for region in regions for part in region if tag_of(part) != "change-info" for text in part.itertext()
    )


def _inside(element: Element, name: str) -> Iterator[Element]:
    """Yield the elements of one kind in a table, such as its rows. Row groups are searched; tables in cells are not."""
    for child in element:
        if tag_of(child) == name:
            yield child
        elif tag_of(child).startswith(("table-rows", "table-header-rows", "table-row-group")):
            yield from _inside(child, name)
