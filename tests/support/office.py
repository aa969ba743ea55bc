"""Writes one document in four formats: Markdown, HTML, DOCX and PDF."""

from __future__ import annotations

import io
import textwrap
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

NAMESPACE = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
TYPES = """<?xml version="1.0"?><Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">
<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>
<Default Extension="xml" ContentType="application/xml"/>
<Override PartName="/word/document.xml"
 ContentType="application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"/>
<Override PartName="/word/styles.xml"
 ContentType="application/vnd.openxmlformats-officedocument.wordprocessingml.styles+xml"/></Types>"""
RELATIONS = """<?xml version="1.0"?><Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">
<Relationship Id="r1" Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/{kind}" Target="{target}"/>
</Relationships>"""
NAMES = {"h1": "heading 1", "h2": "heading 2", "h3": "heading 3", "code": "Code"}
SIZES = {"h1": 22, "h2": 17, "h3": 14, "p": 10, "li": 10, "code": 9}  # points
WIDTH = 90  # characters of a line


@dataclass(frozen=True)
class Part:
    """A part of a document. kind: h1, h2, h3, p, li or code."""

    kind: str
    text: str


REPORT = [
    Part("h1", "Harbour report"),
    *[Part("p", f"The berth {number} of the harbour is closed. " * 12) for number in range(12)],
    Part("h2", "The crane"),
    Part("p", "The old crane of the harbour lifts nine tons of granite."),
]


def markdown(parts: Sequence[Part]) -> bytes:
    marks = {"h1": "# ", "h2": "## ", "h3": "### ", "li": "- "}
    blocks = []
    for kind, group in groupby(parts, key=lambda part: part.kind):
        texts = [part.text for part in group]
        if kind == "code":
            blocks += [f"```\n{text}\n```" for text in texts]
        elif kind == "li":
            blocks.append("\n".join(marks["li"] + text for text in texts))
        elif kind == "p":
            blocks += [textwrap.fill(text, 79, break_long_words=False, break_on_hyphens=False) for text in texts]
        else:
            blocks += [marks[kind] + text for text in texts]
    return "\n\n".join(blocks).encode()


def html(parts: Sequence[Part]) -> bytes:
    tags = {"code": "pre"}
    lines = []
    for kind, group in groupby(parts, key=lambda part: part.kind):
        tag = tags.get(kind, kind)
        body = "\n".join(f"<{tag}>{escape(part.text)}</{tag}>" for part in group)
        lines.append(f"<ul>\n{body}\n</ul>" if kind == "li" else body)
    navigation = "<nav><a href='/'>Home</a> <a href='/all'>All pages</a></nav><script>let page = 1</script>"
    body = "\n".join(lines)
    return f"<!doctype html><title>Page</title><body>{navigation}<main>{body}</main></body>".encode()


def docx(parts: Sequence[Part], document: str = "") -> bytes:
    """Return a Word document. document: the XML of its text, in place of the parts."""
    styles = "".join(
        f'<w:style w:type="paragraph" w:styleId="{kind}"><w:name w:val="{name}"/></w:style>' for kind, name in NAMES.items()
    )
    body = "".join(_paragraph(part) for part in parts)
    numbering = (
        '<w:abstractNum w:abstractNumId="0"><w:lvl w:ilvl="0"><w:numFmt w:val="bullet"/></w:lvl></w:abstractNum>'
        '<w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num>'
    )
    relations = RELATIONS.format(kind="styles", target="styles.xml").replace(
        "</Relationships>",
        '<Relationship Id="r2" Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/numbering" '
        'Target="numbering.xml"/></Relationships>',
    )
    files = {
        "[Content_Types].xml": TYPES,
        "_rels/.rels": RELATIONS.format(kind="officeDocument", target="word/document.xml"),
        "word/_rels/document.xml.rels": relations,
        "word/styles.xml": f'<w:styles xmlns:w="{NAMESPACE}">{styles}</w:styles>',
        "word/numbering.xml": f'<w:numbering xmlns:w="{NAMESPACE}">{numbering}</w:numbering>',
        "word/document.xml": document or f'<w:document xmlns:w="{NAMESPACE}"><w:body>{body}</w:body></w:document>',
    }
    return package(files)


