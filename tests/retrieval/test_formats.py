"""Small files of the formats that people have, with the words that must be found, in their order; and files that harm."""

import json
import zipfile
from io import BytesIO

import pytest
from slotcache.retrieval import FAILED, INDEXED, Index, Sizes, cut, writing
from slotcache.retrieval.markdown import read_text
from slotcache.retrieval.outline import Outline, Unreadable
from slotcache.retrieval.reader import FORMATS
from support.office import Part as Paragraph
from support.office import docx, package
from support.packages import compound, epub, opendocument, pptx, rows, shape, xls, xlsx

STYLES = (
    '<numFmts><numFmt numFmtId="164" formatCode="0.0%"/><numFmt numFmtId="165" formatCode="#,##0.00 &quot;€&quot;"/>'
    '<numFmt numFmtId="166" formatCode="dd.mm.yyyy hh:mm"/><numFmt numFmtId="167" formatCode="00000"/></numFmts><cellXfs>'
    + "".join(f'<xf numFmtId="{number}"/>' for number in (0, 14, 164, 165, 166, 167))
    + "</cellXfs>"
)
NUMBERS = (
    '<sheetData><row r="1"><c r="A1" t="s"><v>0</v></c></row>'
    '<row r="3"><c r="A3" t="inlineStr"><is><t>Part</t></is></c><c r="B3" t="inlineStr"><is><t>Price</t></is></c>'
    '<c r="D3" t="inlineStr"><is><t>Since</t></is></c></row>'
    '<row r="4"><c r="A4" t="s"><v>1</v></c><c r="B4" s="3"><v>1204.5</v></c><c r="D4" s="1"><v>46086</v></c></row>'
    '<row r="6"><c r="A6" t="str"><f>A4</f><v>Valve</v></c><c r="B6" s="2"><v>0.355</v></c>'
    '<c r="D6" s="4"><v>46086.6</v></c></row>'
    '<row r="7"><c r="A7" s="5"><v>123</v></c><c r="B7"><v>0.30000000000000004</v></c><c r="D7"><f>B4*2</f></c></row>'
    '<row r="8"><c r="A8" t="b"><v>1</v></c><c r="XFD8"><v>7</v></c></row></sheetData>'
)
STRINGS = "<si><t>Harbour prices</t></si><si><r><t>Pu</t></r><r><t>mp</t></r><rPh><t>read aloud</t></rPh></si>"
TABLE = (
    "<p:graphicFrame><a:graphic><a:tbl><a:tr><a:tc><a:txBody><a:p><a:r><a:t>Port</a:t></a:r></a:p></a:txBody></a:tc><a:tc>"
    "<a:txBody><a:p><a:r><a:t>Depth</a:t></a:r></a:p></a:txBody></a:tc></a:tr><a:tr><a:tc/><a:tc><a:txBody><a:p><a:r>"
    "<a:t>12 m</a:t></a:r></a:p></a:txBody></a:tc></a:tr></a:tbl></a:graphic></p:graphicFrame>"
)
PAGE = "<?xml version='1.0'?><html><head><title/><script src='x'/></head><body><a id='x'/>{}</body></html>"
POINT = "<navPoint><navLabel><text>{}</text></navLabel><content src='text/page%20{}.xhtml#top'/></navPoint>"
LIST_STYLE = (
    '<text:list-style style:name="L1"><text:list-level-style-number text:level="1" style:num-format="1" '
    'style:num-suffix="."/></text:list-style><style:style style:name="H"><style:text-properties text:display="none"/>'
    "</style:style>"
)
NOTE = (
    "<text:note><text:note-citation>1</text:note-citation><text:note-body><text:p>Seen twice.</text:p></text:note-body>"
    "</text:note>"
)
ODT = (
    '<text:h text:outline-level="1">Tides</text:h><text:p>The moon<text:s text:c="2"/>raises\n  two<text:line-break/>tides'
    f'{NOTE}.<text:span text:style-name="H">secret</text:span></text:p><text:list text:style-name="L1"><text:list-item>'
    "<text:p>ebb</text:p></text:list-item><text:list-item><text:p>flood</text:p></text:list-item></text:list>"
    "<table:table><table:table-row><table:table-cell><text:p>Port</text:p></table:table-cell><table:table-cell>"
    "<text:p>Depth</text:p></table:table-cell></table:table-row></table:table>"
)
ODS = (
    '<table:table table:name="Prices"><table:table-row><table:table-cell><text:p>Part</text:p></table:table-cell>'
    '<table:table-cell table:number-columns-repeated="2"/><table:table-cell><text:p>Share</text:p></table:table-cell>'
    '<table:table-cell table:number-columns-repeated="16380"/></table:table-row><table:table-row '
    'table:number-rows-repeated="1048570"><table:table-cell table:number-columns-repeated="16384"/></table:table-row>'
    '<table:table-row table:number-rows-repeated="2"><table:table-cell><text:p>7</text:p></table:table-cell>'
    '<table:table-cell table:number-columns-repeated="2"/><table:table-cell office:value="0.355"><text:p>35.5 %</text:p>'
    "</table:table-cell></table:table-row></table:table>"
)
ODP = (
    '<draw:page><draw:frame presentation:class="title"><draw:text-box><text:p>Tides</text:p></draw:text-box></draw:frame>'
    "<draw:frame><draw:text-box><text:list><text:list-item><text:p>ebb</text:p></text:list-item></text:list></draw:text-box>"
    '</draw:frame><draw:frame presentation:class="footer"><draw:text-box><text:p>Harbour office</text:p></draw:text-box>'
    '</draw:frame><presentation:notes><draw:frame presentation:class="notes"><draw:text-box><text:p>Say it.</text:p>'
    "</draw:text-box></draw:frame></presentation:notes></draw:page>"
)
NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "source": ["# Tides\n", "\n", "The moon.\n", "```\nopen"]},
        {
            "cell_type": "code",
            "source": "# no heading\nebb()",
            "outputs": [
                {"output_type": "stream", "text": ["10 %\r", "100 %\n", "\x1b[31mred\x1b[0m\n"]},
                {"output_type": "display_data", "data": {"image/png": "iVBORw0KGgo", "text/plain": "<Figure>"}},
                {"output_type": "execute_result", "data": {"text/plain": ["a  b\n", "1  2"], "text/html": "<table>"}},
                {"output_type": "error", "ename": "TideError", "evalue": "too low", "traceback": ["\x1b[0m"]},
            ],
        },
        {"cell_type": "markdown", "source": "## Ebb\nIt falls."},
    ],
    "nbformat": 4,
}
OLD_NOTEBOOK = {
    "worksheets": [
        {"cells": [{"cell_type": "heading", "level": 2, "source": "Tides"}, {"cell_type": "code", "input": ["ebb()"]}]}
    ]
}
MAIL = """From: =?utf-8?b?SsO8cmdlbg==?= <j@port.example>\nTo: all@port.example\nSubject: =?iso-8859-1?q?Fl=FCt?=
Date: Fri, 6 Mar 2026 10:00:00 +0100\nMIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=b\n\n--b
Content-Type: multipart/alternative; boundary=a\n\n--a\nContent-Type: text/plain; charset=iso-8859-1
Content-Transfer-Encoding: quoted-printable\n\nThe fl=FCt comes at ten.\n--a\nContent-Type: text/html
\n<p>The <b>flüt</b> comes at ten.</p>\n--a--\n--b\nContent-Type: text/csv; name=depths.csv
Content-Disposition: attachment; filename=depths.csv\n\nPort,Depth\nNorth,12\n--b\nContent-Type: application/zip
Content-Disposition: attachment; filename=all.zip\nContent-Transfer-Encoding: base64\n\nUEsDBAAA\n--b
Content-Type: message/rfc822\n\nSubject: Forwarded\n\nAn older mail.\n--b--\n"""
HTML_MAIL = """From: a@b.example\nSubject: News\nContent-Type: multipart/alternative; boundary=a\n\n--a
Content-Type: text/plain\n\nNo HTML.\n--a\nContent-Type: multipart/related; boundary=r\n\n--r
Content-Type: text/html; charset=utf-8\n\n<h2>Ebb</h2><p>All of it stands in the version in HTML.</p>
--r\nContent-Type: image/png\n\nxx\n--r--\n--a--\n"""
MHTML = """From: <Saved by Blink>\nSnapshot-Content-Location: https://port.example/\nSubject: Port\nMIME-Version: 1.0
Content-Type: multipart/related; type="text/html"; boundary="b"\n\n--b\nContent-Type: text/html
Content-Transfer-Encoding: quoted-printable\n\n<h1>Tides</h1><p>The moon =3D two tides.</p>\n--b\nContent-Type: text/css
Content-Location: cid:x\n\nbody {{ color: red }}\n--b--\n""".replace("{{", "{").replace("}}", "}")
RTF = r"""{\rtf1\ansi\ansicpg1251\deff0{\fonttbl{\f0\fcharset204 Arial;}{\f1\fcharset128 MS;}}{\colortbl;\red0;}
{\stylesheet{\s1\outlinelevel0 heading 1;}{\s2 heading 2;}}{\info{\title Other}}{\header Port office\par}
\pard\s1 \'cf\'f0\'e8\'eb\'e8\'e2\par\pard The moon\u8212?raises {\f1\'83\'65\'83\'58}
 {\v secret}{\deleted gone}two tides{\footnote Seen.}.\par
{\listtext\f3\'b7\tab}ebb\par{\listtext\f3\'b7\tab}flood\par\pard\s2 Depths\par
\trowd\pard\intbl Port\cell Depth\cell\row\pard\intbl North\par side\cell 12\cell\row\pard
{\*\unknown never}{\pict 89504e47}{\field{\*\fldinst HYPERLINK "x"}{\fldrslt a link}}\par}"""
RST = "====\nPort\n====\n\nThe port.\n\nTides\n=====\n\nThe moon.\n\n* ebb\n* flood\n\nDepths\n------\n\n"
RST += "::\n\n   12 m\n\nOther\n=====\nEnd."
ORG = """#+TITLE: Port\n#+AUTHOR: me\nThe port.\n* TODO Tides :sea:\n:PROPERTIES:\n:ID: 7\n:END:\nThe moon.\n** Ebb
#+BEGIN_SRC sh\n* no heading\n#+END_SRC\n# a remark\nIt falls.\n"""

