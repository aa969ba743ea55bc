"""Small files of each kind that once lost text, with what must be found in them; and what is left out is counted."""

import io
import zipfile

import pytest
from slotcache.retrieval import Index
from slotcache.retrieval.chunks import Sizes, cut
from slotcache.retrieval.markdown import read_text
from slotcache.retrieval.outline import Outline, Unreadable
from slotcache.retrieval.reader import FORMATS
from support.office import NAMESPACE, RELATIONS, assemble, package, show

# ---- PDF -----------------------------------------------------------------------------------------------------------------

PROSE = (
    "The harbour office keeps a record of all",
    "vessels that lie at anchor, and of those",
    "which left the mooring before the storm.",
    "Each keeper writes the morning report in",
    "the ledger of the station, with pressure",
    "and wind, and sends a copy to the pilot.",
)
OTHER = (
    "A second column tells of the lighthouse,",
    "whose lamp was repaired in the winter by",
    "two brothers from the village across the",
    "channel. Nobody else knew how the copper",
    "wheel had been made, nor why it would be",
    "turned to the left at the end of a week.",
)


def page(*lines, left=72, top=740, size=10, gap=14, font="F1"):
    """Return the content of a page with lines of text one below the other."""
    return "\n".join(show(line, left, (top - at * gap, size), font) for at, line in enumerate(lines))


def cells(rows, lefts=(72, 250, 400), top=700, size=10):
    """Return the content of a table, cell by cell; empty texts are not written."""
    shown = [
        show(text, left, (top - 16 * at, size))
        for at, row in enumerate(rows)
        for left, text in zip(lefts, row, strict=True)
        if text
    ]
    return "\n".join(shown)


def turned(content):
    """Return a content whose letters run upwards."""
    return f"q 0 1 -1 0 595 0 cm\n{content}\nQ"


def stream(content, about=""):
    return f"<< /Length {len(content)} {about} >>\nstream\n{content}\nendstream"


TABLE = [("Part", "Price", "Stock"), ("Pump", "940", ""), ("Valve", "", "12"), ("Gauge", "75", "3")]
TABLE_TEXT = "Part | Price | Stock\nPump | 940\nValve |  | 12\nGauge | 75 | 3"
BOTH_COLUMNS = f"{' '.join(PROSE)}\n\n{' '.join(OTHER)}"


def field(about, value="Rosalind", **more):
    """Return a page with a field of a form or with a note, whose number is 7."""
    form = "/AcroForm << /Fields [7 0 R] /DR << /Font << /Helv 3 0 R >> >> /DA (/Helv 10 Tf 0 g) >>"
    note = f"<< /Type /Annot /Rect [150 700 400 716] /F 4 /P 5 0 R {about.format(value=value)} >>"
    return assemble(
        [page("Name of the keeper:", top=704)],
        about="/Annots [7 0 R]",
        catalog=form,
        objects=[note, *more.get("objects", ())],
    )


def bookmarks(pages, *titles):
    """Return a PDF whose contents name titles, each with the number of its page from 0."""
    first = 5 + 2 * len(pages)
    items = []
    for at, (title, number) in enumerate(titles):
        after = f"/Next {first + 2 + at} 0 R" if at + 1 < len(titles) else ""
        items.append(f"<< /Title ({title}) /Parent {first} 0 R /Dest [{5 + 2 * number} 0 R /Fit] {after} >>")
    root = f"<< /Type /Outlines /First {first + 1} 0 R /Last {first + len(titles)} 0 R /Count {len(titles)} >>"
    return assemble(pages, catalog=f"/Outlines {first} 0 R", objects=[root, *items])


