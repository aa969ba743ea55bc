"""Reads Word documents as headings and blocks.

Text in unknown elements is read. Only elements that are known not to be text of the document, such as
properties and comments, are left out. Letters of comments, and of other left-out text that a person wrote, are counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from xml.etree.ElementTree import Element

from .html import MAX_COLUMNS, numeral, read_html
from .markdown import read_text
from .outline import Outline, Unreadable
from .package import DRAWN, OLD_FORMAT, Package, broken_as, child_of, get, int_of, is_on, lines_of, tag_of, val

MAIN = "word/document.xml"
MAX_INSIDE = 3  # nested documents
MAX_CHAIN = 20  # styles in a chain of parents
MAX_LEVEL = 8  # the deepest level of a list, from 0
HEADING_STYLE = re.compile(r"heading (\d)")
CONTENTS_STYLE = re.compile(r"toc \d")
CODE_STYLES = {"code", "source code", "html preformatted", "preformatted text"}
LEVEL_TEXT = 80  # characters of an item's marker
NUMERALS = {"lowerLetter": "a", "upperLetter": "A", "lowerRoman": "i", "upperRoman": "I"}
CODE = re.compile("[0-9A-Fa-f]{1,8}")  # of a symbol, in hexadecimal digits
PLACE = re.compile(r"%([1-9])")  # the place of a level's number in a marker
PROPERTIES = {"pPr", "rPr", "tblPr", "tblGrid", "trPr", "tcPr", "sdtPr", "sectPr", "instrText", "delInstrText", "ffData"}
GREEK = {0x41: "ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ", 0x61: "αβχδεφγηιϕκλμνοπθρστυϖωξψζ"}  # the font Symbol, by first code
WINGDINGS = {0x6F: "☐", 0xA8: "☐", 0xFE: "☒", 0xFD: "☒", 0x78: "☒", 0xFC: "✓", 0xE0: "→", 0xA7: "▪", 0xB7: "•"}


def read_docx(data: bytes, outline: Outline) -> None:
    """Add the headings and blocks of a Word document. Raises Unreadable."""
    _read(data, outline, [0], 0)


def _read(data: bytes, outline: Outline, used: list[int], depth: int) -> None:
    """Add a document.

    used: the number of bytes unpacked so far, as the only item of a list.
    depth: the number of documents that contain this one.
    """
    if data.startswith(OLD_FORMAT):
        raise Unreadable("it is encrypted, or in Word's old format: save it as DOCX, without a password")
    with broken_as("a Word document"):
        package = Package(data, used)
        _Document(package, package.main_part(MAIN, "a Word document"), outline, depth).read()


# ---- Styles, and the numbers of headings and items. ---------------------------------------------------------------------


@dataclass(slots=True)
class _Style:
    """A style with its inherited properties.

    level: the level of a heading, from 1; 0 for prose; None if no style sets it.
    num, num_level: the id of its list, and the level in the list.
    """

    name: str = ""
    level: int | None = None
    num: str | None = None
    num_level: int | None = None
    is_hidden: bool = False


class _Styles:
    def __init__(self, root: Element | None) -> None:
        styles = root if root is not None else ()
        self._elements = {get(style, "styleId"): style for style in styles if tag_of(style) == "style"}
        self._known: dict[str, _Style] = {}

    def __getitem__(self, id: str) -> _Style:
        if id not in self._known:
            self._known[id] = self._style(id)
        return self._known[id]

    def _style(self, id: str) -> _Style:
        style = _Style(name=val(self._elements.get(id), "name").lower())
        for _ in range(MAX_CHAIN):
            element = self._elements.get(id)
            if element is None:
                break
            about = child_of(element, "pPr")
            level = _heading_level(val(element, "name").lower(), about)
            style.level = level if style.level is None else style.level
            numbers = child_of(about, "numPr")
            if numbers is not None and style.num is None:
                style.num, style.num_level = _numbers(numbers)
            style.is_hidden = style.is_hidden or is_on(child_of(element, "rPr"), "vanish")
            id = val(element, "basedOn")
        return style


def _heading_level(name: str, about: Element | None) -> int | None:
    """Return the heading level that a style's name or properties set: 0 for prose, None if they set none."""
    if found := HEADING_STYLE.fullmatch(name):
        return int(found[1])
    level = int_of(val(about, "outlineLvl"), -1)
    return None if level < 0 else level + 1 if level <= MAX_LEVEL else 0


def _numbers(element: Element) -> tuple[str | None, int | None]:
    """Return the id of a list and the level in it, each None if it is missing."""
    level = int_of(val(element, "ilvl"), -1)
    return val(element, "numId") or None, min(level, MAX_LEVEL) if level >= 0 else None