FILES = {
    "a workbook as it is seen": (
        ".xlsx",
        xlsx(("Prices", NUMBERS), strings=STRINGS, styles=STYLES),
        "Prices§Harbour prices§Part | Price | Since\nPump | 1,204.50 € | 2026-03-05\nValve | 35.5% | 2026-03-05 14:24\n"
        "00123 | 0.3 | =B4*2\nTRUE |  |  | 7",
    ),
    "a workbook with a hidden sheet": (
        ".xlsx",
        xlsx(("Ports", rows(["Port", "Depth"], ["North", "12"])), ("Old", rows(["secret"])), states=["", "hidden"]),
        "Ports§Port | Depth\nNorth | 12§{hidden: 6}",
    ),
    "an old workbook": (".xls", xls("Prices", {(0, 0): "Part", (0, 2): "Price", (1, 0): "Pump", (1, 2): 940.0}), None),
    "a table of a program as an old workbook": (".xls", b"<table><tr><td>Part<td>Price</table>", "Part | Price"),
    "lines of a program as an old workbook": (".xls", b"Part\tPrice\nPump\t940\n", "Part | Price\nPump | 940"),
    "slides": (
        ".pptx",
        pptx(
            shape("The moon\nraises tides") + shape("Tides", "title") + shape("7", "sldNum") + TABLE,
            shape("Last"),
            notes=["Say it."],
        ),
        "Tides§The moon\nraises tides§Port | Depth\n | 12 m§Notes: Say it.§Slide 2§Last§{page_numbers: 1}",
    ),
    "a slide in a group": (".pptx", pptx(f"<p:grpSp>{shape('ebb')}{shape('flood')}</p:grpSp>"), "Slide 1§ebb§flood"),
    "a book": (
        ".epub",
        epub(
            PAGE.format("<p>It begins.</p>"),
            PAGE.format("<h1>Ebb</h1><p>It falls.</p>"),
            contents=POINT.format("Preface", 0) + POINT.format("Ebb", 1),
        ),
        "The Tides§Preface§It begins.§Ebb§It falls.",
    ),
    "a book with a page of contents": (
        ".epub",
        epub(
            PAGE.format("<p>Of the sea.</p>"),
            more='<item id="n" href="nav.xhtml" properties="nav" media-type="application/xhtml+xml"/>',
        ),
        "The Tides§Of the sea.",
    ),
    "a text of OpenDocument": (
        ".odt",
        opendocument("text", ODT, automatic=LIST_STYLE),
        "Tides§The moon raises two\ntides[1].§[1] Seen twice.§1. ebb\n2. flood§Port | Depth§{hidden: 6}",
    ),
    "one file of OpenDocument": (
        ".fodt",
        zipfile.ZipFile(BytesIO(opendocument("text", "<text:p>The moon.</text:p>"))).read("content.xml"),
        "The moon.",
    ),
    "a sheet of OpenDocument": (
        ".ods",
        opendocument("spreadsheet", ODS),
        "Prices§Part | Share\n7 | 35.5 %\n7 | 35.5 %",
    ),
    "two sheets of OpenDocument": (
        ".ods",
        opendocument("spreadsheet", ODS + ODS.replace("Prices", "Shares")),
        "Prices§Part | Share\n7 | 35.5 %\n7 | 35.5 %§Shares§Part | Share\n7 | 35.5 %\n7 | 35.5 %",
    ),
    "slides of OpenDocument": (
        ".odp",
        opendocument("presentation", ODP + "<draw:page><text:p>Last</text:p></draw:page>"),
        "Tides§- ebb§Notes: Say it.§Slide 2§Last§{running_heads: 13}",
    ),
    "slides without a title": (".odp", opendocument("presentation", ODP.replace('"title"', '"x"')), None),
    "a notebook": (
        ".ipynb",
        json.dumps(NOTEBOOK).encode(),
        "Tides§The moon.§```\nopen§# no heading\nebb()§100 %\nred§a  b\n1  2§TideError: too low§Ebb§It falls.§"
        "{encoded_data: 11}",
    ),
    "an old notebook": (".ipynb", json.dumps(OLD_NOTEBOOK).encode(), "Tides§ebb()"),
    "a mail with attachments": (
        ".eml",
        MAIL.encode(),
        "Flüt§From: Jürgen <j@port.example>\nTo: all@port.example\nDate: Fri, 6 Mar 2026 10:00:00 +0100§"
        "The flüt comes at ten.§depths.csv§Port | Depth\nNorth | 12§Forwarded§An older mail.§"
        "Attachments that are not read: all.zip§{embedded_files: 6}",
    ),
    "a mail in HTML": (".eml", HTML_MAIL.encode(), "News§From: a@b.example§Ebb§All of it stands in the version in HTML."),
    "a saved page": (".mhtml", MHTML.encode(), "Port§Address: https://port.example/§Tides§The moon = two tides."),
    "a page that an old browser saved": (
        ".mht",
        MHTML.replace("Snapshot-Content-Location", "X-Other").encode(),
        "Port§Tides§The moon = two tides.",
    ),
    "RTF": (
        ".rtf",
        RTF.encode(),
        "Прилив§The moon—raises テス two tides[1].§[1] Seen.§- ebb\n- flood§Depths§Port | Depth\nNorth side | 12§a link§"
        "Port office§{deleted: 4, hidden: 6, pictures: 8}",
    ),
    "RTF as an old Word document": (".doc", rb"{\rtf1\ansi The moon.\par Two \b tides\b0 .}", "The moon.§Two tides."),
    "reStructuredText": (".rst", RST.encode(), "Port§The port.§Tides§The moon.§* ebb\n* flood§Depths§::§12 m§Other§End."),
    "a table in reStructuredText": (
        ".rst",
        b"Ports\n-----\n\n=====  =====\nPort   Depth\n=====  =====\nNorth  12\n=====  =====\n",
        "Ports§=====  =====\nPort   Depth\n=====  =====\nNorth  12\n=====  =====",
    ),
    "Org": (
        ".org",
        ORG.encode(),
        "Port§The port.§TODO Tides§The moon.§Ebb§#+BEGIN_SRC sh\n* no heading\n#+END_SRC§It falls.§"
        "{comments: 8, front_matter: 33}",
    ),
    "an Org file without headings": (".org", b"ebb\n\n - flood\n - tide\n", "ebb§- flood\n - tide"),
}


