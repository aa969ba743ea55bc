"""Sections of HTML and Word documents."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator

import mammoth
from selectolax.lexbor import LexborHTMLParser, LexborNode

from .markdown import Outline, Unreadable, decode

CHARSET = re.compile(rb"<meta[^>]{0,200}?charset=[\"']?([\w.:-]{1,40})", re.I)
HEAD = 4096  # bytes in which a page declares its encoding
HEADINGS = {f"h{level}": level for level in range(1, 7)}
UNREAD = {
    *("script", "style", "noscript", "template", "svg", "math", "head", "nav", "footer", "iframe", "object", "canvas"),
    *("button", "select", "textarea", "dialog", "audio", "video"),
}
LISTS = {"ul", "ol", "menu"}
BLOCKS = {
    *("p", "div", "section", "article", "main", "body", "header", "aside", "blockquote", "figure", "figcaption", "address"),
    *("dl", "dt", "dd", "form", "fieldset", "details", "summary", "hr", "hgroup", "center", "table", "caption", "pre"),
    *HEADINGS,
}
CELLS = {"td", "th"}
MAIN = ("main", "[role=main]", "article")
PERMALINK = re.compile(r"\s*[¶#§]$")


def read_html(data: bytes, outline: Outline) -> None:
    """Add the headings and blocks of a web page."""
    declared = CHARSET.search(data[:HEAD])
    read_markup(decode(data, declared[1].decode() if declared else ""), outline)


def read_markup(markup: str, outline: Outline) -> None:
    """Add the headings and blocks of HTML as text."""
    tree = LexborHTMLParser(markup)
    root = _main(tree)
    if root is None:
        return
    title = tree.css_first("title")
    if title is not None and not tree.css_matches("h1"):
        outline.add_heading(1, title.text(deep=True))
    page = _Page(outline)
    for node, is_start in _walk(root):
        if node.is_text_node:
            page.add_text(node.text_content or "")
        elif is_start:
            page.start(node.tag or "")
        else:
            page.end(node.tag or "")
    page.flush()


def _main(tree: LexborHTMLParser) -> LexborNode | None:
    """Return the part of a page that is its content."""
    for selector in MAIN:
        found = tree.css(selector)
        if len(found) == 1:
            return found[0]
    return tree.body


def _walk(root: LexborNode) -> Iterator[tuple[LexborNode, bool]]:
    """Yield the nodes of a tree in order, each at its start and its end, without a stack that a deep page could fill."""
    node, depth = root, 0
    while True:
        is_read = (node.tag or "") not in UNREAD
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


class _Page:
    """The block that is being read, line by line.

    A list is one block, and so is a table: their lines begin with a dash and separate cells with a bar.
    """

    def __init__(self, outline: Outline) -> None:
        self._outline = outline
        self._lines: list[list[str]] = [[]]
        self._lists = self._tables = self._pre = 0  # how deep the place is in elements of each kind
        self._has_lines = False

    def add_text(self, text: str) -> None:
        if not self._pre:
            self._lines[-1].append(text)
            return
        first, *more = text.split("\n")
        self._lines[-1].append(first)
        self._lines += [[line] for line in more]

    def start(self, tag: str) -> None:
        if tag == "br" or tag == "tr":
            self._lines.append([])
        elif tag == "li":
            self._lines.append(["  " * (self._lists - 1) + "- "])
        elif tag in CELLS and any(self._lines[-1]):
            self._lines[-1].append(" | ")
        elif tag in LISTS or tag in BLOCKS:
            self._begin(tag)

    def _begin(self, tag: str) -> None:
        """Begin a block; inside of a list or a table, a line."""
        if not self._is_inside:
            self.flush()
        elif tag not in LISTS and not self._tables and "".join(self._lines[-1]).strip(" -"):
            self._lines.append(["  " * self._lists])
        else:
            self._lines[-1].append(" ")
        self._lists += tag in LISTS
        self._tables += tag == "table"
        self._pre += tag == "pre"
        self._has_lines = self._has_lines or tag == "pre"

    def end(self, tag: str) -> None:
        if tag not in BLOCKS and tag not in LISTS:
            return
        self._lists -= tag in LISTS
        self._tables -= tag == "table"
        if self._is_inside:
            self._pre -= tag == "pre"
        elif tag in HEADINGS:
            self._outline.add_heading(HEADINGS[tag], PERMALINK.sub("", " ".join(self._take())))
        else:
            self._has_lines = self._has_lines or tag in LISTS or tag == "table"
            self.flush()
            self._pre -= tag == "pre"

    @property
    def _is_inside(self) -> bool:
        return self._lists > 0 or self._tables > 0

    def flush(self) -> None:
        """Add the block to the outline."""
        has_lines = self._has_lines
        text = "\n".join(self._take())
        self._outline.add_block(text, has_lines=has_lines)

    def _take(self) -> list[str]:
        """Return the lines, without blank ones, and begin anew. Blanks count in code and at the start of a list's lines."""
        lines = ["".join(parts) for parts in self._lines]
        if not self._pre:
            lines = [_indented(line) if self._has_lines else " ".join(line.split()) for line in lines]
        self._lines, self._has_lines = [[]], False
        return [line for line in lines if self._pre or line.strip(" -|\n")]


