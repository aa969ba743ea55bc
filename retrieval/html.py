"""Reads HTML as headings and blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from selectolax.lexbor import LexborHTMLParser, LexborNode

from .charsets import decode, label_of
from .outline import Outline

HEADINGS = {f"h{level}": level for level in range(1, 7)}
UNREAD = {"script", "style", "template", "head", "rp", "annotation", "annotation-xml"}  # their content is no text
LEFT_OUT = {
    **dict.fromkeys(("nav", "footer"), "navigation"),
    **dict.fromkeys(("button", "select", "datalist"), "controls"),
    **dict.fromkeys(("noscript", "iframe", "object", "canvas", "audio", "video", "dialog"), "hidden"),
    "svg": "pictures",
}
"""Elements whose text is left out on purpose, mapped to the kind under which it is counted."""

HIDDEN = '[hidden]:not([hidden="until-found"]), [style*="display:none"], [style*="display: none"]'
LISTS = {"ul", "ol", "menu"}
ROW_GROUPS = {"thead", "tbody", "tfoot"}
CONTENT = {"main", "article", "section", "blockquote"}  # in these, footers are text
BLOCKS = {
    *("p", "div", "section", "article", "main", "body", "header", "aside", "blockquote", "figure", "figcaption", "address"),
    *("dl", "dt", "dd", "form", "fieldset", "details", "summary", "hr", "hgroup", "center", "table", "caption", "pre"),
    *("footer", "textarea"),
    *HEADINGS,
}
CELLS = {"td", "th"}
MAIN = ("main", "[role=main]", "article")
MOST = 2 / 3  # of a page's letters: if the main element has more, all other text is left out
MAX_INDENT = 12  # spaces before a line of a list
MAX_COLUMNS = 64  # columns that merged cells can fill
WHOLE = re.compile(r"\s*(-?\d{1,9})")
PERMALINK = re.compile(r"(?<!\s)\s*[¶#§]$")


def read_html(data: bytes, outline: Outline) -> None:
    """Add the headings and blocks of a web page."""
    read_markup(decode(data, label_of(data)), outline)


def read_markup(markup: str, outline: Outline) -> None:
    """Add the headings and blocks of decoded HTML."""
    tree = LexborHTMLParser(markup)
    if tree.body is None:
        return
    title = tree.css_first("title")
    if title is not None and not tree.css_matches("h1"):
        outline.add_heading(1, title.text(deep=True))
    page = _Page(outline, main=_main(tree), hidden={node.mem_id for node in tree.css(HIDDEN)})
    for node, is_start in _walk(tree.body, page.reads):
        if node.is_text_node:
            page.add_text(node.text_content or "")
        elif is_start:
            page.start(node)
        else:
            page.end(node)
    page.finish()


def _main(tree: LexborHTMLParser) -> int:
    """Return the identity of the main element of a page; 0 if it is not clear which element that is."""
    for selector in MAIN:
        found = tree.css(selector)
        if len(found) == 1:
            return found[0].mem_id
    return 0


def _walk(root: LexborNode, reads: Callable[[LexborNode], bool]) -> Iterator[tuple[LexborNode, bool]]:
    """Yield each element of a tree twice, at its start (True) and at its end (False), and each text once (True).

    reads: returns whether a node is read. If a node is not read, it is skipped with all nodes in it.

    The function is a loop, because recursion could overflow the stack on a deeply nested page.
    """
    node, depth = root, 0
    while True:
        is_read = reads(node)
        if is_read:
            yield node, True
        if is_read and (child := node.first_child) is not None:
            node, depth = child, depth + 1
            continue
        while True:
            if is_read and not node.is_text_node:
                yield node, False
            if depth == 0:
                return
            if (after := node.next) is not None:
                node = after
                break
            parent = node.parent
            assert parent is not None
            node, depth, is_read = parent, depth - 1, True


@dataclass(slots=True)
class _List:
    """A list.

    number: the number of the next item; None if items have no numbers.
    step: the difference from each number to the next.
    kind: the numeral style, as in the attribute `type`.
    """

    number: int | None = None
    step: int = 1
    kind: str = "1"

    def marker(self, node: LexborNode) -> str:
        """Return the marker of the next item."""
        if self.number is None:
            return "- "
        self.number = _whole(node, "value", self.number)
        marker = f"{numeral(self.number, self.kind)}. "
        self.number += self.step
        return marker


@dataclass(slots=True)
class _Table:
    """A table.

    column: the column of the next cell.
    bars: the number of bars in the row so far.
    spans: for each column that a merged cell fills, the number of rows that the cell still fills, including the current row.
    """

    column: int = 0
    bars: int = 0
    spans: dict[int, int] = field(default_factory=dict)

    def begin_row(self) -> None:
        self.column = self.bars = 0
        self.spans = {column: rows - 1 for column, rows in self.spans.items() if rows > 1}

    def begin_cell(self, node: LexborNode) -> str:
        """Return the bars before a cell: one for each column, including the columns of empty and merged cells."""
        while self.column in self.spans:
            self.column += 1
        bars, self.bars = " | " * (self.column - self.bars), self.column
        width = min(max(_whole(node, "colspan", 1), 1), max(MAX_COLUMNS - self.column, 1))
        rows = _whole(node, "rowspan", 1)
        if rows != 1:
            self.spans |= dict.fromkeys(range(self.column, min(self.column + width, MAX_COLUMNS)), rows or 1 << 16)
        self.column += width
        return bars


class _Page:
    """Collects the lines of the current block, and the blocks before it.

    A list is one block, with a dash or a number before each item. A table is one block, with bars between cells.
    """

    def __init__(self, outline: Outline, main: int, hidden: set[int]) -> None:
        """main: the identity of the main element; 0 for none. hidden: the identities of hidden elements."""
        self._outline, self._main, self._hidden = outline, main, hidden
        self._blocks: list[tuple[bool, int, str, bool]] = []  # each: is in main, heading level, text, has lines
        self._in_main = False
        self._lines: list[list[str]] = [[]]
        self._is_blank = True  # whether the line has no text yet, except an item's marker
        self._lists: list[_List] = []
        self._tables: list[_Table] = []
        self._pre = self._content = self._ruby = 0  # the number of open elements of each kind
        self._is_reading = False
        self._readings: list[str] = []  # ruby readings (pronunciations) that are not added yet
        self._has_lines = False

    def reads(self, node: LexborNode) -> bool:
        """Return whether a node is read. The text of a node that is left out on purpose is counted."""
        tag = node.tag or ""
        if tag in UNREAD:
            return False
        kind = LEFT_OUT.get(tag, "")
        if tag == "footer" and self._content:
            kind = ""
        if self._hidden and node.mem_id in self._hidden:
            kind = "hidden"
        if kind:
            self._outline.leave_out(kind, node.text(deep=True))
        return not kind

    def add_text(self, text: str) -> None:
        if self._is_reading:
            self._readings.append(text.strip())
            return
        if self._readings and not self._ruby and text:
            self._add_readings()
        self._is_blank = self._is_blank and not text.strip()
        if not self._pre:
            self._lines[-1].append(text)
            return
        first, *more = text.split("\n")
        self._lines[-1].append(first)
        self._lines += [[line] for line in more]

    def _add_readings(self) -> None:
        """Add the waiting ruby readings, in parentheses, after a whole word, so that they do not split the word."""
        self._lines[-1].append(f"({''.join(self._readings)})")
        self._readings = []

    @staticmethod
    def _indent(depth: int) -> str:
        return " " * min(2 * depth, MAX_INDENT)

    def _break(self, start: str = "") -> None:
        self._lines.append([start] if start else [])
        self._is_blank = True

    def start(self, node: LexborNode) -> None:
        tag = node.tag or ""
        if tag == "br":
            self._break()
        elif tag == "img":
            self.add_text(node.attributes.get("alt") or "")
        elif tag == "tr":
            self._break()
            if self._tables:
                self._tables[-1].begin_row()
        elif tag == "li":
            self._break(self._indent(len(self._lists) - 1) + (self._lists[-1].marker(node) if self._lists else "- "))
        elif tag in CELLS:
            if self._tables and (bars := self._tables[-1].begin_cell(node)):
                self._lines[-1].append(bars)
        elif tag in ROW_GROUPS:
            if self._tables:
                self._tables[-1].spans = {}
        elif tag == "ruby":
            self._ruby += 1
        elif tag == "rt":
            self._is_reading = True
        elif tag in LISTS or tag in BLOCKS:
            self._begin(node, tag)

    def _begin(self, node: LexborNode, tag: str) -> None:
        """Begin a block. Inside a list or a table, begin a line."""
        if not self._is_inside:
            self.flush()
        elif tag not in LISTS and not self._tables and not self._is_blank:
            self._break(self._indent(len(self._lists)))
        else:
            self._lines[-1].append(" ")
        if tag in LISTS:
            self._lists.append(_list(node) if tag == "ol" else _List())
        elif tag == "table":
            self._tables.append(_Table())
        self._content += tag in CONTENT
        self._pre += tag == "pre"
        self._has_lines = self._has_lines or tag == "pre"
        self._in_main = self._in_main or (self._main != 0 and node.mem_id == self._main)

    def end(self, node: LexborNode) -> None:
        tag = node.tag or ""
        if tag == "rt":
            self._is_reading = False
        elif tag == "ruby":
            self._ruby -= 1
        elif tag in BLOCKS or tag in LISTS:
            self._end(tag)
            if self._in_main and node.mem_id == self._main:
                self._in_main = False

    def _end(self, tag: str) -> None:
        if tag in LISTS:
            self._lists.pop()
        elif tag == "table":
            self._tables.pop()
        self._content -= tag in CONTENT
        if self._is_inside:
            self._pre -= tag == "pre"
        elif tag in HEADINGS:
            self._add(HEADINGS[tag], PERMALINK.sub("", " ".join(self._take())))
        else:
            self._has_lines = self._has_lines or tag in LISTS or tag == "table"
            self.flush()
            self._pre -= tag == "pre"

    @property
    def _is_inside(self) -> bool:
        return bool(self._lists or self._tables)

    def flush(self) -> None:
        """Finish the current block."""
        has_lines = self._has_lines
        self._add(0, "\n".join(self._take()), has_lines)

    def _add(self, level: int, text: str, has_lines: bool = False) -> None:
        if text:
            self._blocks.append((self._in_main, level, text, has_lines))

    def _take(self) -> list[str]:
        """Return the collected lines that are not blank, and forget all collected lines.

        Code and lists keep their indentation.
        """
        if self._readings:
            self._add_readings()
        lines = ["".join(parts) for parts in self._lines]
        if not self._pre:
            lines = [_indented(line) if self._has_lines else " ".join(line.split()) for line in lines]
        self._lines, self._has_lines, self._is_blank = [[]], False, True
        return [line for line in lines if self._pre or line.strip(" -|\n")]

    def finish(self) -> None:
        """Add the blocks to the outline. If the main element has most of the text, only its blocks are added."""
        self.flush()
        main = sum(len(text) for is_main, _, text, _ in self._blocks if is_main)
        has_most = main > MOST * sum(len(text) for _, _, text, _ in self._blocks)
        for is_main, level, text, has_lines in self._blocks:
            if has_most and not is_main:
                self._outline.leave_out("navigation", text)
            elif level:
                self._outline.add_heading(level, text)
            else:
                self._outline.add_block(text, has_lines=has_lines)


def _indented(line: str) -> str:
    stripped = line.lstrip(" ")
    return " " * min(len(line) - len(stripped), MAX_INDENT) + " ".join(stripped.split())


def _list(node: LexborNode) -> _List:
    about = node.attributes
    step, start = (-1 if "reversed" in about else 1), 1
    if step < 0:
        start = sum(child.tag == "li" for child in node.iter())
    return _List(_whole(node, "start", start), step, about.get("type") or "1")


def _whole(node: LexborNode, name: str, default: int) -> int:
    """Return an attribute as a whole number, or the default."""
    found = WHOLE.match(node.attributes.get(name) or "")
    return int(found[1]) if found else default


# ---- Numbers of headings and items, as pages and Word documents write them. ---------------------------------------------

ROMAN = {
    1000: "m",
    900: "cm",
    500: "d",
    400: "cd",
    100: "c",
    90: "xc",
    50: "l",
    40: "xl",
    10: "x",
    9: "ix",
    5: "v",
    4: "iv",
    1: "i",
}


def numeral(number: int, kind: str) -> str:
    """Return a number in the style `1`, `a`, `A`, `i` or `I`. A number that the style cannot write is in digits."""
    if kind in ("i", "I") and 0 < number < 4000:
        text = ""
        for value, letters in ROMAN.items():
            text += letters * (number // value)
            number %= value
    elif kind in ("a", "A") and 0 < number < 26**4:
        text = ""
        while number:
            number, letter = divmod(number - 1, 26)
            text = chr(ord("a") + letter) + text
    else:
        return str(number)
    return text.upper() if kind.isupper() else text
