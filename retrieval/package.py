"""Reads documents that are ZIP files. The files in the ZIP file are called parts, and many of them are XML."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from posixpath import join, normpath, split
from xml.etree.ElementTree import Element, XMLParser

from .outline import Unreadable

MAX_TEXT = 64 << 20  # bytes of all unpacked parts
MAX_PARTS = 20_000  # parts, read or not
XML = (".xml", ".rels", ".opf", ".ncx")  # suffixes of XML parts
OLD_FORMAT = b"\xd0\xcf\x11\xe0"  # the first bytes of Microsoft's files before 2007, and of encrypted files since


DRAWN = ("relIds", "chart")
"""Elements that refer to a diagram or a chart."""


class Package:
    """The parts of a document. Parts that are not read, such as pictures, are never unpacked."""

    def __init__(self, data: bytes, used: list[int]) -> None:
        """Open the ZIP file. Raises Unreadable, and the errors of `zipfile.ZipFile`.

        used: the number of bytes unpacked so far, as the only item of a list that nested documents share.
        """
        self._zip = zipfile.ZipFile(io.BytesIO(data))
        self._names = set(self._zip.namelist())
        self.used = used
        if len(self._names) > MAX_PARTS:
            raise Unreadable(f"it has {len(self._names):,} parts: at most {MAX_PARTS:,} are read")

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def read(self, name: str) -> bytes:
        """Return the bytes of a part, at most as many as the ZIP file states.

        Raises Unreadable if the parts read so far are too large together.
        """
        entry = self._zip.getinfo(name)
        self._count(entry)
        return self._zip.read(entry)

    def check(self) -> None:
        """Raise Unreadable if the parts with text (XML, or binary records) would be too large together when unpacked.

        Call this method for documents that another library unpacks.
        """
        for entry in self._zip.infolist():
            if entry.filename.endswith((*XML, ".bin")):
                self._count(entry)

    def _count(self, entry: zipfile.ZipInfo) -> None:
        self.used[0] += entry.file_size
        if self.used[0] > MAX_TEXT:
            raise Unreadable(f"it unpacks to {self.used[0] >> 20:,} MiB of text: at most {MAX_TEXT >> 20} are read")

    def part(self, name: str) -> Element | None:
        """Return the root element of a part that is XML. The result is None if there is no part with this name."""
        if name not in self or not name.endswith(XML):
            return None
        return parse(self.read(name))

    def relations(self, name: str) -> dict[str, tuple[str, str]]:
        """Return the kind and the target part of each relation of a part, by id. name: empty for the package itself."""
        folder, file = split(name)
        root = self.part(join(folder, "_rels", f"{file}.rels"))
        found: dict[str, tuple[str, str]] = {}
        for relation in root if root is not None else ():
            target = normpath(join("/", folder, get(relation, "Target"))).lstrip("/")
            found[get(relation, "Id")] = (get(relation, "Type").rpartition("/")[2], target)
        return found

    def drawn(self, element: Element, relations: Mapping[str, tuple[str, str]]) -> Iterator[Element]:
        """Yield the part with the text of a diagram or a chart.

        element: the element that refers to the diagram or chart.
        relations: the relations of the element's part.
        """
        for key, id in element.attrib.items():
            kind, target = relations.get(id, ("", ""))
            if key.endswith(("}dm", "}id")) and kind in ("diagramData", "chart") and (root := self.part(target)) is not None:
                yield root

    def main_part(self, default: str, kind: str) -> str:
        """Return the name of the part with the document's text. Raises Unreadable.

        kind: the kind of document with its article, for the error.
        """
        named = [target for kind, target in self.relations("").values() if kind == "officeDocument"]
        for name in (*named, default):
            if name in self and name.endswith(".xml"):
                return name
        raise Unreadable(f"it is a ZIP file without {default}: not {kind}")


@contextmanager
def broken_as(kind: str) -> Iterator[None]:
    """Raise Unreadable for any error from a broken ZIP file or broken XML. kind: the kind of document with its article."""
    try:
        yield
    except (Unreadable, MemoryError):
        raise
    except Exception as error:
        raise Unreadable(f"it is not {kind} that can be read: {error}") from None


def parse(data: bytes) -> Element:
    """Return the root element of an XML text."""
    parser = XMLParser()
    parser.feed(data)
    return parser.close()


def tag_of(element: Element) -> str:
    """Return an element's name without its namespace, which may have two URIs. No name is in more than one namespace."""
    return element.tag.rpartition("}")[2]


def get(element: Element | None, name: str) -> str:
    """Return an attribute, by its name without the namespace; empty if it is missing."""
    if element is not None:
        for key, value in element.attrib.items():
            if key.rpartition("}")[2] == name:
                return value
    return ""


def child_of(element: Element | None, name: str) -> Element | None:
    return next((child for child in element if tag_of(child) == name), None) if element is not None else None


def val(element: Element | None, name: str) -> str:
    """Return the value of a property, which is a child of the element; empty if it is missing."""
    return get(child_of(element, name), "val")


def is_on(element: Element | None, name: str) -> bool:
    found = child_of(element, name)
    return found is not None and get(found, "val") not in ("0", "false", "off")


def int_of(text: str, default: int) -> int:
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else default


def lines_of(text: str) -> str:
    """Return the lines of a paragraph with single spaces between words."""
    return "\n".join(" ".join(line.split()) for line in text.strip().split("\n"))
