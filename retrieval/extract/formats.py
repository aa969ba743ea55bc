"""The formats by the end of a file's name. A file with another end is read as text, if it is text."""

from __future__ import annotations

from collections.abc import Callable

from .docx import read_docx
from .html import read_html
from .markdown import read_markdown
from .pdf import read_pdf
from .section import Outline

Format = Callable[[bytes, Outline], None]

FORMATS: dict[str, Format] = {
    ".md": read_markdown,
    ".markdown": read_markdown,
    ".html": read_html,
    ".htm": read_html,
    ".xhtml": read_html,
    ".pdf": read_pdf,
    ".docx": read_docx,
}