@dataclass(frozen=True, slots=True)
class _Level:
    """A level of a list. text: the marker, with `%1` in place of the first level's number, and so on."""

    format: str
    text: str
    start: int
    style: str
    is_legal: bool


class _Numbering:
    """Counts the items of all lists."""

    def __init__(self, root: Element | None, styles: _Styles) -> None:
        self._styles = styles
        self._levels: dict[str, dict[int, _Level]] = {}  # by abstract list
        self._links: dict[str, str] = {}
        self._lists: dict[str, tuple[str, dict[int, int]]] = {}  # by list: its abstract list, and first numbers by level
        self._counts: dict[str, dict[int, int]] = {}
        self._started: set[tuple[str, int]] = set()
        for element in root if root is not None else ():
            if tag_of(element) == "abstractNum":
                id = get(element, "abstractNumId")
                self._levels[id] = dict(map(_level, (level for level in element if tag_of(level) == "lvl")))
                self._links[id] = val(element, "numStyleLink")
            elif tag_of(element) == "num":
                changes = (change for change in element if tag_of(change) == "lvlOverride")
                starts = {int_of(get(change, "ilvl"), 0): int_of(val(change, "startOverride"), -1) for change in changes}
                starts = {level: start for level, start in starts.items() if start >= 0}
                self._lists[get(element, "numId")] = val(element, "abstractNumId"), starts

    def next(self, id: str, level: int | None, style: str) -> tuple[str, int] | None:
        """Return the marker and the level of a list's next item; None if the list or the level is unknown."""
        abstract, starts = self._lists.get(id, ("", {}))
        for _ in range(MAX_CHAIN):
            linked = self._styles[self._links.get(abstract, "")].num if self._links.get(abstract) else None
            if linked is None:
                break
            abstract = self._lists.get(linked, ("", {}))[0]
        levels = self._levels.get(abstract, {})
        if level is None:
            level = next((number for number, own in levels.items() if own.style == style), 0) if style else 0
        own = levels.get(level)
        if own is None:
            return None
        counts = self._counts.setdefault(abstract, {})
        if level in starts and (id, level) not in self._started:
            counts[level] = starts[level] - 1
        self._started.add((id, level))
        counts[level] = counts.get(level, own.start - 1) + 1
        for deeper in [number for number in counts if number > level]:
            del counts[deeper]
        if own.format == "bullet":
            return "-", level
        return PLACE.sub(lambda place: _number(int(place[1]) - 1, levels, counts, own.is_legal), own.text).strip(), level


def _number(at: int, levels: dict[int, _Level], counts: dict[int, int], is_legal: bool) -> str:
    if at not in levels:
        return ""
    number, format = counts.get(at, levels[at].start), levels[at].format
    if format in ("none", "bullet"):
        return ""
    if format == "decimalZero":
        return f"{number:02}"
    return numeral(number, "1" if is_legal else NUMERALS.get(format, "1"))


def _level(element: Element) -> tuple[int, _Level]:
    level = _Level(
        format=val(element, "numFmt"),
        text=val(element, "lvlText")[:LEVEL_TEXT],
        start=int_of(val(element, "start"), 1),
        style=val(element, "pStyle"),
        is_legal=is_on(element, "isLgl"),
    )
    return min(max(int_of(get(element, "ilvl"), 0), 0), MAX_LEVEL), level


# ---- The text. ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Text:
    """The text of a paragraph or a cell.

    readings: ruby readings (pronunciations) that are not added yet.
    notes: the notes that the text refers to, with their numbers.
    boxes: the text boxes and drawings in it.
    """

    parts: list[str] = field(default_factory=list)
    readings: list[str] = field(default_factory=list)
    notes: list[tuple[int, Element]] = field(default_factory=list)
    boxes: list[Element] = field(default_factory=list)

    def add(self, text: str) -> None:
        if text:
            self.end_ruby()
            self.parts.append(text)

    def end_ruby(self) -> None:
        """Add the waiting ruby readings, in parentheses, after a whole word, so that they do not split the word."""
        if self.readings:
            self.parts.append(f"({''.join(self.readings)})")
            self.readings.clear()

    def __str__(self) -> str:
        self.end_ruby()
        return "".join(self.parts)


