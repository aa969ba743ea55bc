"""Writes small workbooks, slides, books and OpenDocument files."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from support.office import RELATIONS, package

OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
RELATED = '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">{}</Relationships>'
SHEET = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
SLIDE = "http://schemas.openxmlformats.org/presentationml/2006/main"
DRAWING = "http://schemas.openxmlformats.org/drawingml/2006/main"
ODF = "urn:oasis:names:tc:opendocument:xmlns:{}:1.0"
SPACES = " ".join(f'xmlns:{name}="{ODF.format(name)}"' for name in ("office", "text", "table", "style", "presentation"))
SPACES += f' xmlns:draw="{ODF.format("drawing")}" xmlns:xlink="http://www.w3.org/1999/xlink"'


def related(*targets: tuple[str, str]) -> str:
    """Return the relations of a part, with ids r1, r2 and so on. targets: kind and name of each target."""
    return RELATED.format(
        "".join(
            f'<Relationship Id="r{at}" Type="{OFFICE}/{kind}" Target="{name}"/>'
            for at, (kind, name) in enumerate(targets, 1)
        )
    )


def xlsx(*sheets: tuple[str, str], strings: str = "", styles: str = "", states: Sequence[str] = ()) -> bytes:
    """Return a workbook. sheets: name and XML of each sheet. strings: the XML of shared strings. states: the sheets'."""
    listed = "".join(
        f'<sheet name="{name}" sheetId="{at}" state="{state or "visible"}" r:id="r{at}"/>'
        for at, ((name, _), state) in enumerate(zip(sheets, [*states, *[""] * len(sheets)], strict=False), 1)
    )
    files = {
        "_rels/.rels": RELATIONS.format(kind="officeDocument", target="xl/workbook.xml"),
        "xl/workbook.xml": f'<workbook xmlns="{SHEET}" xmlns:r="{OFFICE}"><sheets>{listed}</sheets></workbook>',
        "xl/_rels/workbook.xml.rels": related(
            *(("worksheet", f"worksheets/sheet{at}.xml") for at in range(1, len(sheets) + 1)),
            ("sharedStrings", "sharedStrings.xml"),
            ("styles", "styles.xml"),
        ),
        "xl/sharedStrings.xml": f'<sst xmlns="{SHEET}">{strings}</sst>',
        "xl/styles.xml": f'<styleSheet xmlns="{SHEET}">{styles}</styleSheet>',
    }
    for at, (_, xml) in enumerate(sheets, 1):
        files[f"xl/worksheets/sheet{at}.xml"] = f'<worksheet xmlns="{SHEET}">{xml}</worksheet>'
    return package(files)


def rows(*lines: Sequence[str]) -> str:
    """Return the rows of a sheet with texts as cells."""
    return "<sheetData>{}</sheetData>".format(
        "".join(
            "<row>{}</row>".format("".join(f'<c t="inlineStr"><is><t>{text}</t></is></c>' for text in line))
            for line in lines
        )
    )


def pptx(*slides: str, notes: Sequence[str] = ()) -> bytes:
    """Return a presentation. slides: the XML of each slide's shapes. notes: the XML of the slides' notes."""
    files = {
        "_rels/.rels": RELATIONS.format(kind="officeDocument", target="ppt/presentation.xml"),
        "ppt/presentation.xml": f'<p:presentation xmlns:p="{SLIDE}" xmlns:r="{OFFICE}"><p:sldIdLst>'
        + "".join(f'<p:sldId id="{255 + at}" r:id="r{at}"/>' for at in range(1, len(slides) + 1))
        + "</p:sldIdLst></p:presentation>",
        "ppt/_rels/presentation.xml.rels": related(*(("slide", f"slides/slide{9 - at}.xml") for at in range(len(slides)))),
    }
    for at, shapes in enumerate(slides):
        name = f"slide{9 - at}.xml"
        files[f"ppt/slides/{name}"] = _slide("sld", shapes)
        if at < len(notes):
            files[f"ppt/slides/_rels/{name}.rels"] = related(("notesSlide", f"../notesSlides/notes{at}.xml"))
            files[f"ppt/notesSlides/notes{at}.xml"] = _slide("notes", shape(notes[at], "body"))
    return package(files)


def _slide(kind: str, shapes: str) -> str:
    return (
        f'<p:{kind} xmlns:p="{SLIDE}" xmlns:a="{DRAWING}" xmlns:r="{OFFICE}"><p:cSld><p:spTree>{shapes}</p:spTree>'
        f"</p:cSld></p:{kind}>"
    )


