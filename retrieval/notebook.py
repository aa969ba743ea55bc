"""Reads Jupyter notebooks: Markdown cells, code cells, and their outputs."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from .charsets import decode
from .markdown import add_markdown
from .outline import ENCODED_DATA, Outline, Unreadable

COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
OVERWRITTEN = re.compile(r"[^\n]*\r(?=[^\n])")  # text that a progress bar has overwritten
PICTURES = "pictures"
ENCODED = ("image/png", "image/jpeg", "image/gif", "application/pdf")


class _Cell(msgspec.Struct):
    """A cell of a notebook of version 4 or 3. Only cells of version 3 have `input` and `level`."""

    cell_type: str = ""
    source: str | list[str] = ""
    input: str | list[str] = ""
    level: int = 1
    outputs: list[dict[str, Any]] = []
    attachments: dict[str, dict[str, Any]] = {}


class _Sheet(msgspec.Struct):
    cells: list[_Cell] = []


class _Notebook(msgspec.Struct):
    cells: list[_Cell] = []
    worksheets: list[_Sheet] = []


NOTEBOOKS = msgspec.json.Decoder(_Notebook)


def read_notebook(data: bytes, outline: Outline) -> None:
    """Add the cells of a notebook, in order. Raises Unreadable."""
    try:
        notebook = NOTEBOOKS.decode(decode(data))
    except (msgspec.DecodeError, RecursionError) as error:
        raise Unreadable(f"it is not a notebook that can be read: {error}") from None
    for cell in (*notebook.cells, *(cell for sheet in notebook.worksheets for cell in sheet.cells)):
        text = _joined(cell.source or cell.input)
        if cell.cell_type == "heading":
            outline.add_heading(cell.level, text)
        elif cell.cell_type == "markdown":
            add_markdown(text, outline, is_file=False)
        else:
            outline.add_block(text, has_lines=True)
        for attached in cell.attachments.values():
            _count_pictures(attached, outline)
        for output in cell.outputs:
            _add_output(output, outline)


def _add_output(output: dict[str, Any], outline: Outline) -> None:
    """Add the output of a cell as text. Pictures are only counted."""
    data = output.get("data", output)
    if not isinstance(data, dict):
        return
    shown = _count_pictures(data, outline)
    if output.get("output_type") in ("error", "pyerr"):
        outline.add_block(f"{output.get('ename', '')}: {output.get('evalue', '')}")
    elif "text/markdown" in data:
        add_markdown(_joined(data["text/markdown"]), outline, is_file=False)
    elif not shown:
        text = _joined(data.get("text/plain") or data.get("text", ""))
        outline.add_block(OVERWRITTEN.sub("", COLOURS.sub("", text)), has_lines=True)


def _count_pictures(data: dict[str, Any], outline: Outline) -> bool:
    """Count the letters of pictures. Return whether `data` has any pictures."""
    kinds = [kind for kind in data if kind in ENCODED or kind.startswith("image/") or kind in ("png", "jpeg", "svg")]
    for kind in kinds:
        is_text = "svg" in kind
        outline.leave_out(PICTURES if is_text else ENCODED_DATA, _joined(data[kind]))
    return bool(kinds)


def _joined(text: object) -> str:
    """Return a text as one string, also if it is a list of lines."""
    lines = text if isinstance(text, list) else [text]
    return "".join(line for line in lines if isinstance(line, str)).replace("\r\n", "\n")
