"""Turns printed lines into headings, paragraphs, lists, tables and code, by the sizes and the places of the lines.

A heading is a line that the document's bookmarks name, or a line in larger letters than the body. Without bookmarks, a bold
line that stands alone is a heading too. A paragraph ends at a gap wider than its line spacing, at an indented line, or at a
line of another kind. A line that repeats at the edge of pages is kept once, after all other text. The letters of text that
is left out are counted.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import msgspec
from msgspec.structs import replace

from .outline import MAX_HEADING, Outline

LARGER = 1.12  # times the body's size: larger lines are headings
WIDER = 1.3  # times the usual distance of two lines: a larger distance separates paragraphs
INDENT = 0.7  # times the size of letters: a larger indentation begins a paragraph
MAX_LEVELS = 6
MAX_CUTS = 6  # cuts of a page, across or along, into parts that are read in turn
EDGE = 2  # lines at the top and the bottom of a page that may repeat
CHAIN = 3  # pages, at most two apart, on which a line must repeat to be kept only once
CONTENTS = re.compile(r"(?<!\.)(?<!\. )(?:\. ?){5,}+\s*+([\divxlc]*)$")  # the end of a line of a table of contents
DOTTED, DOTTED_WIDE = "....", ". . . ."  # such a line has one of these
DOTS = re.compile(r"\s*(?:\. ?){5,}\s*")
PAGE_NUMBER = re.compile(r"[\divxlc]{1,5}")
ROMAN = re.compile(r"[ivxl]{1,7}")
ROMAN_VALUES = {"i": 1, "v": 5, "x": 10, "l": 50}
DIGITS = re.compile(r"\d+")
LETTER = re.compile(r"[^\W\d_]")
LETTERS = re.compile(r"[^\W\d_].*?[^\W\d_]", re.S)  # two letters
SIGNS = re.compile(r"[\W_]+")
COUNTED = re.compile(
    r"\A\s*(?i:(?:chapter|appendix|section|part)(?:\s+|(?=\d)))?"
    r"(?:\d{1,4}|[A-Z]|[a-z](?=[.)])|(?=[IVXL])(?:X[LC]|L?X{0,3})(?:I[VX]|V?I{0,3}))(?:\.\d+)*[.:)]?\s+"
)
"""The number before a heading: digits, a single letter or a Roman number, but no word."""

BULLET = re.compile(r"(?:[•◦▪‣·–*-]|\(?\d{1,3}[.)])\s")
DOT = re.compile(r"^[•◦▪‣·–*]\s+", re.M)  # replaced with a dash, with which the items of all formats begin
RIGHT_TO_LEFT = re.compile(r"[\u0590-\u08ff]")
SENTENCE_END = (".", "!", "?", ":", "。", '"', "”")
NO_HEADING_END = (*".,;:", "。")
HYPHENS = ("\x02", "\xad", "\ufffe")  # what PDFium returns for a hyphen at a line's end
MAX_BOLD, MOST_BOLD = 80, 0.3  # letters of a bold heading; share of bold lines from which bold lines are no headings


class Line(msgspec.Struct, frozen=True, kw_only=True, gc=False):  # a dataclass takes ten times as long to make
    """A printed line, or a part of a line before or after a wide gap. Sizes and places are in points.

    size: the size of the letters.
    left, right: the ends of the line along its reading direction.
    base: the line's place across its reading direction, which for a horizontal line is its height on the page.
    angle: the reading direction, in degrees.
    is_row: whether the line is a row, as in a table: its text does not continue in the next line.
    level: the level of a heading, from 1; 0 for text.
    is_alone: whether the line is a block by itself.
    """

    text: str
    page: int
    size: float
    left: float
    right: float
    base: float
    angle: int = 0
    is_code: bool = False
    is_bold: bool = False
    is_row: bool = False
    level: int = 0
    is_alone: bool = False


Row = list[Line]
"""The parts of one printed line, from left to right."""


@dataclass(frozen=True, slots=True)
class Page:
    """The parts of a page's lines, in the order in which the PDF draws them.

    is_form: whether the page may have filled-in fields or notes, which are drawn after all other text.
    """

    parts: Sequence[Line]
    is_form: bool = False


@dataclass(frozen=True, slots=True)
class Bookmark:
    """An entry of the table of contents in a PDF's data. level: from 1. page: from 0."""

    title: str
    level: int
    page: int