def package(files: dict[str, str]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as written:
        for name, text in files.items():
            written.writestr(name, text)
    return data.getvalue()


def _paragraph(part: Part) -> str:
    style = f'<w:pStyle w:val="{part.kind}"/>' if part.kind in NAMES else ""
    if part.kind == "li":
        style = '<w:numPr><w:ilvl w:val="0"/><w:numId w:val="1"/></w:numPr>'
    lines = "<w:br/>".join(f'<w:t xml:space="preserve">{escape(line)}</w:t>' for line in part.text.split("\n"))
    return f"<w:p><w:pPr>{style}</w:pPr><w:r>{lines}</w:r></w:p>"


def pdf(parts: Sequence[Part], header: str = "") -> tuple[bytes, dict[str, int]]:
    """Return a PDF, and the page on which each part begins, by its text. header: the header of each page."""
    pages: list[list[str]] = [[]]
    starts: dict[str, int] = {}
    height = 0.0
    for part in parts:
        size = SIZES[part.kind]
        lines = part.text.split("\n") if part.kind == "code" else textwrap.wrap(part.text, WIDTH, break_on_hyphens=False)
        height -= 0.9 * size if part.kind != "li" else 0
        for at, line in enumerate(lines):
            height -= 1.25 * size
            if height < 80:
                height = 740
                pages.append([show(header, 72, (770, 8)), show(f"Page {len(pages)}", 72, (40, 8))] if header else [])
            starts.setdefault(part.text, len(pages) - 1)
            text = f"\x95 {line}" if part.kind == "li" and at == 0 else line
            left = 90 if part.kind == "li" else 72
            pages[-1].append(show(text, left, (height, size), "F2" if part.kind == "code" else "F1"))
    return assemble(["\n".join(page) for page in pages[1:]]), starts


def show(text: str, left: float, place: tuple[float, float], font: str = "F1") -> str:
    shown = text.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")
    return f"BT /{font} {place[1]} Tf {left} {place[0]:.1f} Td ({shown}) Tj ET"


def assemble(
    pages: Sequence[str], *, about: str = "", catalog: str = "", fonts: str = "", objects: Sequence[str] = ()
) -> bytes:
    """Return a PDF with these page contents.

    about, catalog: more entries of each page, and of the catalog.
    fonts: more fonts besides F1 and F2.
    objects: more objects, numbered after the pages' objects, which begin at 5, two for each page.
    """
    kids = " ".join(f"{5 + 2 * at} 0 R" for at in range(len(pages)))
    encoding = "/Encoding /WinAnsiEncoding"
    texts = [
        f"<< /Type /Catalog /Pages 2 0 R {catalog} >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        f"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica {encoding} >>",
        f"<< /Type /Font /Subtype /Type1 /BaseFont /Courier {encoding} >>",
    ]
    for at, page in enumerate(pages):
        used = f"/Resources << /Font << /F1 3 0 R /F2 4 0 R {fonts} >> >>"
        texts.append(f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] {used} {about} /Contents {6 + 2 * at} 0 R >>")
        texts.append(f"<< /Length {len(page)} >>\nstream\n{page}\nendstream")
    texts += objects
    data, offsets = b"%PDF-1.4\n", []
    for number, text in enumerate(texts, 1):
        offsets.append(len(data))
        data += f"{number} 0 obj\n{text}\nendobj\n".encode("latin-1")
    table = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    end = f"xref\n0 {len(offsets) + 1}\n0000000000 65535 f \n{table}trailer << /Size {len(offsets) + 1} /Root 1 0 R >>\n"
    return data + f"{end}startxref\n{len(data)}\n%%EOF\n".encode("latin-1")