def type_3(content):
    """Return a PDF with a font of type 3 whose letters are drawn by their own matrix, and have no size."""
    shape, map = stream("500 0 0 0 400 700 d1 0 0 400 700 re f"), "<61> <0061> <62> <0062> <63> <0063>"
    unicode = stream(
        "/CIDInit /ProcSet findresource begin 12 dict begin begincmap /CMapName /X def /CMapType 2 def\n"
        "1 begincodespacerange <00> <ff> "
        f"endcodespacerange\n3 beginbfchar {map} endbfchar\nendcmap end end"
    )
    font = (
        "<< /Type /Font /Subtype /Type3 /FontBBox [0 0 0 0] /FontMatrix [1 0 0 1 0 0] /FirstChar 97 /LastChar 99 "
        "/Widths [500 500 500] /CharProcs << /a 8 0 R /b 8 0 R /c 8 0 R >> /ToUnicode 9 0 R "
        "/Encoding << /Type /Encoding /Differences [97 /a /b /c] >> >>"
    )
    return assemble([content], fonts="/T3 7 0 R", objects=[font, shape, unicode])


def without_letters():
    """Return a PDF with a font that says nothing of what its glyphs mean: A is 36, the full stop 17."""
    text = "The keeper writes 1,204 notes (in 1999) of the storm. Each is long: 17 pages, 3.5 kg."
    glyphs = "".join(f"{ord(letter) - 29:04x}" for letter in text)
    font = "<< /Type /Font /Subtype /Type0 /BaseFont /ABCDEF+Some /Encoding /Identity-H /DescendantFonts [8 0 R] >>"
    inner = (
        "<< /Type /Font /Subtype /CIDFontType2 /BaseFont /ABCDEF+Some /DW 500 /FontDescriptor 9 0 R "
        "/CIDSystemInfo << /Registry (Adobe) /Ordering (Identity) /Supplement 0 >> >>"
    )
    about = (
        "<< /Type /FontDescriptor /FontName /ABCDEF+Some /Flags 4 /FontBBox [0 0 1000 1000] /ItalicAngle 0 "
        "/Ascent 800 /Descent -200 >>"
    )
    content = "\n".join(f"BT /F9 10 Tf 72 {740 - 14 * at} Td <{glyphs}> Tj ET" for at in range(5))
    return assemble([content], fonts="/F9 7 0 R", objects=[font, inner, about])