def outline_of(suffix, data):
    outline = Outline()
    FORMATS.get(suffix, read_text)(data, outline)
    return outline


def shown(outline):
    """Return the headings and blocks of a document in their order, and what is left out."""
    parts = [
        part for section in outline.sections for part in (*section.headings[-1:], *(block.text for block in section.blocks))
    ]
    counts = ", ".join(f"{kind}: {count}" for kind, count in sorted(outline.left_out.items()))
    return "§".join([*parts, *(["{" + counts + "}"] if counts else [])])


@pytest.mark.parametrize("name", FILES)
def test_the_words_of_a_file_are_found_in_their_order(name):
    suffix, data, expected = FILES[name]
    assert shown(outline_of(suffix, data)) == (
        expected
        or {
            "an old workbook": "Prices§Part | Price\nPump | 940",
            "slides without a title": "Slide 1§Tides§- ebb§Notes: Say it.§{running_heads: 13}",
        }[name]
    )


def test_each_format_has_files():
    tested = {suffix for suffix, *_ in FILES.values()}
    assert tested >= {
        ".xlsx",
        ".xls",
        ".ods",
        ".pptx",
        ".epub",
        ".odt",
        ".odp",
        ".ipynb",
        ".eml",
        ".mhtml",
        ".rtf",
        ".rst",
        ".org",
    }


