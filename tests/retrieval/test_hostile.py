"""Documents made to take long, or to lose their text: each is read within the time that its reader has."""

import pytest
from slotcache.retrieval import Index
from slotcache.retrieval.charsets import decode
from slotcache.retrieval.docx import read_docx
from slotcache.retrieval.markdown import read_markdown
from slotcache.retrieval.outline import Outline
from support.office import NAMESPACE, assemble, docx, show

MANY = 150_000
HOSTILE = {
    "fields.md": "---\n" + "- : x\n" * 60 + "\nText",
    "table.md": "a | b\n" + " " * 999 + "-" * 999 + " " * 999 + "x | y\n",
    "heading.md": "# One" + " " * MANY + "two\n\nText",
    "attributes.md": "# One" + " " * MANY + "{#a}.\n\nText",
    "rules.md": "a\nb\n" + "---\n" * (2 * MANY),
    "permalink.html": "<pre><h1>One" + " " * MANY + "two</h1></pre>Text",
    "dots.pdf": assemble([show("." * MANY + "z", 40, (10, 700))]),
}


def test_no_document_takes_more_than_its_size(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, text in HOSTILE.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    index = Index([folder], tmp_path / "index.db")
    try:
        assert index.refresh()
        assert {file.path: file.reason for file in index.store.files().values() if file.reason} == {}
    finally:
        index.close()


@pytest.mark.parametrize(
    ("line", "heading"),
    [
        ("# One", "One"),
        ("  ###   One two ##  ", "One two"),
        ("# One#", "One#"),
        ("# C# #", "C#"),
        ("#\tOne {#anchor .wide}", "One"),
        ("# One {#anchor} ##", "One"),
    ],
)
def test_headings_of_markdown(line, heading):
    outline = Outline()
    read_markdown(f"{line}\n\nText".encode(), outline)
    assert outline.sections[-1].headings == (heading,)


@pytest.mark.parametrize("line", ["#One", "#", "## ##", "####### One"])
def test_what_is_no_heading_of_markdown(line):
    outline = Outline()
    read_markdown(f"{line}\n\nText".encode(), outline)
    assert outline.sections[-1].headings == ()


def test_an_escape_sequence_loses_no_letter():
    text = "Zahlungsart: € in größeren Beträgen \x1b$B und mehr"
    assert decode(text.encode()) == text


@pytest.mark.parametrize("label", ["idna", "undefined", "punycode", "unicode_escape", "raw-unicode-escape"])
def test_a_label_that_only_python_knows_is_none(label):
    assert decode("<p>Gr\xf6\xdfe \\u0041".encode("cp1252"), label) == "<p>Gr\xf6\xdfe \\u0041"


def test_a_symbol_without_a_code_loses_no_text():
    run = '<w:r><w:t>Pumps</w:t><w:sym w:font="Symbol" w:char="U+2022"/><w:t>42</w:t></w:r>'
    outline = Outline()
    read_docx(docx([], f'<w:document xmlns:w="{NAMESPACE}"><w:body><w:p>{run}</w:p></w:body></w:document>'), outline)
    assert [block.text for block in outline.sections[0].blocks] == ["Pumps42"]
    assert outline.left_out == {"symbols": 1}