PDFS = {
    "the sum of an invoice": (
        assemble([page("Invoice 17", "Pump repaired", "940")]),
        ["Invoice 17", "Pump repaired", "940"],
    ),
    "the sums of two invoices": (
        assemble([page("Invoice 17", "Pump repaired", "940"), page("Invoice 18", "Valve replaced", "120")]),
        ["Invoice 17", "Pump repaired", "940", "Invoice 18", "Valve replaced", "120"],
    ),
    "sums at the foot of three pages": (
        assemble([page(f"Month {name}", *PROSE, sum) for name, sum in (("May", "940"), ("June", "120"), ("July", "377"))]),
        ["940", "120", "377", "Month May", "Month June", "Month July"],
    ),
    "pages that are all the same": (assemble([page("Hello world")] * 5), ["Hello world"]),
    "pages with numbers alone": (assemble([page(str(number)) for number in range(1, 6)]), ["1", "5"]),
    "a head on all pages": (
        assemble([page("Harbour office", *PROSE, f"Page {at}") for at in range(1, 6)]),
        ["Harbour office", *PROSE],
    ),
    "prices behind dots": (
        assemble([page("Pump repaired", "Pump repaired .......... 940", "Valve .......... 12")]),
        ["940", "Valve ... 12"],
    ),
    "a field without a picture": (field("/Subtype /Widget /FT /Tx /T (keeper) /V ({value})"), ["Rosalind"]),
    "a field with a picture": (
        field(
            "/Subtype /Widget /FT /Tx /T (keeper) /V ({value}) /AP << /N 8 0 R >>",
            objects=[
                stream(
                    "/Tx BMC BT /F1 10 Tf 2 4 Td (Rosalind) Tj ET EMC",
                    "/Type /XObject /Subtype /Form /BBox [0 0 250 16] /Resources << /Font << /F1 3 0 R >> >>",
                )
            ],
        ),
        ["Name of the keeper: Rosalind"],
    ),
    "a choice": (
        field("/Subtype /Widget /FT /Ch /Ff 131072 /T (keeper) /Opt [(Ada) (Rosalind)] /V ({value})"),
        ["Rosalind"],
    ),
    "a note on the page": (
        field("/Subtype /FreeText /DA (/Helv 10 Tf) /Contents ({value} was here)"),
        ["Rosalind was here"],
    ),
    "a comment": (field("/Subtype /Text /Contents ({value} asks why)"), ["Rosalind asks why"]),
    "a signature": (
        field(
            "/Subtype /Widget /FT /Sig /T (signed) /AP << /N 8 0 R >>",
            objects=[
                stream(
                    "BT /F1 8 Tf 2 4 Td (Digitally signed by Rosalind) Tj ET",
                    "/Type /XObject /Subtype /Form /BBox [0 0 250 16] /Resources << /Font << /F1 3 0 R >> >>",
                )
            ],
        ),
        ["Digitally signed by Rosalind"],
    ),
    "a font of type 3": (
        type_3("\n".join(f"BT /T3 0.02 Tf 72 {700 - 20 * at} Td (cab) Tj ET" for at in range(9)) + page("Large", "letters")),
        ["cab", "Large"],
    ),
    "a table": (assemble([cells(TABLE)]), [TABLE_TEXT]),
    "a table between paragraphs": (
        assemble([f"{page(*PROSE)}\n{cells(TABLE, top=600)}\n{page(*OTHER, top=500)}"]),
        [" ".join(PROSE), TABLE_TEXT, " ".join(OTHER)],
    ),
    "a table that lies on its side": (assemble([turned(cells(TABLE, top=500))]), [TABLE_TEXT]),
    "a table on a turned page": (assemble([turned(cells(TABLE, top=500))], about="/Rotate 90"), [TABLE_TEXT]),
    "paragraphs on a turned page": (
        assemble([turned(f"{page(*PROSE, top=500)}\n{page(*OTHER, top=380)}")], about="/Rotate 90"),
        [" ".join(PROSE), " ".join(OTHER)],
    ),
    "columns written from row to row": (
        assemble(
            [
                "\n".join(
                    show(text, left, (700 - 14 * at, 10))
                    for at, pair in enumerate(zip(PROSE, OTHER, strict=True))
                    for left, text in zip((72, 320), pair, strict=True)
                )
            ]
        ),
        [BOTH_COLUMNS],
    ),
    "columns written in the wrong order": (
        assemble([f"{page(*OTHER, left=320, top=697)}\n{page(*PROSE, top=700)}"]),
        [BOTH_COLUMNS],
    ),
    "a head that is written last": (
        assemble([f"{page(*PROSE)}\n{page('Annual report', top=780, size=18)}"]),
        ["Annual report"],
    ),
}

# ---- HTML ----------------------------------------------------------------------------------------------------------------