class _Document:
    def __init__(self, package: Package, name: str, outline: Outline, depth: int) -> None:
        self._package, self._name, self._outline, self._depth = package, name, outline, depth
        self._relations = package.relations(name)
        self._styles = _Styles(self._part("styles"))
        self._numbering = _Numbering(self._part("numbering"), self._styles)
        self._notes = {kind: self._named(f"{kind}s") for kind in ("footnote", "endnote")}
        self._comments = self._named("comments")
        self._numbers: dict[tuple[str, str], int] = {}  # of the notes so far, by kind and id
        self._title = 0  # 1 in a document with a title, so that headings are below it
        self._lines: list[str] = []  # lines of the current list or code
        self._is_code = False
        self._waiting = _Text()  # notes and boxes to add after the list or code
        self._carried: _Text | None = None  # the text of a paragraph that the next paragraph continues

    def _part(self, kind: str) -> Element | None:
        """Return a part of the document by its kind, such as `styles`."""
        named = [target for relation, target in self._relations.values() if relation == kind]
        return self._package.part(named[0] if named else f"word/{kind}.xml")

    def _named(self, kind: str) -> dict[str, Element]:
        root = self._part(kind)
        return {get(element, "id"): element for element in root} if root is not None else {}

    def read(self) -> None:
        root = self._package.part(self._name)
        if root is None or tag_of(root) != "document":
            raise Unreadable("it is not a Word document")
        used = {get(style, "val") for style in root.iterfind(".//{*}pStyle")}
        self._title = int(any(self._styles[id].name == "title" for id in used))
        self._add_all(root)
        self._flush()
        if self._carried is not None:
            self._outline.add_block(lines_of(str(self._carried)))
        self._add_edges(root)

    def _add_edges(self, root: Element) -> None:
        """Add the headers and footers of all sections, each text once, after all other text."""
        kinds = ("header", "footer")
        names = [
            self._relations.get(get(edge, "id"), ("", ""))[1]
            for kind in kinds
            for edge in root.iterfind(f".//{{*}}{kind}Reference")
        ]
        seen: set[str] = set()
        for name in dict.fromkeys(names):
            edge = self._package.part(name)
            text = self._text_of(edge) if edge is not None else ""
            if text in seen:
                self._outline.leave_out("running_heads", text)
            elif text:
                self._outline.add_block(text)
            seen.add(text)
        self._add_waiting()

    def _text_of(self, element: Element) -> str:
        """Return the text of an element as one line, even if it has several paragraphs."""
        text = _Text()
        self._collect(element, text)
        self._wait_for(text)
        return " ".join(str(text).split())

    def _add_all(self, element: Element) -> None:
        """Add the paragraphs and tables in an element, at any depth."""
        for child in element:
            tag = tag_of(child)
            if tag == "p":
                self._add_paragraph(child)
            elif tag == "tbl":
                self._add_table(child)
            elif tag == "altChunk":
                self._add_file(child)
            elif tag == "AlternateContent":
                self._add_all(_alternative(child))
            elif tag in ("del", "moveFrom"):
                self._outline.leave_out("deleted", "".join(child.itertext()))
            elif tag not in PROPERTIES:
                self._add_all(child)

    def _add_paragraph(self, element: Element) -> None:
        about = child_of(element, "pPr")
        id = val(about, "pStyle")
        style = self._styles[id]
        marker = self._marker(about)
        text, self._carried = self._carried or _Text(), None
        self._collect(element, text)
        is_initial = get(child_of(about, "framePr"), "dropCap") in ("drop", "margin")
        if is_initial or child_of(child_of(about, "rPr"), "del") is not None:
            if is_initial and text.parts:
                text.parts[-1] = text.parts[-1].rstrip()
            self._carried = text
            return
        raw = str(text)
        level = _heading_level("", about)
        level = style.level if level is None else level
        if style.name in CODE_STYLES:
            self._add_line(raw, is_code=True)
        elif CONTENTS_STYLE.fullmatch(style.name):
            self._outline.leave_out("contents", raw)
        elif not raw.strip():
            self._flush()
        elif style.name == "title" or level:
            self._flush()
            number = f"{marker[0]} " if marker and marker[0] != "-" else ""
            self._outline.add_heading(1 if style.name == "title" else (level or 0) + self._title, number + raw)
        elif marker:
            indent, number = "  " * marker[1], marker[0] and f"{marker[0]} "
            self._add_line(indent + number + lines_of(raw).replace("\n", f"\n  {indent}"))
        else:
            self._flush()
            lines = lines_of(raw)
            self._outline.add_block(lines, has_lines="\n" in lines)
        self._wait_for(text)
        if not self._lines:
            self._add_waiting()

    def _marker(self, about: Element | None) -> tuple[str, int] | None:
        """Return the marker and the level of a list item; None for any other paragraph."""
        id = val(about, "pStyle")
        style = self._styles[id]
        numbers = child_of(about, "numPr")
        num, level = _numbers(numbers) if numbers is not None else (None, None)
        if num is None:
            num, level = style.num, style.num_level if level is None else level
        return self._numbering.next(num, level, id) if num is not None and num != "0" else None

    def _add_line(self, text: str, is_code: bool = False) -> None:
        if self._is_code != is_code:
            self._flush()
        self._is_code = is_code
        self._lines.append(text)

    def _flush(self) -> None:
        """Add the current list or code, then its notes and boxes."""
        if self._lines:
            self._outline.add_block("\n".join(self._lines), has_lines=True)
            self._lines = []
        self._add_waiting()

    def _wait_for(self, text: _Text) -> None:
        self._waiting.notes += text.notes
        self._waiting.boxes += text.boxes

    def _add_waiting(self) -> None:
        while self._waiting.notes or self._waiting.boxes:
            waiting, self._waiting = self._waiting, _Text()
            for number, note in waiting.notes:
                self._outline.add_block(f"[{number}] {self._text_of(note)}")
            for box in waiting.boxes:
                self._add_all(box)
                if self._lines:
                    self._outline.add_block("\n".join(self._lines), has_lines=True)
                    self._lines = []

    # ---- tables --------------------------------------------------------------------------------------------------------

    def _add_table(self, element: Element) -> None:
        """Add a table as rows with a bar between cells. The cells of a table with a single column are added as text."""
        self._flush()
        rows = [(row, list(_inside(row, "tc"))) for row in _inside(element, "tr")]
        if all(len(cells) <= 1 for _, cells in rows):
            for _, cells in rows:
                for cell in cells:
                    self._add_all(cell)
            self._flush()
            return
        lines = [line for line in (self._row(row, cells) for row, cells in rows) if line.strip(" |")]
        self._outline.add_block("\n".join(lines), has_lines=True, head="".join(lines[:1]))
        self._add_waiting()

    def _row(self, row: Element, cells: list[Element]) -> str:
        about = child_of(row, "trPr")
        if child_of(about, "del") is not None:
            self._outline.leave_out("deleted", "".join(row.itertext()))
            return ""
        texts = [""] * min(max(int_of(val(about, "gridBefore"), 0), 0), MAX_COLUMNS)
        for cell in cells:
            texts.append(self._text_of(cell))
            span = int_of(val(child_of(cell, "tcPr"), "gridSpan"), 1)
            texts += [""] * min(max(span - 1, 0), MAX_COLUMNS - len(texts))
        return " | ".join(texts).rstrip(" |")

    def _add_file(self, element: Element) -> None:
        """Add a file of another format that is embedded in the document."""
        name = self._relations.get(get(element, "id"), ("", ""))[1]
        if name not in self._package:
            return
        self._flush()
        data, suffix = self._package.read(name), PurePath(name).suffix.lower()
        if suffix in (".htm", ".html", ".xhtml"):
            read_html(data, self._outline)
        elif suffix == ".txt":
            read_text(data, self._outline)
        elif suffix == ".docx" and self._depth < MAX_INSIDE:
            _read(data, self._outline, self._package.used, self._depth + 1)
        else:
            self._outline.leave_out("embedded_files", data.decode("latin-1"))

    # ---- in a line -----------------------------------------------------------------------------------------------------

    def _collect(self, element: Element, text: _Text) -> None:
        """Collect the text in an element."""
        for child in element:
            tag = tag_of(child)
            if tag == "t":
                text.add(child.text or "")
            elif tag == "r" and self._is_hidden(child):
                self._outline.leave_out("hidden", "".join(child.itertext()))
            elif tag in PROPERTIES:
                continue
            elif tag in ("del", "moveFrom"):
                self._outline.leave_out("deleted", "".join(child.itertext()))
            elif collect := COLLECT.get(tag):
                collect(self, child, text)
            else:
                self._collect(child, text)

    def _is_hidden(self, run: Element) -> bool:
        about = child_of(run, "rPr")
        if about is None:
            return False
        if child_of(about, "vanish") is not None:
            return is_on(about, "vanish")
        style = val(about, "rStyle")
        return bool(style) and self._styles[style].is_hidden

    def _collect_paragraph(self, element: Element, text: _Text) -> None:
        marker = self._marker(child_of(element, "pPr"))
        text.add(f" {marker[0]} " if marker else " ")
        self._collect(element, text)

    def _collect_break(self, element: Element, text: _Text) -> None:
        text.add("\n" if get(element, "type") in ("", "textWrapping") else " ")

    def _collect_symbol(self, element: Element, text: _Text) -> None:
        font, char = get(element, "font").lower(), get(element, "char")
        code = int(char, 16) & 0xFFFF if CODE.fullmatch(char) else 0
        code = code - 0xF000 if code >= 0xF000 else code
        if font == "symbol":
            letter = next((letters[code - first] for first, letters in GREEK.items() if 0 <= code - first < 26), "")
            letter = letter or ("•" if code == 0xB7 else "")
        else:
            letter = WINGDINGS.get(code, "") if font.startswith("wingdings") else chr(code) if 32 < code < 0xD800 else ""
        if letter:
            text.add(letter)
        else:
            self._outline.leave_out("symbols", "?")

    def _collect_ruby(self, element: Element, text: _Text) -> None:
        inner, readings = _Text(), _Text()
        for child in element:
            if tag_of(child) == "rt":
                self._collect(child, readings)
            else:
                self._collect(child, inner)
        text.parts.append(str(inner))
        text.readings.append(str(readings).strip())

    def _collect_alternative(self, element: Element, text: _Text) -> None:
        self._collect(_alternative(element), text)

    def _collect_note(self, element: Element, text: _Text) -> None:
        kind, id = tag_of(element).removesuffix("Reference"), get(element, "id")
        note = self._notes[kind].get(id)
        if note is None:
            return
        if (kind, id) not in self._numbers:
            self._numbers[kind, id] = len(self._numbers) + 1
            text.notes.append((self._numbers[kind, id], note))
        text.add(f"[{self._numbers[kind, id]}]")

    def _collect_comment(self, element: Element, text: _Text) -> None:
        if (comment := self._comments.pop(get(element, "id"), None)) is not None:
            self._outline.leave_out("comments", "".join(comment.itertext()))

    def _collect_drawing(self, element: Element, text: _Text) -> None:
        text.boxes += self._package.drawn(element, self._relations)

    def _collect_formula(self, element: Element, text: _Text) -> None:
        """Collect a formula in one line, such as `a/b` for a fraction."""
        before, between, after = FORMULAS[tag_of(element)]
        about = next((child for child in element if tag_of(child).endswith("Pr")), None)
        if tag_of(element) == "d":
            before, after = val(about, "begChr") or "(", val(about, "endChr") or ")"
        elif tag_of(element) == "nary":
            before = val(about, "chr") or "∫"
        text.add(before)
        parts = [child for child in element if not tag_of(child).endswith("Pr")]
        for at, part in enumerate(parts):
            mark = {"sub": "_", "sup": "^"}.get(tag_of(part), between)
            text.add(mark if at or tag_of(part) in ("sub", "sup") else "")
            self._collect(part, text)
        text.add(after)