def test_each_reader_has_a_file():
    tested = {suffix for suffix, *_ in FILES.values()} | {".md", ".html", ".pdf", ".docx", ".csv"}  # in files of their own
    refusing = {reader for reader in FORMATS.values() if "<locals>" in reader.__qualname__}  # made in a function
    assert {*FORMATS.values()} - refusing <= {FORMATS.get(suffix) for suffix in tested}


def test_slides_are_pages():
    pages = [block.page for section in outline_of(".pptx", FILES["slides"][1]).sections for block in section.blocks]
    assert pages == [1, 1, 1, 2]


def test_the_first_row_of_a_sheet_stands_in_front_of_each_chunk():
    lines = [["Part", "Price"], *([f"Pump of the {at}th station", str(at)] for at in range(500))]
    found = list(cut(outline_of(".xlsx", xlsx(("Prices", rows(*lines)))).sections, Sizes.around(100)))
    assert len(found) > 20 and all(chunk.text.startswith("Part | Price\n") for chunk in found)
    assert {chunk.title for chunk in found} == {"Prices"} and "Pump of the 499th station | 499" in found[-1].text


@pytest.mark.parametrize("name", ["charset", "filename", "name"])
@pytest.mark.parametrize("value", ["*=x\0''a", f"*{'9' * 5000}=a"], ids=["nul", "number"])
def test_a_mail_with_an_odd_parameter_keeps_its_text(name, value):
    place = "Content-Disposition: inline" if name == "filename" else "Content-Type: text/plain"
    data = f"Subject: Tides\n{place}; {name}{value}\n\nThe moon raises two tides.\n".encode()
    blocks = [block.text for section in outline_of(".eml", data).sections for block in section.blocks]
    assert "The moon raises two tides." in blocks