PARAGRAPH = f"<p>{' '.join(PROSE)}</p>"
PAGES = {
    "a page with one small article": (
        f"<body><p>Open from nine.</p><article>News</article>{PARAGRAPH}",
        ["Open from nine.", "News", PROSE[0]],
    ),
    "a page with a small main": (f"<body>{PARAGRAPH}<main><p>Search</p></main>", [PROSE[0], "Search"]),
    "empty cells": ("<table><tr><td>Pump<td><td>12<tr><td><td>940</table>", ["Pump | | 12\n | 940"]),
    "a cell over two rows": (
        "<table><tr><th rowspan=2>Pump<td>940<td>12<tr><td>75<td>3<tr><td>Valve<td>8</table>",
        ["Pump | 940 | 12\n | 75 | 3\nValve | 8"],
    ),
    "a cell over two columns": (
        "<table><tr><td colspan=2>Pump<td>12<tr><td>a<td>b<td>c</table>",
        ["Pump | | 12\na | b | c"],
    ),
    "a list that begins with three": ("<ol start=3><li>Rent<li>Notice<li value=9>End</ol>", ["3. Rent\n4. Notice\n9. End"]),
    "a list with letters": ("<ol type=a><li>Rent<li><p>Notice</p></ol>", ["a. Rent\nb. Notice"]),
    "a list with Roman numbers": ("<ol type=I start=4><li>Rent</ol>", ["IV. Rent"]),
    "a list backwards": ("<ol reversed><li>Rent<li>Notice</ol>", ["2. Rent\n1. Notice"]),
    "lists in lists": ("<ol><li>Rent<ul><li>due</ul><ol><li>late</ol></ol>", ["1. Rent\n  - due\n  1. late"]),
    "the footer of an article": ("<article><p>Text</p><footer>by Rosalind</footer></article>", ["by Rosalind"]),
    "readings": ("<p><ruby>東<rt>とう</rt>京<rt>きょう</rt></ruby>です", ["東京(とうきょう)です"]),
    "a formula": ("<p>So <math><mi>x</mi><mo>=</mo><mn>42</mn></math>.", ["x=42"]),
    "what a picture shows": ("<p>See <img src=a.png alt='the pump'> below.", ["See the pump below."]),
    "a text to fill in": ("<form><textarea>Dear Rosalind</textarea></form>", ["Dear Rosalind"]),
}

# ---- Word ----------------------------------------------------------------------------------------------------------------

NAMESPACES = (
    f'xmlns:w="{NAMESPACE}" xmlns:r="http://schemas.openxmlformats.org/officeDocument/2006/relationships" '
    'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006" '
    'xmlns:wps="http://schemas.microsoft.com/office/word/2010/wordprocessingShape" xmlns:v="urn:schemas-microsoft-com:vml"'
)
STYLES = """<w:style w:type="paragraph" w:styleId="Title"><w:name w:val="Title"/></w:style>
<w:style w:type="paragraph" w:styleId="H1"><w:name w:val="heading 1"/>
<w:pPr><w:numPr><w:numId w:val="1"/></w:numPr></w:pPr></w:style>
<w:style w:type="paragraph" w:styleId="H2"><w:name w:val="heading 2"/><w:basedOn w:val="H1"/></w:style>
<w:style w:type="paragraph" w:styleId="Own"><w:name w:val="Clause"/><w:pPr><w:outlineLvl w:val="0"/></w:pPr></w:style>
<w:style w:type="paragraph" w:styleId="T1"><w:name w:val="toc 1"/></w:style>"""
NUMBERING = """<w:abstractNum w:abstractNumId="0">
<w:lvl w:ilvl="0"><w:start w:val="4"/><w:numFmt w:val="decimal"/><w:pStyle w:val="H1"/><w:lvlText w:val="%1"/></w:lvl>
<w:lvl w:ilvl="1"><w:start w:val="1"/><w:numFmt w:val="decimal"/><w:pStyle w:val="H2"/><w:lvlText w:val="%1.%2"/></w:lvl>
</w:abstractNum>
<w:abstractNum w:abstractNumId="1">
<w:lvl w:ilvl="0"><w:start w:val="1"/><w:numFmt w:val="lowerLetter"/><w:lvlText w:val="(%1)"/></w:lvl>
<w:lvl w:ilvl="1"><w:start w:val="1"/><w:numFmt w:val="upperRoman"/><w:lvlText w:val="%2."/></w:lvl>
</w:abstractNum>
<w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num><w:num w:numId="2"><w:abstractNumId w:val="1"/></w:num>
<w:num w:numId="3"><w:abstractNumId w:val="1"/>
<w:lvlOverride w:ilvl="0"><w:startOverride w:val="1"/></w:lvlOverride></w:num>"""


def p(text, style="", about=""):
    return f"<w:p><w:pPr>{style and f'<w:pStyle w:val={style!r}/>'}{about}</w:pPr>{text}</w:p>"


