"""Reads EPUB books: the pages in reading order, under the titles from the book's table of contents."""

from __future__ import annotations

import re
from posixpath import dirname, join, normpath
from urllib.parse import unquote
from xml.etree.ElementTree import Element

from selectolax.lexbor import LexborHTMLParser

from .charsets import decode, label_of
from .html import read_markup
from .outline import Outline, Unreadable
from .package import Package, broken_as, child_of, get, tag_of

CONTAINER, ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
PAGES = {"application/xhtml+xml", "text/html", "application/xml", "text/xml"}
EMPTY = re.compile(r"<(?!(?:br|hr|img|input|meta|link|col|area|base|wbr)\b)([A-Za-z][\w:-]*)((?:\s[^<>]*)?)/>")
"""An element that closes itself, which only XML has. An HTML parser would put all following text into it."""
TITLE = re.compile(r"<title\b[^<>]*>[^<]*</title\s*>", re.I)


def read_epub(data: bytes, outline: Outline) -> None:
    """Add the pages of a book. Raises Unreadable."""
    with broken_as("an EPUB book"):
        _Book(Package(data, [0]), outline).read()


class _Book:
    def __init__(self, package: Package, outline: Outline) -> None:
        self._package, self._outline = package, outline
        container = package.part(CONTAINER)
        files = (element for element in (container.iter() if container is not None else ()) if tag_of(element) == "rootfile")
        self._name = next((get(file, "full-path") for file in files), "")
        root = package.part(self._name)
        if root is None:
            raise Unreadable(f"it is a ZIP file without {CONTAINER}: not an EPUB book")
        self._root = root
        manifest = child_of(root, "manifest")
        self._items = {get(item, "id"): item for item in (manifest if manifest is not None else ())}
        self._titles: dict[str, str] = {}  # titles of pages, by name

    def _path(self, target: str, base: str) -> str:
        return normpath(join(dirname(base), unquote(target.partition("#")[0])))

    def read(self) -> None:
        about = child_of(self._root, "metadata")
        title = child_of(about, "title")
        if title is not None:
            self._outline.add_heading(0, title.text or "")
        self._read_contents()
        locked = self._locked()
        spine = child_of(self._root, "spine")
        for reference in spine if spine is not None else ():
            item = self._items.get(get(reference, "idref"))
            name = self._path(get(item, "href"), self._name)
            if item is None or get(item, "media-type") not in PAGES or name not in self._package:
                continue
            if name in locked:
                raise Unreadable("it is protected: only the e-reader that it was bought for can open it")
            markup = _page(self._package.read(name))
            if "nav" in get(item, "properties").split():
                self._outline.leave_out("contents", LexborHTMLParser(markup).text())
                continue
            if not re.search(r"<h[1-6]\b", markup, re.I):
                self._outline.add_heading(1, self._titles.get(name, ""))
            read_markup(markup, self._outline)

    def _locked(self) -> set[str]:
        """Return the names of the encrypted parts. In a readable book, only fonts are encrypted."""
        root = self._package.part(ENCRYPTION)
        found = (element for element in (root.iter() if root is not None else ()) if tag_of(element) == "CipherReference")
        return {unquote(get(element, "URI")) for element in found}

    def _read_contents(self) -> None:
        """Read the titles of pages from the book's table of contents, in either of two formats."""
        for item in self._items.values():
            name = self._path(get(item, "href"), self._name)
            if name not in self._package:
                continue
            if "nav" in get(item, "properties").split():
                for link in LexborHTMLParser(_page(self._package.read(name))).css("nav a[href]"):
                    self._titles.setdefault(self._path(link.attributes.get("href") or "", name), link.text(deep=True))
            elif get(item, "media-type") == "application/x-dtbncx+xml" and (root := self._package.part(name)) is not None:
                for point in (element for element in root.iter() if tag_of(element) == "navPoint"):
                    target = self._path(get(child_of(point, "content"), "src"), name)
                    self._titles.setdefault(target, _label(point))


def _label(point: Element) -> str:
    label = child_of(point, "navLabel")
    return "".join(label.itertext()) if label is not None else ""


def _page(data: bytes) -> str:
    """Return a page as HTML, without its `<title>`, which is usually the book's title or the name of a file."""
    return TITLE.sub("", EMPTY.sub(r"<\1\2></\1>", decode(data, label_of(data))))
