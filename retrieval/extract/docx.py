"""DOCX to sections, by way of HTML."""

from __future__ import annotations

import io
import zipfile

import mammoth

from .html import read_markup
from .section import Outline, Unreadable

MAX_TEXT = 64 << 20  # bytes of the unpacked document, and of all that is unpacked with it
MAIN = "word/document.xml"
TITLE = b'w:val="Title"'
CODE = ("Code", "Source Code", "HTML Preformatted", "Preformatted Text")
STYLES = tuple(f"p[style-name='{name}'] => pre:separator('\\n')" for name in CODE)
HEADINGS = ("p[style-name='Title'] => h1:fresh", *(f"p[style-name='Heading {n}'] => h{n + 1}:fresh" for n in range(1, 6)))
"""Of a document with a title: its headings stand below it."""


def read_docx(data: bytes, outline: Outline) -> None:
    """Add the headings and blocks of a Word document. Raises Unreadable."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as package:
            _check(package)
            is_titled = TITLE in package.read(MAIN)
        styles = (*STYLES, *(HEADINGS if is_titled else ()))
        html = mammoth.convert_to_html(
            io.BytesIO(data),
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


def _check(package: zipfile.ZipFile) -> None:
    """Raise Unreadable for a document that unpacks to more than can be read. Python reads no more than the size stated."""
    if MAIN not in package.namelist():
        raise Unreadable(f"it is a ZIP file without {MAIN}: not a Word document")
    size = sum(entry.file_size for entry in package.infolist() if entry.filename.endswith((".xml", ".rels")))
    if size > MAX_TEXT:
        raise Unreadable(f"it unpacks to {size >> 20:,} MiB of text: at most {MAX_TEXT >> 20} are read")


def _no_image(image: object) -> list[object]:
    """Leave out a picture: not even its file is opened."""
    return []