FORMULAS = {
    "f": ("", "/", ""),
    "sSup": ("", "", ""),
    "sSub": ("", "", ""),
    "sSubSup": ("", "", ""),
    "rad": ("√(", "", ")"),
    "d": ("(", ", ", ")"),
    "nary": ("∫", " ", ""),
}
"""The signs before, between and after the parts of each formula."""

COLLECT = {
    "p": _Document._collect_paragraph,
    "br": _Document._collect_break,
    "cr": lambda self, element, text: text.add("\n"),
    "tab": lambda self, element, text: text.add("\t"),
    "ptab": lambda self, element, text: text.add("\t"),
    "noBreakHyphen": lambda self, element, text: text.add("-"),
    "sym": _Document._collect_symbol,
    "ruby": _Document._collect_ruby,
    "AlternateContent": _Document._collect_alternative,
    "footnoteReference": _Document._collect_note,
    "endnoteReference": _Document._collect_note,
    "commentReference": _Document._collect_comment,
    **dict.fromkeys(DRAWN, _Document._collect_drawing),
    "txbxContent": lambda self, element, text: text.boxes.append(element),
    **dict.fromkeys(FORMULAS, _Document._collect_formula),
}
"""Elements with a reader of their own. In all other elements, the text is collected."""


def _alternative(element: Element) -> Element:
    """Return the first of several versions of the same content."""
    return next(iter(element), element) if len(element) else element


def _inside(element: Element, name: str) -> Iterator[Element]:
    """Yield the rows of a table or the cells of a row.

    The rows or cells may be inside other elements, such as content controls.
    """
    for child in element:
        if tag_of(child) == name:
            yield child
        elif tag_of(child) not in PROPERTIES and tag_of(child) not in ("p", "tbl", "tr", "tc"):
            yield from _inside(child, name)