def t(text, about=""):
    return f'<w:r><w:rPr>{about}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


def item(text, list=2, level=0):
    return p(t(text), about=f'<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{list}"/></w:numPr>')


def tc(text, about=""):
    return f"<w:tc><w:tcPr>{about}</w:tcPr>{p(t(text)) if text else '<w:p/>'}</w:tc>"


def tr(*cells, about=""):
    return f"<w:tr><w:trPr>{about}</w:trPr>{''.join(cells)}</w:tr>"


def word(body, main="word/document.xml", **parts):
    """Return a document. parts: of other names, each named in its relations; an underscore is a dot."""
    related = "".join(
        f'<Relationship Id="{name}" Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/{kind}" '
        f'Target="{name.replace("_", ".")}"/>'
        for name, (kind, _) in parts.items()
    )
    relations = '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">{}</Relationships>'
    folder, _, file = main.rpartition("/")
    files = {
        "_rels/.rels": RELATIONS.format(kind="officeDocument", target=main),
        f"{folder}/_rels/{file}.rels": relations.format(related),
        f"{folder}/styles.xml": f"<w:styles {NAMESPACES}>{STYLES}</w:styles>",
        f"{folder}/numbering.xml": f"<w:numbering {NAMESPACES}>{NUMBERING}</w:numbering>",
        main: f"<w:document {NAMESPACES}><w:body>{body}</w:body></w:document>",
    }
    return package(
        files | {f"{folder}/{name.replace('_', '.')}": text.format(NAMESPACES) for name, (_, text) in parts.items()}
    )


A = 'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"'
R = 'xmlns:r="http://schemas.openxmlformats.org/officeDocument/2006/relationships"'
DIAGRAM = (
    f'<dgm:dataModel xmlns:dgm="http://schemas.openxmlformats.org/drawingml/2006/diagram" {A}><dgm:ptLst>'
    "<dgm:pt><dgm:t><a:p><a:r><a:t>Order the pump</a:t></a:r></a:p></dgm:t></dgm:pt>"
    "<dgm:pt><dgm:t><a:p><a:r><a:t>Pay </a:t></a:r><a:r><a:t>in May</a:t></a:r></a:p></dgm:t></dgm:pt>"
    "</dgm:ptLst></dgm:dataModel>"
)
CHART = (
    f'<c:chartSpace xmlns:c="http://schemas.openxmlformats.org/drawingml/2006/chart" {A}><c:chart><c:title><c:tx><c:rich>'
    "<a:p><a:r><a:t>Sales by quarter</a:t></a:r></a:p></c:rich></c:tx></c:title></c:chart></c:chartSpace>"
)


def drawing(graphic):
    """Return a run with a drawing. graphic: what names its part."""
    return f"<w:r><w:drawing><a:graphic {A} {R}><a:graphicData>{graphic}</a:graphicData></a:graphic></w:drawing></w:r>"


