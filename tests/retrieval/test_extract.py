"""Files of all formats to the same chunks, with their pages, and a reason for each file that cannot be read."""

import re
from difflib import SequenceMatcher

import pytest
from slotcache.retrieval import Sizes, cut
from slotcache.retrieval.charsets import decode
from slotcache.retrieval.markdown import read_text
from slotcache.retrieval.outline import Outline, Unreadable
from slotcache.retrieval.reader import FORMATS
from support.office import RELATIONS, Part, docx, html, markdown, package, pdf

from retrieval.manuals import MANUALS

WORD = re.compile(r"\w+")
HEADER = "Harbour office"  # of each page
MOST_DIFFERENT = 0.05  # of the words
DOCUMENT = '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">{}</w:document>'


def sections(suffix, data):
    outline = Outline()
    FORMATS.get(suffix, read_text)(data, outline)
    return outline.sections


def chunks(suffix, data):
    return list(cut(sections(suffix, data), Sizes.around(300)))


def words(chunk):
    return WORD.findall(chunk.text)


def blocks(suffix, text):
    return [(section.headings, block.text) for section in sections(suffix, text.encode()) for block in section.blocks]


@pytest.mark.parametrize("name", MANUALS)
@pytest.mark.parametrize("suffix", [".html", ".docx", ".pdf"])
def test_a_document_has_the_same_chunks_in_each_format(name, suffix):
    def write_pdf(parts):
        return pdf(parts, header=HEADER if name != "note" else "")[0]  # on a single page a header is text like any other

    parts, write = MANUALS[name], {".html": html, ".docx": docx, ".pdf": write_pdf}[suffix]
    expected, found = chunks(".md", markdown(parts)), chunks(suffix, write(parts))
    assert [chunk.title for chunk in found] == [chunk.title for chunk in expected]
    for one, other in zip(expected, found, strict=True):
        same = SequenceMatcher(None, words(one), words(other), autojunk=False).ratio()
        assert same >= 1 - MOST_DIFFERENT, (one.title, one.text, other.text)


@pytest.mark.parametrize("name", MANUALS)
def test_a_pdf_has_the_right_pages(name):
    data, starts = pdf(MANUALS[name], HEADER)
    assert max(starts.values()) > 1 or name == "note"
    known = {" ".join(WORD.findall(part.text)): starts[part.text] for part in MANUALS[name] if part.kind == "p"}
    found = [block for section in sections(".pdf", data) for block in section.blocks]
    pages = {" ".join(WORD.findall(block.text)): block.page for block in found}
    shared = known.keys() & pages.keys()
    assert len(shared) > 0.9 * len(known)
    assert {text: pages[text] for text in shared} == {text: known[text] for text in shared}
    for chunk in chunks(".pdf", data):
        assert chunk.page == next(block.page for block in found if block.stop > chunk.start)


def test_markdown_has_headings_of_both_kinds_and_code_stays_whole():
    text = "Intro\n\nTop\n===\n\nA *b* [c](d).\nE.\n\n## Sub ## \n\n```sh\n# no heading\n\n---\n```\n"
    text += "\n### Deep {#deep}\n- one\n- two\n"
    assert blocks(".md", text) == [
        ((), "Intro"),
        (("Top",), "A *b* [c](d).\nE."),
        (("Top", "Sub"), "```sh\n# no heading\n\n---\n```"),
        (("Top", "Sub", "Deep"), "- one\n- two"),
    ]
    for section in sections(".md", text.encode()):
        assert all(text[block.start : block.stop].strip() == block.text for block in section.blocks)


def test_html_is_read_as_it_is_seen():
    text = """<title>T</title><body><nav>menu</nav><h2>A&amp;B <a href=#x>¶</a></h2>one<br>two <b>bold</b>
    <script>x()</script><ul><li>a<ul><li>b</ul><li><p>c</p></ul><table><tr><th>k<th>v<tr><td>1<td><p>2</p><p>3</p></table>
    <pre>if x:\n\n    y</pre><div>last</div>"""
    assert blocks(".html", text) == [
        (("T", "A&B"), "one\ntwo bold"),
        (("T", "A&B"), "- a\n  - b\n- c"),
        (("T", "A&B"), "k | v\n1 | 2 3"),
        (("T", "A&B"), "if x:\n\n    y"),
        (("T", "A&B"), "last"),
    ]


def test_text_is_decoded_and_binary_data_is_not():
    assert decode("zwölf".encode()) == decode("zwölf".encode("utf-16")) == decode("zwölf".encode("cp1252")) == "zwölf"
    assert decode("тень".encode("koi8-r"), "koi8-r") == "тень"
    assert decode(b"\xff", "no such encoding") == decode(b"\xff", "hex") == "ÿ"
    with pytest.raises(Unreadable, match="binary"):
        decode(b"\x7fELF\0\0")


@pytest.mark.parametrize(
    "suffix, data, reason",
    [
        (".pdf", b"%PDF-1.4 but no more", "not a PDF"),
        (".pdf", pdf([Part("p", "text")])[0].replace(b"Tj", b"  "), "no text"),
        (".docx", b"PK\x03\x04 broken", "not a Word document"),
        (".docx", package({"word/other.xml": ""}), "without word/document.xml"),
        (".docx", docx([], document="<w:document"), "not a Word document"),
        (".docx", docx([], document=DOCUMENT.format(" " * (65 << 20))), "unpacks to 65 MiB"),
    ],
)
def test_a_broken_file_has_a_reason(suffix, data, reason):
    with pytest.raises(Unreadable, match=reason):
        sections(suffix, data)


def test_a_word_document_is_no_more_than_what_was_counted():
    """It says itself where its text is. Pictures may be as large as they like."""
    parts = {
        "_rels/.rels": RELATIONS.format(kind="officeDocument", target="word/big.bin"),
        "word/document.xml": DOCUMENT.format("<w:body><w:p><w:r><w:t>The text.</w:t></w:r></w:p></w:body>"),
        "word/big.bin": DOCUMENT.format(f"<w:body><w:p><w:r><w:t>Other text.{'x' * (65 << 20)}</w:t></w:r></w:p></w:body>"),
    }
    (found,) = sections(".docx", package(parts))
    assert [block.text for block in found.blocks] == ["The text."]


def test_text_has_no_control_characters():
    (block,) = (block for section in sections(".txt", b"a\x07b\x1b[31m\x0cc\xc2\xad\n") for block in section.blocks)
    assert block.text == "ab[31m\nc"