def add_pages(pages: Sequence[Page], outline: Outline, bookmarks: Sequence[Bookmark] = ()) -> None:
    """Add the text of pages to an outline."""
    rows = [_rows_in_order(page) for page in pages]
    heads, rows = _without_running(rows, outline)
    rows = _without_contents(rows, outline)
    lines = [list(_lines(page)) for page in rows]
    if any(lines):
        body = _body_size(line for page in lines for line in page)
        leading = _leading([line for page in lines for line in page], body)
        marked = _with_headings(lines, bookmarks, (body, leading))
        for block in _blocks(marked, (body, leading)):
            _add(block, outline)
    for line in heads:
        outline.add_block(line.text, line.page)


# ---- The order of lines, and their parts side by side. ------------------------------------------------------------------


def _rows_in_order(page: Page) -> list[Row]:
    """Return the lines of a page in reading order.

    Usually, the PDF draws the lines in reading order. If the page is a form, or if the places of the lines contradict the
    drawing order, the lines are sorted by place instead.
    """
    rows = _rows(page.parts)
    if not page.is_form and not _is_contradicted(rows):
        return rows
    angles = dict.fromkeys(part.angle for part in page.parts)
    ordered: list[Row] = []
    for angle in angles:
        parts = [part for part in page.parts if part.angle == angle]
        ordered += _rows(_by_place(parts))
    return ordered


def _rows(parts: Iterable[Line]) -> list[Row]:
    rows: list[Row] = []
    for part in parts:
        if rows and _is_beside(rows[-1][-1], part):
            rows[-1].append(part)
        else:
            rows.append([part])
    return rows


def _is_beside(before: Line, part: Line) -> bool:
    """Whether a part is on the same line as the part before, to the right of it."""
    if part.angle != before.angle or part.is_code != before.is_code:
        return False
    size = min(before.size, part.size)
    return abs(part.base - before.base) < 0.4 * size and part.left > before.right - 0.3 * size


def _by_place(parts: Sequence[Line], cuts: int = 0) -> list[Line]:
    """Return parts in reading order: from top to bottom, and each line from left to right.

    If a gap separates two columns of prose, the whole left column comes before the right one.

    cuts: the number of cuts so far that led to these parts. Each cut divides a page into columns, or into an upper and a
    lower half.
    """
    if cuts < MAX_CUTS and len(parts) >= 2 * COLUMN_LINES:
        for gutter in _gutters(parts):
            left, right = [part for part in parts if part.right <= gutter], [part for part in parts if part.left >= gutter]
            if _is_column(left) and _is_column(right):
                return _by_place(left, cuts + 1) + _by_place(right, cuts + 1)
        if upper := _above_break(parts):
            lower = [part for part in parts if part.base < upper[-1].base]
            return _by_place(upper, cuts + 1) + _by_place(lower, cuts + 1)
    ordered: list[Line] = []
    line: list[Line] = []
    for part in sorted(parts, key=lambda part: -part.base):
        if line and line[0].base - part.base > 0.4 * min(line[0].size, part.size):
            ordered += sorted(line, key=lambda part: part.left)
            line = []
        line.append(part)
    return ordered + sorted(line, key=lambda part: part.left)


def _gutters(parts: Sequence[Line]) -> list[float]:
    """Return the middles of the three widest gaps between columns, widest first.

    Only gaps that no part crosses are counted.
    """
    gutters: list[tuple[float, float]] = []
    ordered = sorted(parts, key=lambda part: part.left)
    reach = ordered[0].right
    for part in ordered[1:]:
        if part.left - reach >= GAP * part.size:
            gutters.append((part.left - reach, (part.left + reach) / 2))
        reach = max(reach, part.right)
    return [middle for _, middle in sorted(gutters, reverse=True)[:3]]