DOCUMENTS = {
    "diagrams and charts": (
        word(
            p(t("How we buy:") + drawing('<d:relIds xmlns:d="d" r:dm="data_xml" r:lo="none"/>'))
            + p(t("How we sell:") + drawing('<c:chart xmlns:c="c" r:id="chart_xml"/>')),
            data_xml=("diagramData", DIAGRAM),
            chart_xml=("chart", CHART),
        ),
        ["How we buy:", "Order the pump", "Pay in May", "How we sell:", "Sales by quarter"],
    ),
    "a main part of another name": (
        word(p(t("Written in the browser.")), main="word/document2.xml"),
        ["Written in the browser."],
    ),
    "numbers of headings": (
        word(p(t("Rent"), "H1") + p(t("Due"), "H2") + p(t("Notice"), "H2") + p(t("Three months."))),
        ["4 Rent > 4.2 Notice | Three months."],
    ),
    "a heading by its level": (word(p(t("Notice"), "Own") + p(t("Three months."))), ["Notice | Three months."]),
    "numbers of clauses": (
        word(item("Rent") + item("Notice") + item("early", level=1) + item("late", level=1) + item("End")),
        ["(a) Rent\n(b) Notice\n  I. early\n  II. late\n(c) End"],
    ),
    "a list that begins anew": (word(item("Rent") + p(t("Then")) + item("Notice", list=3)), ["(a) Rent", "(a) Notice"]),
    "a field": (word(p('<w:fldSimple w:instr="DATE">' + t("12 May") + "</w:fldSimple>")), ["12 May"]),
    "readings": (
        word(p(f"<w:r><w:ruby><w:rt>{t('とう')}</w:rt><w:rubyBase>{t('東')}</w:rubyBase></w:ruby></w:r>{t('京')}")),
        ["東(とう)京"],
    ),
    "text of another direction": (
        word(p(f'<w:bdo w:val="rtl">{t("shalom")}</w:bdo><w:dir w:val="rtl">{t("salam")}</w:dir>')),
        ["shalomsalam"],
    ),
    "a formula": (
        word(
            p(
                "<m:oMath><m:f><m:num><m:r><m:t>a</m:t></m:r></m:num><m:den><m:r><m:t>b</m:t></m:r></m:den></m:f><m:sSup><m:e><m:r><m:t>c</m:t></m:r></m:e><m:sup><m:r><m:t>2</m:t></m:r></m:sup></m:sSup></m:oMath>"
            )
        ),
        ["a/bc^2"],
    ),
    "headers and footers": (
        word(
            p(t("Text")) + '<w:sectPr><w:headerReference r:id="head_xml"/><w:footerReference r:id="foot_xml"/></w:sectPr>',
            head_xml=("header", f"<w:hdr {{}}>{p(t('Rosalind and Sons'))}</w:hdr>"),
            foot_xml=("footer", f"<w:ftr {{}}>{p(t('Account 1204'))}</w:ftr>"),
        ),
        ["Rosalind and Sons", "Account 1204", "Text"],
    ),
    "a page that is set in": (
        word(p(t("Text")) + '<w:altChunk r:id="chunk_html"/>', chunk_html=("aFChunk", "<p>Set in by Rosalind</p>")),
        ["Set in by Rosalind"],
    ),
    "a large first letter": (
        word(p(t("O"), about='<w:framePr w:dropCap="drop"/>') + p(t("nce upon a time"))),
        ["Once upon a time"],
    ),
    "a deleted end of a paragraph": (
        word(p(t("Once "), about="<w:rPr><w:del/></w:rPr>") + p(t("upon a time"))),
        ["Once upon a time"],
    ),
    "a deleted end of the last paragraph": (word(p(t("The end"), about="<w:rPr><w:del/></w:rPr>")), ["The end"]),
    "empty and merged cells": (
        word(
            "<w:tbl>"
            + tr(tc("Pump", '<w:vMerge w:val="restart"/>'), tc("940"), tc("12"))
            + tr(tc("", "<w:vMerge/>"), tc("75"), tc("3"))
            + tr(tc("Valve", '<w:gridSpan w:val="2"/>'), tc("8"))
            + tr(tc(""), tc(""), tc("9"))
            + tr(tc("late"), about='<w:gridBefore w:val="2"/>')
            + "</w:tbl>"
        ),
        ["Pump | 940 | 12\n | 75 | 3\nValve |  | 8\n |  | 9\n |  | late"],
    ),
    "a footnote": (
        word(
            p(t("Text") + '<w:r><w:footnoteReference w:id="2"/></w:r>'),
            footnotes_xml=(
                "footnotes",
                f'<w:footnotes {{}}><w:footnote w:id="2">{p(t("By Rosalind."))}</w:footnote></w:footnotes>',
            ),
        ),
        ["Text[1]", "[1] By Rosalind."],
    ),
    "a box of text": (
        word(
            p(
                t("Text")
                + "<w:r><mc:AlternateContent><mc:Choice Requires='wps'><wps:txbx><w:txbxContent>"
                + p(t("In a box"))
                + "</w:txbxContent></wps:txbx></mc:Choice><mc:Fallback><w:pict><v:textbox><w:txbxContent>"
                + p(t("In a box"))
                + "</w:txbxContent></v:textbox></w:pict></mc:Fallback></mc:AlternateContent></w:r>"
            )
        ),
        ["Text", "In a box"],
    ),
    "an element that nobody knows": (word(f"<w:new><w:newer>{p(t('Still text'))}</w:newer></w:new>"), ["Still text"]),
    "a symbol": (word(p(t("angle ") + '<w:r><w:sym w:font="Symbol" w:char="F061"/></w:r>')), ["angle α"]),
}


