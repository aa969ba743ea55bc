"""Reads PowerPoint presentations. A slide's title is a heading, and the slide's number is the page."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree.ElementTree import Element

from .outline import BETWEEN_CELLS, Outline, Unreadable
from .package import DRAWN, OLD_FORMAT, Package, broken_as, child_of, get, int_of, tag_of

PRESENTATION = "ppt/presentation.xml"
TITLES = {"title", "ctrTitle"}
EDGES = {"ftr": "running_heads", "hdr": "running_heads", "dt": "running_heads", "sldNum": "page_numbers"}
"""Placeholders that every slide repeats, mapped to the kind under which their text is counted."""
BULLETS = {"buChar", "buAutoNum", "buBlip"}
COMMENTS = {"comments", "comment"}  # relations of a slide to its comments
MAX_LEVEL = 8


def read_pptx(data: bytes, outline: Outline) -> None:
    """Add the slides of a presentation, each with its notes. Raises Unreadable."""
    if data.startswith(OLD_FORMAT):
        raise Unreadable("it is encrypted, or in PowerPoint's old format: save it as PPTX, without a password")
    with broken_as("a presentation"):
        package = Package(data, [0])
        name = package.main_part(PRESENTATION, "a presentation")
        relations, root = package.relations(name), package.part(name)
        ids = child_of(root, "sldIdLst")
        for number, id in enumerate(ids if ids is not None else (), 1):
            relation = next((value for key, value in id.attrib.items() if key.endswith("}id")), "")
            _Slide(package, relations.get(relation, ("", ""))[1], outline, number).read()


class _Slide:
    def __init__(self, package: Package, name: str, outline: Outline, number: int) -> None:
        self._package, self._outline, self._number = package, outline, number
        self._root = package.part(name)
        self._relations = package.relations(name)

    def read(self) -> None:
        if self._root is None:
            return
        if get(self._root, "show") in ("0", "false"):
            self._outline.leave_out("hidden", _all_text(self._root))
            return
        shapes = list(_shapes(self._root))
        titles = [" ".join(_all_text(shape).split()) for shape in shapes if _placeholder(shape) in TITLES]
        self._outline.add_heading(1, " ".join(titles) or f"Slide {self._number}", self._number)
        for shape in shapes:
            if (kind := _placeholder(shape)) in EDGES:
                self._outline.leave_out(EDGES[kind], _all_text(shape))
            elif kind not in TITLES:
                self._add_shape(shape)
        for kind, target in self._relations.values():
            if kind == "notesSlide":
                self._add_notes(target)
            elif kind in COMMENTS and (root := self._package.part(target)) is not None:
                self._outline.leave_out("comments", " ".join(root.itertext()))

    def _add_shape(self, shape: Element) -> None:
        for inner in shape.iter():
            tag = tag_of(inner)
            if tag == "txBody" and tag_of(shape) != "graphicFrame":
                self._add_paragraphs(inner)
            elif tag == "tbl":
                rows = [[" ".join(_all_text(cell).split()) for cell in row if tag_of(cell) == "tc"] for row in _rows(inner)]
                lines = [BETWEEN_CELLS.join(row).rstrip(BETWEEN_CELLS) for row in rows]
                lines = [line for line in lines if line]
                self._outline.add_block("\n".join(lines), self._number, has_lines=True, head="".join(lines[:1]))
            elif tag in DRAWN:
                for root in self._package.drawn(inner, self._relations):
                    paragraphs = (element for element in root.iter() if tag_of(element) == "p")
                    lines = [line for line in (" ".join(_text_of(paragraph).split()) for paragraph in paragraphs) if line]
                    self._outline.add_block("\n".join(lines), self._number, has_lines=True)

    def _add_paragraphs(self, body: Element) -> None:
        """Add the paragraphs of a shape. Several paragraphs become one list."""
        found = [(_level(paragraph), _text_of(paragraph)) for paragraph in body if tag_of(paragraph) == "p"]
        found = [(level, text) for level, text in found if text.strip()]
        if len(found) == 1:
            self._outline.add_block(found[0][1], self._number, has_lines="\n" in found[0][1])
            return
        lines = [f"{'  ' * level}- {text}" if level is not None else text for level, text in found]
        self._outline.add_block("\n".join(lines), self._number, has_lines=True)

    def _add_notes(self, name: str) -> None:
        """Add the speaker's notes to a slide."""
        root = self._package.part(name)
        for shape in _shapes(root) if root is not None else ():
            if _placeholder(shape) == "body":
                lines = "\n".join(_text_of(paragraph) for paragraph in shape.iter() if tag_of(paragraph) == "p").strip()
                if lines:
                    self._outline.add_block(f"Notes: {lines}", self._number, has_lines="\n" in lines)


def _shapes(root: Element) -> Iterator[Element]:
    """Yield the shapes of a slide in order, including grouped shapes.

    If a shape has several versions, only the first one is yielded.
    """
    waiting = [root]
    while waiting:
        element = waiting.pop()
        tag = tag_of(element)
        if tag in ("sp", "graphicFrame", "cxnSp"):
            yield element
        elif tag == "AlternateContent":
            waiting += list(element)[:1]
        elif tag != "pic":
            waiting += reversed(element)


def _placeholder(shape: Element) -> str:
    """Return the kind of placeholder that a shape fills in the layout; empty if it fills none."""
    about = next((element for element in shape[:1] for element in element.iter() if tag_of(element) == "ph"), None)
    return (get(about, "type") or "body") if about is not None else ""


def _rows(table: Element) -> Iterator[Element]:
    return (row for row in table if tag_of(row) == "tr")


def _level(paragraph: Element) -> int | None:
    """Return the level of a list item, from 0; None for a paragraph without a bullet."""
    about = child_of(paragraph, "pPr")
    kinds = {tag_of(element) for element in about} if about is not None else set()
    level = min(max(int_of(get(about, "lvl"), 0), 0), MAX_LEVEL)
    return level if (kinds & BULLETS or level) and "buNone" not in kinds else None


def _text_of(paragraph: Element) -> str:
    """Return the text of a paragraph, with its line breaks."""
    parts: list[str] = []
    for element in paragraph.iter():
        tag = tag_of(element)
        if tag == "t":
            parts.append(element.text or "")
        elif tag == "br":
            parts.append("\n")
        elif tag == "tab":
            parts.append("\t")
    return "".join(parts)


def _all_text(element: Element) -> str:
    return "\n".join(_text_of(paragraph) for paragraph in element.iter() if tag_of(paragraph) == "p")