def test_an_attached_document_is_read_below_its_mail():
    report = docx([Paragraph("h1", "Report"), Paragraph("p", "The pump leaks.")])
    head = "Subject: Pump\nContent-Type: multipart/mixed; boundary=b\n\n--b\nContent-Type: application/octet-stream\n"
    head += 'Content-Disposition: attachment; filename="report.docx"\nContent-Transfer-Encoding: 8bit\n\n'
    (last,) = outline_of(".eml", head.encode() + report + b"\n--b--\n").sections[-1:]
    assert last.headings == ("Pump", "report.docx", "Report") and [block.text for block in last.blocks] == [
        "The pump leaks."
    ]


@pytest.mark.parametrize(
    "suffix, data, reason",
    [
        (".doc", compound("WordDocument", b""), "save it as DOCX"),
        (".ppt", compound("PowerPoint Document", b""), "save it as PPTX"),
        (".msg", compound("__properties_version1.0", b""), "save it as EML"),
        (".xlsx", compound("EncryptedPackage", b""), "without a password"),
        (".xls", compound("EncryptedPackage", b""), "without a password"),
        (".pptx", compound("EncryptedPackage", b""), "save it as PPTX"),
        (
            ".odt",
            opendocument("text", "", more={"META-INF/manifest.xml": "<m><encryption-data/></m>"}),
            "without a password",
        ),
        (".png", b"\x89PNG", "ocrmypdf"),
        (".xlsx", b"PK\x03\x04 broken", "not an Excel workbook"),
        (".pptx", package({"other.xml": ""}), "without ppt/presentation.xml"),
        (".epub", package({"other.xml": ""}), "not an EPUB book"),
        (".ods", package({"other.xml": ""}), "not an OpenDocument"),
        (".ipynb", b"[]", "not a notebook"),
        (".eml", b"\n", "no headers"),
        (".rtf", b"plain", "not an RTF"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_not_read_says_what_helps(suffix, data, reason):
    with pytest.raises(Unreadable, match=reason):
        outline_of(suffix, data)


# ---- Files that harm, in a folder with others. --------------------------------------------------------------------------

LAUGHS = "<!DOCTYPE l [<!ENTITY a0 'ha'>{}]>".format("".join(f"<!ENTITY a{n} '{f'&a{n - 1};' * 10}'>" for n in range(1, 12)))
BLANKS = " " * (65 << 20)
FAR = '<dimension ref="A1:XFD1048576"/><sheetData><row r="1"><c r="A1"><v>1</v></c></row>{}</sheetData>'


def with_entities(data, name):
    """Return a package one of whose parts has entities that grow to gigabytes."""
    with zipfile.ZipFile(BytesIO(data)) as read:
        files = {part: read.read(part).decode() for part in read.namelist()}
    head, mark, rest = files[name].partition(">")
    return package(files | {name: f"{LAUGHS}{head}{mark}&a11;{rest}"})


HARMFUL = {
    "bomb.xlsx": lambda: xlsx(("A", BLANKS)),
    "bomb.xlsb": lambda: package({"xl/workbook.bin": BLANKS}),
    "bomb.pptx": lambda: pptx(BLANKS),
    "bomb.odt": lambda: opendocument("text", BLANKS),
    "bomb.epub": lambda: epub(BLANKS),
    "laughs.xlsx": lambda: with_entities(xlsx(("A", rows(["a"]))), "xl/worksheets/sheet1.xml"),
    "laughs.pptx": lambda: with_entities(pptx(shape("a")), f"ppt/slides/slide{9}.xml"),
    "laughs.ods": lambda: with_entities(opendocument("spreadsheet", ODS), "content.xml"),
    "laughs.epub": lambda: with_entities(epub(PAGE.format("a")), "OPS/book.opf"),
    "cells.xlsx": lambda: xlsx(("A", FAR.format(f"<row>{'<c/>' * (1 << 24)}</row>"))),
    "strings.xlsx": lambda: xlsx(
        ("A", "<sheetData><row>{}</row></sheetData>".format('<c t="s"><v>0</v></c>' * 5000)),
        strings=f"<si><t>{'ha ' * 9000}</t></si>",
    ),
    "repeated.ods": lambda: opendocument(
        "spreadsheet",
        '<table:table><table:table-row table:number-rows-repeated="999999999"><table:table-cell '
        'table:number-columns-repeated="999999999"><text:p>ha</text:p></table:table-cell></table:table-row></table:table>',
    ),
    "parts.epub": lambda: many_parts(21_000),
    "nested.eml": lambda: b"Content-Type: message/rfc822\n\n" * 1000 + b"Subject: in\n\nThe text.",
    "nested.rtf": lambda: rb"{\rtf1" + b"{" * 20_000 + b"text" + b"}" * 20_000 + b"}",
    "nested.odt": lambda: opendocument("text", "<text:section>" * 5000 + "<text:p>a</text:p>" + "</text:section>" * 5000),
    "nested.ipynb": lambda: b'{"cells": [{"outputs": [{"data": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}]}",
}


def many_parts(count):
    data = BytesIO(epub(PAGE.format("The text.")))
    with zipfile.ZipFile(data, "a") as book:
        for at in range(count):
            book.writestr(f"OPS/{at}", b"")
    return data.getvalue()


@pytest.mark.parametrize("name", HARMFUL)
def test_a_file_that_harms_fails_alone(name, tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / name).write_bytes(HARMFUL[name]())
    (folder / "z.md").write_text("The moon raises tides.")
    index = Index([folder], tmp_path / "index.db")
    try:
        assert index.refresh()
        files = index.store.files()
        assert (files[name].state, files["z.md"].state) == (FAILED, INDEXED), files[name]
        assert files[name].reason and index.progress.chunks == 1
    finally:
        index.close()


def test_cells_that_are_far_apart_cost_nothing():
    far = FAR.format('<row r="1048576"><c r="XFD1048576"><v>2</v></c></row>')
    assert shown(outline_of(".xlsx", xlsx(("A", far)))) == "A§1§2"


# ---- Indexes that are older than a format. ------------------------------------------------------------------------------


def test_an_old_index_reads_the_files_that_it_could_not(tmp_path, monkeypatch):
    folder, database = tmp_path / "notes", tmp_path / "index.db"
    folder.mkdir()
    (folder / "prices.xlsx").write_bytes(FILES["a workbook as it is seen"][1])
    (folder / "tides.md").write_text("The moon raises tides.")
    monkeypatch.setattr(writing, "VERSION", writing.VERSION - 1)
    index = Index([folder], database)
    index.refresh()
    stamp = index.store.files()["prices.xlsx"].stamp
    with index.store.writing() as connection:
        connection.execute("delete from place where file = (select id from file where path = 'prices.xlsx')")
        connection.execute("delete from chunk where not exists (select 1 from place where chunk = chunk.number)")
        connection.execute("update file set state = 'failed', reason = 'it is binary' where path = 'prices.xlsx'")
    index.close()
    monkeypatch.undo()
    index = Index([folder], database)
    try:
        assert index.refresh()
        found = index.store.files()["prices.xlsx"]
        assert (found.state, found.stamp) == (INDEXED, stamp) and found.num_chunks
    finally:
        index.close()