def read(suffix, data):
    outline = Outline()
    FORMATS.get(suffix, read_text)(data, outline)
    return outline


def texts(outline):
    """Return headings and texts, a heading path and a bar in front of each text."""
    found = []
    for section in outline.sections:
        title = " > ".join(section.headings)
        found += [f"{title} | {block.text}" if title else block.text for block in section.blocks] or [title]
    return "\n\n".join(found)


@pytest.mark.parametrize("name", PDFS)
def test_a_pdf_keeps(name):
    data, expected = PDFS[name]
    found = texts(read(".pdf", data))
    assert [text for text in expected if text not in found and text not in found.replace("\n", " ")] == [], found


@pytest.mark.parametrize("name", PAGES)
def test_a_page_keeps(name):
    markup, expected = PAGES[name]
    found = texts(read(".html", markup.encode()))
    assert [text for text in expected if text not in found] == [], found


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_word_document_keeps(name):
    data, expected = DOCUMENTS[name]
    found = texts(read(".docx", data))
    assert [text for text in expected if text not in found] == [], found


def test_headings_are_those_of_the_documents_own_contents():
    prose = page(*PROSE, top=600)
    large = page("The whole of this is one long thought", top=640, size=16)
    pages = [f"{page(title)}\n{prose}\n{large}" for title in ("1 Rent", "2 Notice", "3 End")]
    outline = read(".pdf", bookmarks(pages, ("Rent", 0), ("Notice", 1), ("End", 2)))
    assert [section.headings for section in outline.sections if section.headings] == [("1 Rent",), ("2 Notice",), ("3 End",)]


@pytest.mark.parametrize("number", ["3.2", "IV.", "A.1", "Appendix B:", "Chapter 3"])
def test_a_number_that_the_contents_lack_is_no_part_of_a_heading(number):
    assert headings_beside(number) == [(f"{number} {title}",) for title in ("Rent", "Notice", "End")]


@pytest.mark.parametrize("word", ["The", "How", "Late", "NEW"])
def test_a_word_in_front_of_a_heading_is_no_number(word):
    assert headings_beside(word) == []


def headings_beside(first):
    """Return the headings of three pages whose titles have a first word that the document's own contents lack."""
    pages = [f"{page(f'{first} {title}')}\n{page(*PROSE, top=600)}" for title in ("Rent", "Notice", "End")]
    outline = read(".pdf", bookmarks(pages, ("Rent", 0), ("Notice", 1), ("End", 2)))
    return [section.headings for section in outline.sections if section.headings]


def test_a_bold_line_that_stands_alone_is_a_heading():
    bold = show("Notice of termination", 72, (700, 10), "F3")
    data = assemble(
        [f"{page(*PROSE, top=800)}\n{bold}\n{page(*OTHER, top=680)}"],
        fonts="/F3 7 0 R",
        objects=["<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica-Bold >>"],
    )
    assert [section.headings for section in read(".pdf", data).sections if section.headings] == [("Notice of termination",)]