def shape(text: str, kind: str = "") -> str:
    """Return a shape. text: its paragraphs, one per line. kind: the kind of its placeholder."""
    about = f'<p:nvSpPr><p:nvPr><p:ph type="{kind}"/></p:nvPr></p:nvSpPr>' if kind else "<p:nvSpPr/>"
    paragraphs = "".join(f"<a:p><a:r><a:t>{line}</a:t></a:r></a:p>" for line in text.split("\n"))
    return f"<p:sp>{about}<p:txBody>{paragraphs}</p:txBody></p:sp>"


def epub(*pages: str, title: str = "The Tides", contents: str = "", more: str = "") -> bytes:
    """Return a book. pages: the XHTML of each page. contents: its NCX. more: more XML of the manifest."""
    items = "".join(
        f'<item id="p{at}" href="text/page%20{at}.xhtml" media-type="application/xhtml+xml"/>' for at in range(len(pages))
    )
    spine = "".join(f'<itemref idref="p{at}"/>' for at in range(len(pages)))
    files = {
        "META-INF/container.xml": '<container><rootfiles><rootfile full-path="OPS/book.opf"/></rootfiles></container>',
        "OPS/book.opf": f'<package xmlns:dc="dc"><metadata><dc:title>{title}</dc:title></metadata><manifest>{items}{more}'
        f'<item id="ncx" href="toc.ncx" media-type="application/x-dtbncx+xml"/></manifest><spine>{spine}</spine></package>',
        "OPS/toc.ncx": f"<ncx><navMap>{contents}</navMap></ncx>",
    }
    for at, page in enumerate(pages):
        files[f"OPS/text/page {at}.xhtml"] = page
    return package(files)


def opendocument(
    kind: str, body: str, *, automatic: str = "", styles: str = "", more: dict[str, str] | None = None
) -> bytes:
    """Return a document. kind: text, presentation or spreadsheet. automatic: the XML of its automatic styles."""
    content = (
        f"<office:document-content {SPACES}><office:automatic-styles>{automatic}</office:automatic-styles><office:body>"
        f"<office:{kind}>{body}</office:{kind}></office:body></office:document-content>"
    )
    files = {"content.xml": content, "styles.xml": f"<office:document-styles {SPACES}>{styles}</office:document-styles>"}
    return package({"mimetype": f"application/vnd.oasis.opendocument.{kind}", **files, **(more or {})})


def compound(name: str, data: bytes) -> bytes:
    """Return a compound file with one stream, as in Microsoft's formats before 2007."""
    sector, free, end = 512, 0xFFFFFFFF, 0xFFFFFFFE
    data = data.ljust(-(-max(len(data), 4096) // sector) * sector, b"\0")
    count = len(data) // sector
    header = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(16) + struct.pack("<HHHHH", 0x3E, 3, 0xFFFE, 9, 6) + bytes(6)
    header += struct.pack("<IIIIIIIII", 0, 1, 1, 0, 4096, end, 0, end, 0) + struct.pack("<I", 0)
    header = header.ljust(sector, b"\xff")
    chain = [0xFFFFFFFD, end, *range(3, count + 2), end]
    table = struct.pack(f"<{sector // 4}I", *chain, *[free] * (sector // 4 - len(chain)))
    entries = _entry("Root Entry", 5, 1, (end, 0)) + _entry(name, 2, free, (2, len(data))) + _entry("", 0, free, (0, 0)) * 2
    return header + table + entries + data


def _entry(name: str, kind: int, child: int, place: tuple[int, int]) -> bytes:
    letters = name.encode("utf-16-le")
    free = 0xFFFFFFFF
    about = struct.pack("<HBBIII", len(letters) + 2 if name else 0, kind, 1, free, free, child)
    return letters.ljust(64, b"\0") + about + bytes(36) + struct.pack("<IQ", *place)


def xls(name: str, cells: dict[tuple[int, int], str | float]) -> bytes:
    """Return an old workbook with one sheet. cells: texts and numbers, by row and column."""

    def record(kind: int, data: bytes) -> bytes:
        return struct.pack("<HH", kind, len(data)) + data

    def begin(kind: int) -> bytes:
        return record(0x809, struct.pack("<HHHHII", 0x600, kind, 0x0DBB, 1996, 0, 0x600))

    parts = b""
    for (row, column), value in cells.items():
        place = struct.pack("<HHH", row, column, 0)
        if isinstance(value, str):
            letters = value.encode("utf-16-le")
            parts += record(0x204, place + struct.pack("<HB", len(value), 1) + letters)
        else:
            parts += record(0x203, place + struct.pack("<d", value))
    about = struct.pack("<BBBB", 0, 0, len(name), 0) + name.encode("latin-1")
    size = len(begin(5)) + 4 + 4 + len(about) + 4
    listed = record(0x85, struct.pack("<I", size) + about)
    return compound("Workbook", begin(5) + listed + record(0x0A, b"") + begin(0x10) + parts + record(0x0A, b""))