def _indented(line: str) -> str:
    stripped = line.lstrip(" ")
    return " " * min(len(line) - len(stripped), 12) + " ".join(stripped.split())


# ---- DOCX to sections, by way of HTML. ----------------------------------------------------------------------------------

MAX_TEXT = 64 << 20  # bytes of the unpacked document, and of all that is unpacked with it
WORD_MAIN = "word/document.xml"
TITLE = b'w:val="Title"'
CODE = ("Code", "Source Code", "HTML Preformatted", "Preformatted Text")
STYLES = tuple(f"p[style-name='{name}'] => pre:separator('\\n')" for name in CODE)
WORD_HEADINGS = (
    "p[style-name='Title'] => h1:fresh",
    *(f"p[style-name='Heading {n}'] => h{n + 1}:fresh" for n in range(1, 6)),
)
"""Of a document with a title: its headings stand below it."""


def read_docx(data: bytes, outline: Outline) -> None:
    """Add the headings and blocks of a Word document. Raises Unreadable."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as package:
            texts = _texts(package)
            is_titled = TITLE in package.read(WORD_MAIN)
        styles = (*STYLES, *(WORD_HEADINGS if is_titled else ()))
        html = mammoth.convert_to_html(
            texts,
            style_map="\n".join(styles),
            include_embedded_style_map=False,
            convert_image=_no_image,
            external_file_access=False,
        )
    except (Unreadable, MemoryError):
        raise
    except Exception as error:  # mammoth raises errors of all kinds
        raise Unreadable(f"it is not a Word document that can be read: {error}") from None
    read_markup(html.value, outline)


def _texts(package: zipfile.ZipFile) -> io.BytesIO:
    """Return a document without all that is no XML by its name, such as pictures, which are never unpacked.

    A document names its parts itself: what is not counted here must not be there to be named. Raises Unreadable for one
    that unpacks to more than can be read. Python reads no more than the size stated.
    """
    if WORD_MAIN not in package.namelist():
        raise Unreadable(f"it is a ZIP file without {WORD_MAIN}: not a Word document")
    parts = [entry for entry in package.infolist() if entry.filename.endswith((".xml", ".rels"))]
    size = sum(entry.file_size for entry in parts)
    if size > MAX_TEXT:
        raise Unreadable(f"it unpacks to {size >> 20:,} MiB of text: at most {MAX_TEXT >> 20} are read")
    texts = io.BytesIO()
    with zipfile.ZipFile(texts, "w") as copy:
        for entry in parts:
            copy.writestr(entry.filename, package.read(entry))
    return texts


def _no_image(image: object) -> list[object]:
    """Leave out a picture: not even its file is opened."""
    return []