def test_a_line_that_ends_with_its_page_is_no_heading():
    lines = [
        show(text, left, (700 - 30 * at, 16))
        for at, title in enumerate(("Rent", "Notice"))
        for text, left in ((title, 72), (str(at + 7), 500))
    ]
    outline = read(".pdf", assemble(["\n".join([*lines, page(*PROSE, top=600)])]))
    assert not any(section.headings for section in outline.sections)
    assert "Rent | 7" in texts(outline)


def test_a_font_without_letters_is_named():
    with pytest.raises(Unreadable, match="ocrmypdf"):
        read(".pdf", without_letters())


def test_what_is_left_out_is_counted():
    pages = [page("Harbour office", *(f"{line} {'abcde'[at]}" for line in PROSE), str(at + 7)) for at in range(5)]
    heads = read(".pdf", assemble(pages))
    assert heads.left_out == {"running_heads": 4 * len("Harbouroffice"), "page_numbers": len("7891011")}
    contents = page("Contents", "Rent .................. 2", "Notice .................. 3")
    listed = read(".pdf", assemble([contents, page("Rent", *PROSE), page("Notice", *PROSE)]))
    assert listed.left_out["contents"] == len("Rent..................2Notice..................3")
    main = f"<main>{PARAGRAPH * 3}<p hidden>secret</p><button>Copy</button></main>"
    markup = f"<body><nav>Home</nav><div>Related</div>{main}<footer>Imprint</footer>"
    left_out = read(".html", markup.encode()).left_out
    assert left_out == {"navigation": len("HomeRelatedImprint"), "hidden": len("secret"), "controls": len("Copy")}
    hidden = t("secret", "<w:vanish/>") + t("seen") + "<w:del><w:r><w:delText>gone</w:delText></w:r></w:del>"
    assert read(".docx", word(p(hidden) + p(t("Rent 3"), "T1"))).left_out == {"hidden": 6, "deleted": 4, "contents": 5}


def test_an_index_keeps_what_was_left_out(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.html").write_text("<nav>Home</nav><p>Text")
    (folder / "b.md").write_text("Text")
    index = Index([folder], tmp_path / "index.db")
    try:
        assert index.refresh()
        assert {path: file.left_out for path, file in index.store.files().items()} == {
            "a.html": {"navigation": 4},
            "b.md": {},
        }
    finally:
        index.close()


def test_a_damaged_page_does_not_hide_the_others():
    data = assemble([page("First page"), page("Second page")])
    damaged = data.replace(b"/Kids [5 0 R 7 0 R] /Count 2", b"/Kids [5 0 R 9 0 R] /Count 2")
    outline = read(".pdf", damaged)
    assert "First page" in texts(outline)
    assert outline.left_out == {"damaged_pages": 1}


def test_an_old_word_document_says_what_helps():
    with pytest.raises(Unreadable, match="save it as DOCX"):
        read(".docx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(512))


def test_a_word_document_set_into_itself_is_bounded():
    inner = p(t("Text"))
    data = word(inner + '<w:altChunk r:id="chunk_docx"/>', chunk_docx=("aFChunk", "not a document"))
    for _ in range(6):
        outer = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(outer, "w") as new:
            for name in old.namelist():
                new.writestr(name, data if name.endswith("chunk.docx") else old.read(name))
        data = outer.getvalue()
    outline = read(".docx", data)
    assert texts(outline).count("Text") == 4
    assert outline.left_out["embedded_files"] > 0


def test_a_long_table_is_cut_between_rows_with_its_head():
    rows = [tr(tc(f"Pump {number}"), tc(f"{number * 7} EUR")) for number in range(200)]
    table = f"<w:tbl>{tr(tc('Part'), tc('Price'))}{''.join(rows)}</w:tbl>"
    chunks = list(cut(read(".docx", word(p(t("All pumps.")) + table)).sections, Sizes.around(100)))
    tables = [chunk.text for chunk in chunks if "EUR" in chunk.text]
    assert len(tables) > 5 and all(text.startswith("Part | Price\nPump ") for text in tables)
    assert sum(text.count("EUR") for text in tables) == 200 and chunks[0].text == "All pumps."