def _is_column(parts: Sequence[Line]) -> bool:
    """Whether the parts on one side of a gap are a column of prose."""
    num_lines = len({round(part.base) for part in parts})
    return num_lines >= COLUMN_LINES and sum(len(part.text) for part in parts) >= PROSE * num_lines


def _above_break(parts: Sequence[Line]) -> list[Line]:
    """Return the parts above the widest gap across the page; empty if there is no gap."""
    ordered = sorted(parts, key=lambda part: -part.base)
    gaps = [(before.base - part.base - 0.9 * part.size, at) for at, (before, part) in enumerate(pairwise(ordered), 1)]
    widest, at = max(gaps)
    return ordered[:at] if widest > 0.1 * ordered[at].size else []


def _is_contradicted(rows: Sequence[Row]) -> bool:
    """Whether the places of lines contradict the PDF's drawing order.

    Return True if a line is drawn directly before a higher line that is not in a column to the right.
    """
    edges = _edges(rows)
    inner = [row[0] for at, row in enumerate(rows) if at not in edges]
    if sum(RIGHT_TO_LEFT.search(line.text) is not None for line in inner) > len(inner) / 2:
        return False
    for before, line in pairwise(inner):
        if line.angle == before.angle and line.base > before.base + line.size and line.left < before.left + 2 * line.size:
            return True
    return False


def _edges(rows: Sequence[Row]) -> set[int]:
    """Return the indexes of the top and bottom lines of a page, for each direction of writing."""
    places: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for at, row in enumerate(rows):
        places[row[0].angle].append((row[0].base, at))
    edges: set[int] = set()
    for some in places.values():
        some.sort()
        edges.update(at for _, at in (*some[:EDGE], *some[-EDGE:]))
    return edges


# ---- Lines that repeat at the edges of pages, page numbers, and tables of contents. -------------------------------------


def _without_running(rows: Sequence[Sequence[Row]], outline: Outline) -> tuple[list[Line], list[list[Row]]]:
    """Separate lines that repeat at the edges of pages.

    Return one line for each repeated text, and all lines that do not repeat.
    """
    kinds = _running(rows)
    if kinds and len(kinds) == sum(map(len, rows)) and not any(LETTER.search(name) for name in kinds.values()):
        return [], list(map(list, rows))  # no text would remain
    seen: set[str] = set()
    heads: list[Line] = []
    others: list[list[Row]] = [[] for _ in rows]
    for number, page in enumerate(rows):
        for at, row in enumerate(page):
            name = kinds.get((number, at))
            if name is None:
                others[number].append(row)
            elif LETTER.search(name) and name not in seen:
                seen.add(name)
                heads.append(_joined_row(row))
            else:
                outline.leave_out("running_heads" if LETTER.search(name) else "page_numbers", _row_text(row))
    return heads, others


def _running(rows: Sequence[Sequence[Row]]) -> dict[tuple[int, int], str]:
    """Find lines that repeat at the same place at the edges of pages.

    Also find lines at the edges of pages with a number that counts up from page to page.

    Returns the repeated text of each line that was found, by the page and the line's index on the page.
    """
    same: dict[tuple[object, str], list[tuple[int, int]]] = defaultdict(list)  # by place and text
    counted: dict[tuple[object, str], list[tuple[int, int]]] = defaultdict(list)  # by place and text without numbers
    for number, page in enumerate(rows):
        for at in _edges(page):
            text, first = _row_text(page[at]), page[at][0]
            place = (first.angle, round(first.base / 2))
            same[place, text].append((number, at))
            for way, value in _numbers(text):
                counted[(place, way, value - number), DIGITS.sub("0", text) if way else "0"].append((number, at))
    running: dict[tuple[int, int], str] = {}
    for (_, text), found in same.items():
        is_on_both = len(rows) == 2 and len({page for page, _ in found}) == 2
        running.update(dict.fromkeys(found if is_on_both else _chained(found), text))
    for (_, text), found in counted.items():
        running.update(dict.fromkeys(_chained(found), text))
    return running


def _numbers(text: str) -> Iterator[tuple[str, int]]:
    """Yield the first and the last number in a line, or the value of a line that is one Roman number."""
    if found := DIGITS.findall(text):
        yield "first", int(found[0][-9:])
        if len(found) > 1:
            yield "last", int(found[-1][-9:])
    elif ROMAN.fullmatch(text):
        values = [ROMAN_VALUES[letter] for letter in text]
        yield "", sum(-value if value < after else value for value, after in pairwise([*values, 0]))


def _chained(found: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the places (page, index) that are part of a chain.

    The places of a chain are on at least `CHAIN` pages, with gaps of at most one page.

    found: places in the order of pages.
    """
    chain: list[tuple[int, int]] = []
    for place in [*found, (1 << 60, 0)]:
        if chain and place[0] - chain[-1][0] > 2:
            if len({page for page, _ in chain}) >= CHAIN:
                yield from chain
            chain = []
        chain.append(place)


def _without_contents(pages: Sequence[Sequence[Row]], outline: Outline) -> list[list[Row]]:
    """Leave out lines of a printed table of contents if their titles are on later pages.

    If a line ends with dots and a number, but its title is not on a later page, the line is kept as a row with fewer dots.
    """
    if not any(DOTTED in part.text or DOTTED_WIDE in part.text for page in pages for row in page for part in row):
        return list(map(list, pages))
    titles: dict[str, int] = {}  # the last page of each line
    for number, page in enumerate(pages):
        for row in page:
            if len(text := _row_text(row)) <= MAX_HEADING and not _contents(text):
                titles[_key(text)] = number
    kept: list[list[Row]] = []
    for number, page in enumerate(pages):
        rows: list[Row] = []
        for row in page:
            found = _contents(text := _row_text(row))
            if found and titles.get(_key(text[: found.start()]), -1) > number and _is_page(found[1], len(pages)):
                outline.leave_out("contents", text)
            elif found:
                line = _joined_row(row)
                rows.append([replace(line, text=DOTS.sub(" ... ", line.text).strip(), is_row=True)])
            else:
                rows.append(row)
        kept.append(rows)
    return kept


def _contents(text: str) -> re.Match[str] | None:
    """Return the dots and the number after a title in a line of a table of contents; None for any other line."""
    return CONTENTS.search(text) if DOTTED in text or DOTTED_WIDE in text else None


def _is_page(number: str, pages: int) -> bool:
    """Whether a number may be a page number: it is not above the number of pages, or it is Roman or empty."""
    return not number.isdecimal() or int(number) <= pages


def _key(text: str) -> str:
    """Return a title without signs and case, to compare it."""
    return SIGNS.sub("", text).casefold()


def _row_text(row: Row) -> str:
    return " ".join(part.text for part in row)


def _joined_row(row: Row) -> Line:
    """Return the parts of a line as one line. A line with a number after a gap at its end is a row, never a heading."""
    if len(row) == 1:
        return row[0]
    is_row = PAGE_NUMBER.fullmatch(row[-1].text) is not None
    is_bold = all(part.is_bold for part in row)
    return replace(row[0], text=_row_text(row), right=row[-1].right, is_row=is_row, is_bold=is_bold)


# ---- Lines with gaps at the same places: the rows of a table, or columns of prose. --------------------------------------

MAX_COLUMNS = 64
FAR = 4  # times the size of letters: the most between two rows of a table
PROSE = 20  # letters of a line in a column of prose, at least on average
COLUMN_LINES = 4
FULL = 0.7  # of a column's width: most lines of prose are longer
GAP = 0.8  # times the size of letters: the least gap that all rows of a table share

Span = tuple[float, float]


def _lines(rows: Sequence[Row]) -> Iterator[Line]:
    """Yield the lines of a page, in reading order.

    Rows with gaps at the same places are a table or columns of prose. Each row of a table is one line, with bars between its
    cells. All lines of a column of prose come before the lines of the next column.
    """
    group: list[Row] = []
    gaps: list[Span] = []
    for row in rows:
        common = _common(gaps, row) if group else []
        if group and not (_is_near(group[-1], row) and common and 2 * len(common) >= len(gaps)):
            yield from _group_lines(group, gaps)
            group, common = [], []
        if not group:
            common = _gaps(row)
        if common:
            group.append(row)
            gaps = common
        else:
            yield _joined_row(row)
    yield from _group_lines(group, gaps)


def _gaps(row: Row) -> list[Span]:
    gaps = [(before.right, part.left) for before, part in pairwise(row)]
    if len(gaps) >= MAX_COLUMNS:
        gaps = sorted(sorted(gaps, key=lambda gap: gap[0] - gap[1])[: MAX_COLUMNS - 1])
    return gaps


def _common(gaps: Sequence[Span], row: Row) -> list[Span]:
    """Return the pieces of gaps in which another row has no text either."""
    left = list(gaps)
    for part in row:
        left = [piece for gap in left for piece in _beside(gap, part)][:MAX_COLUMNS]
    return left


def _beside(gap: Span, part: Line) -> Iterator[Span]:
    """If a part is in a gap, yield the pieces of the gap beside the part that are wide enough; else yield the whole gap."""
    if part.right <= gap[0] or part.left >= gap[1]:
        yield gap
        return
    for start, stop in ((gap[0], part.left), (part.right, gap[1])):
        if stop - start >= GAP * part.size:
            yield start, stop


def _is_near(before: Row, row: Row) -> bool:
    down = before[0].base - row[0].base
    return row[0].angle == before[0].angle and row[0].page == before[0].page and 0 < down < FAR * row[0].size


def _group_lines(group: list[Row], gaps: Sequence[Span]) -> Iterator[Line]:
    last = max((at for at, row in enumerate(group) if len(row) > 1), default=-1) + 1
    while last < len(group) and len(group[last]) == 1 and group[last][0].left > gaps[0][0]:
        last += 1  # it continues a cell of the last row
    table, rest = group[:last], group[last:]
    columns = [_column(row, gaps) for row in table]
    if sum(len(row) > 1 for row in table) < 2:
        yield from map(_joined_row, table)
    elif _is_prose(columns, gaps):
        for at in range(len(gaps) + 1):
            yield from (replace(part, is_row=False) for cells in columns for part in cells[at])
    else:
        for row, cells in zip(table, columns, strict=True):
            text = " | ".join(" ".join(part.text for part in cell) for cell in cells)
            yield replace(row[0], text=text.rstrip(" |"), right=row[-1].right, is_row=True)
    yield from map(_joined_row, rest)


def _column(row: Row, gaps: Sequence[Span]) -> list[Row]:
    """Return the parts of a row, by column."""
    cells: list[Row] = [[]]
    for part in row:
        while len(cells) <= len(gaps) and part.left >= gaps[len(cells) - 1][1] - 1:
            cells.append([])
        cells[-1].append(part)
    return cells + [[] for _ in range(len(gaps) + 1 - len(cells))]


def _is_prose(columns: Sequence[Sequence[Row]], gaps: Sequence[Span]) -> bool:
    """Whether columns contain prose, so that they are read one after the other."""
    if len(gaps) > 3:
        return False
    for at in range(len(gaps) + 1):
        parts = [part for cells in columns for part in cells[at]]
        if len(parts) < COLUMN_LINES or sum(len(part.text) for part in parts) < PROSE * len(parts):
            return False
        left, right = min(part.left for part in parts), max(part.right for part in parts)
        if sum(part.right - left > FULL * (right - left) for part in parts) < 0.6 * len(parts):
            return False
    return True


# ---- Headings. ----------------------------------------------------------------------------------------------------------


def _body_size(lines: Iterable[Line]) -> float:
    """Return the most frequent size of letters."""
    letters: Counter[float] = Counter()
    for line in lines:
        letters[line.size] += len(line.text)
    return letters.most_common(1)[0][0]


def _leading(lines: Sequence[Line], body: float) -> float:
    """Return the usual distance of two lines of the body, in points."""
    gaps = [
        before.base - after.base
        for before, after in pairwise(lines)
        if before.page == after.page and before.size == after.size == body and 0 < before.base - after.base < 3 * body
    ]
    return median(gaps) if gaps else 1.2 * body


def _with_headings(
    pages: Sequence[Sequence[Line]], bookmarks: Sequence[Bookmark], metrics: tuple[float, float]
) -> list[Line]:
    """Return all lines, with the levels of headings. metrics: size and leading (distance of lines) of the body."""
    named = _named(pages, bookmarks)
    if len(named) < max(CHAIN, len(bookmarks) / 2):
        named = {}
    lines: list[Line] = []
    for number, page in enumerate(pages):
        skipped = 0
        for at, line in enumerate(page):
            if skipped:
                skipped -= 1
            elif (found := named.get((number, at))) is not None:
                level, count = found
                text = " ".join(part.text for part in page[at : at + count])
                lines.append(replace(line, text=text, level=level, is_alone=True, is_row=False))
                skipped = count - 1
            else:
                lines.append(line)
    sizes = _heading_sizes(lines, metrics[0])
    deepest = 0
    if named:
        deepest = max(level for level, _ in named.values())
        least = min(line.size for line in lines if line.level)
        sizes = [size for size in sizes if size < least]
    levels = {size: deepest + at for at, size in enumerate(sizes, 1)}
    bold = deepest + len(sizes) + 1
    is_bold_rare = sum(line.is_bold for line in lines) < MOST_BOLD * len(lines)
    for at, line in enumerate(lines):
        if line.level or not _may_head(line):
            continue
        if line.size in levels:
            lines[at] = replace(line, level=levels[line.size])
        elif not named and is_bold_rare and line.is_bold and _stands_alone(lines, at, metrics[1]):
            lines[at] = replace(line, level=bold, is_alone=True)
    return lines


def _named(pages: Sequence[Sequence[Line]], bookmarks: Sequence[Bookmark]) -> dict[tuple[int, int], tuple[int, int]]:
    """Find the headings that bookmarks name.

    Return each heading's level and number of lines, by the heading's page and the index of its first line.
    """
    wanted: dict[int, list[Bookmark]] = defaultdict(list)
    for bookmark in bookmarks:
        if 0 <= bookmark.page < len(pages):
            wanted[bookmark.page].append(bookmark)
    named: dict[tuple[int, int], tuple[int, int]] = {}
    for number, some in wanted.items():
        for page in (number, number + 1):  # an entry may lead to the end of the preceding page
            if some and page < len(pages):
                some = _without_named(some, page, pages[page], named)
    return named


def _without_named(
    bookmarks: Sequence[Bookmark], number: int, page: Sequence[Line], named: dict[tuple[int, int], tuple[int, int]]
) -> list[Bookmark]:
    """Find the lines of a page that bookmarks name as headings, and add them to `named`.

    Return the bookmarks that match no line of the page.
    """
    wanted = [(bookmark, (bookmark.title, COUNTED.sub("", bookmark.title, count=1))) for bookmark in bookmarks]
    titles = _titles(page, {_begin(text) for _, texts in wanted for text in texts})
    left: list[Bookmark] = []
    for bookmark, texts in wanted:
        places = (place for text in texts if _key(text) for place in titles.get(_key(text), ()))
        found = next(((at, count) for at, count in places if (number, at) not in named), None)
        if found is None:
            left.append(bookmark)
        else:
            named[number, found[0]] = (min(bookmark.level, MAX_LEVELS), found[1])
    return left


def _begin(title: str) -> str:
    return _key(title[:12])[:4]


def _titles(page: Sequence[Line], begins: set[str]) -> dict[str, list[tuple[int, int]]]:
    """Return the texts of one to three lines of a page, with all places of each text.

    The place of a text is the index of its first line, and its number of lines.

    begins: the first letters of the wanted titles.
    """
    titles: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for at, line in enumerate(page):
        some = {_key(text) for text in (line.text, COUNTED.sub("", line.text, count=1)) if _begin(text) in begins}
        if not some or len(line.text) > MAX_HEADING:
            continue
        for count in range(1, min(4, len(page) - at + 1)):
            if count > 1:
                more = page[at + count - 1]
                if more.size != line.size or len(more.text) > MAX_HEADING:
                    break
                some = {key + _key(more.text) for key in some}
            for key in some:
                if len(titles[key]) < 3:
                    titles[key].append((at, count))
    return titles


def _heading_sizes(lines: Iterable[Line], body: float) -> list[float]:
    sizes = {line.size for line in lines if line.size > LARGER * body and _may_head(line) and not line.level}
    return sorted(sizes, reverse=True)[:MAX_LEVELS]


def _may_head(line: Line) -> bool:
    return not (line.is_code or line.is_row or line.is_alone) and LETTERS.search(line.text) is not None


def _stands_alone(lines: Sequence[Line], at: int, leading: float) -> bool:
    """Whether a bold line looks like a heading: it is short, below a gap or a heading, and above text that is not bold."""
    line = lines[at]
    if len(line.text) > MAX_BOLD or line.text.endswith(NO_HEADING_END) or BULLET.match(line.text) or line.text[0].islower():
        return False
    before = lines[at - 1] if at else None
    after = lines[at + 1] if at + 1 < len(lines) else None
    if after is None or after.is_bold or after.is_row or after.angle != line.angle:
        return False
    is_below_gap = before is None or before.page != line.page or not 0 < before.base - line.base < WIDER * leading
    return is_below_gap or (before is not None and before.level > 0)


# ---- Blocks. ------------------------------------------------------------------------------------------------------------


def _blocks(lines: Sequence[Line], metrics: tuple[float, float]) -> Iterator[list[Line]]:
    """Yield the lines of each heading, paragraph, list, table and piece of code."""
    block = [lines[0]]
    for line in lines[1:]:
        if _is_new(block, line, metrics):
            yield block
            block = []
        block.append(line)
    yield block


def _is_new(block: Sequence[Line], line: Line, metrics: tuple[float, float]) -> bool:
    """Whether a line begins a block. metrics: size and leading of the body."""
    before, (body, leading) = block[-1], metrics
    if line.is_alone or before.is_alone or line.level != before.level or line.angle != before.angle:
        return True
    is_large = line.size > LARGER * body
    if line.is_code != before.is_code or is_large != (before.size > LARGER * body) or line.is_row != before.is_row:
        return True
    if line.is_row:
        return line.page == before.page and not 0 <= before.base - line.base < FAR * line.size
    if line.level and line.size != before.size:
        return True
    if line.page != before.page:
        return line.level > 0 or not (line.is_code or _goes_on(before, line))
    gap = before.base - line.base
    if gap < 0:  # the next column
        return not _goes_on(before, line)
    usual = max(leading * line.size / body, leading) if is_large else leading
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


def _add(block: Sequence[Line], outline: Outline) -> None:
    first = block[0]
    if first.is_code:
        outline.add_block("\n".join(_code(block)), first.page, has_lines=True)
        return
    if first.is_row:
        outline.add_block("\n".join(line.text for line in block), first.page, has_lines=True)
        return
    text = _joined(block)
    if first.level and len(text) <= MAX_HEADING:
        outline.add_heading(first.level, text, first.page)
    else:
        outline.add_block(text, first.page, has_lines="\n" in text)


def _code(block: Sequence[Line]) -> Iterator[str]:
    """Yield lines of code with their indentation, which a PDF stores only as places."""
    left = min(line.left for line in block)
    for line in block:
        yield " " * min(round((line.left - left) / (0.6 * line.size)), 40) + line.text


def _joined(block: Sequence[Line]) -> str:
    """Join lines into one line, or into one line for each item of a list. Hyphenated words become whole."""
    is_listed = _is_listed(block)
    parts = [block[0].text]
    for line in block[1:]:
        if is_listed and BULLET.match(line.text):
            parts.append("\n" + line.text)
        elif parts[-1].endswith(HYPHENS):
            parts[-1] = parts[-1][:-1]
            parts.append(line.text)
        else:
            parts.append(" " + line.text)
    text = "".join(parts)
    return DOT.sub("- ", text) if is_listed else text
