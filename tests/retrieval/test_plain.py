"""Markdown, text, tables and logs: what is prose, what is left out and counted, and where rows are cut."""

import asyncio

import pytest
from slotcache.retrieval import Index, Query, Sizes, cut, reader
from slotcache.retrieval.chunks import count_tokens
from slotcache.retrieval.markdown import read_markdown, read_table, read_text
from slotcache.retrieval.outline import COMMENTS, ENCODED_DATA, FRONT_MATTER, Outline

SIZES = Sizes.around(300)
BASE64 = "iVBORw0KGgoAAAANSUhEUgAAB4AAAAQ4CAYAAADo08FDAAAgAElEQVR4Xuy9B5hdV3nv" * 10


def outline_of(text, read=read_markdown):
    outline = Outline()
    read(text.encode(), outline)
    return outline


def blocks(text, read=read_markdown):
    return [(section.headings, block.text) for section in outline_of(text, read).sections for block in section.blocks]


def test_code_within_a_line_is_no_fence():
    text = "# A\n\n```pip install x``` installs it.\n\n# B\n\nb\n\n# C\n\n~~~ `sh`\n# code\n~~~\n"
    assert blocks(text) == [
        (("A",), "```pip install x``` installs it."),
        (("B",), "b"),
        (("C",), "~~~ `sh`\n# code\n~~~"),
    ]


@pytest.mark.parametrize(
    "front, title",
    [
        ("---\ntitle: 'The pump'\ntags:\n  - a\n- b\ndraft: true\n---\n", "The pump"),
        ('+++\ntitle = "The pump"\ndate = 2024-05-01\n+++\n', "The pump"),
        ("---\nlayout: page\n...\n", ""),
    ],
)
def test_front_matter_is_no_prose_and_its_title_a_heading(front, title):
    text = f"{front}\nFirst.\n\n## Sub\n\nSecond.\n"
    above = (title,) if title else ()
    assert blocks(text) == [(above, "First."), ((*above, "Sub"), "Second.")]
    outline = outline_of(text)
    assert outline.left_out == {FRONT_MATTER: len("".join(front.split()))}
    for section in outline.sections:
        assert all(text[block.start : block.stop] == block.text for block in section.blocks)


def test_a_title_that_is_the_first_heading_stands_once():
    assert blocks("---\ntitle: Pump\n---\n# Pump\n\na\n") == [(("Pump",), "a")]


@pytest.mark.parametrize("text", ["---\n\nOne.\n\n---\n\nTwo.\n", "---\nA: this\nis prose.\n---\n", "---\na: 1\nno end\n"])
def test_a_rule_is_no_front_matter(text):
    outline = outline_of(text)
    assert not outline.left_out
    words = " ".join(block.text for section in outline.sections for block in section.blocks) + str(outline.sections)
    assert all(word in words for word in text.split() if word != "---")


def test_comments_are_no_prose():
    text = (
        "a <!-- one --> b\n\n<!-- two\n\n# no heading\n```\n-->\n\nc `<!-- d -->`\n\n```\n<!-- e -->\n```\n\nf <!-- open\n"
    )
    assert [" ".join(block.split()) for _, block in blocks(text)] == [
        "a b",
        "c `<!-- d -->`",
        "``` <!-- e --> ```",
        "f <!-- open",
    ]
    assert outline_of(text).left_out[COMMENTS] == len("<!--one--><!--two#noheading```-->")


@pytest.mark.parametrize(
    "encoded",
    [
        BASE64,
        "\n".join(BASE64[at : at + 76] for at in range(0, 600, 76)),
        "0123456789abcdef" * 20,
        "\n".join(["DEADBEEF0123" * 5] * 8),
    ],
    ids=["one line", "MIME", "hex", "hex lines"],
)
@pytest.mark.parametrize("read", [read_markdown, read_text])
def test_encoded_data_is_left_out_and_counted(encoded, read):
    text = f"Before it.\n\nThe picture: {encoded}\n\nBehind it.\n"
    found = " ".join(text for _, text in blocks(text, read))
    assert found.split() == ["Before", "it.", "The", "picture:", "Behind", "it."]
    assert outline_of(text, read).left_out[ENCODED_DATA] >= len(encoded) - 76


def test_a_notebook_with_a_picture_is_small():
    cell = '{"cells": [{"outputs": [{"data": {"image/png": "%s\\n"}}], "source": ["The pump is red."]}]}' % (BASE64 * 100)
    (chunk,) = cut(outline_of(cell, read_text).sections, SIZES)
    assert "The pump is red." in chunk.text and chunk.tokens < 100


@pytest.mark.parametrize(
    "text",
    [
        "a" * 400,
        "/usr/share/a-very-long-path/" * 12,
        "Donaudampfschifffahrtsgesellschaft" * 8,
        "-" * 300,
        "=" * 300,
        BASE64[:150],
        "ACGTTGCA" * 50,
        "語" * 300,
    ],
)
def test_long_words_are_text(text):
    assert blocks(text, read_text) == [((), text)] and not outline_of(text, read_text).left_out


ROWS = [f"{number},Pump {number},{number * 7} EUR,room {number % 9}" for number in range(400)]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_table_is_cut_between_rows_and_its_head_stands_in_each_chunk(delimiter):
    text = "\n".join(["No,Name,Price,Place", *ROWS]).replace(",", delimiter)
    chunks = list(cut(outline_of(text, read_table).sections, SIZES))
    lines = [line for chunk in chunks for line in chunk.text.split("\n")]
    assert len(chunks) > 5 and all(chunk.text.startswith("No | Name | Price | Place\n") for chunk in chunks)
    assert [line for line in lines if line[0] != "N"] == [row.replace(",", " | ") for row in ROWS]
    assert all(chunk.tokens <= SIZES.most for chunk in chunks)


def test_cells_of_a_table_keep_their_columns():
    text = 'Name;Note;Sum\n"Pump; old";"two\nlines";940\n;;12\n\n"a ""b""";;\n'
    assert blocks(text, read_table) == [((), 'Name | Note | Sum\nPump; old | two lines | 940\n |  | 12\na "b" |  |')]
    assert blocks("a,b\n" + '"' + "1,2\n" * 50_000, read_table)[0][1].count("1,2") == 50_000, "a quotation mark without end"


def test_a_table_in_markdown_is_cut_between_rows_with_its_head():
    rows = [f"| {number} | Pump {number} | {number * 7} EUR |" for number in range(300)]
    text = "\n".join(["# Stock\n\nAll pumps.\n", "| No | Name | Price |", "|---|:--|--:|", *rows, "", "The end."])
    chunks = list(cut(outline_of(text).sections, SIZES))
    tables = [chunk for chunk in chunks if "EUR" in chunk.text]
    assert len(tables) > 5 and all("| No | Name | Price |\n|---|:--|--:|\n| " in chunk.text for chunk in tables)
    assert [line for chunk in tables for line in chunk.text.split("\n") if "EUR" in line] == rows
    assert all(chunk.tokens <= SIZES.most and chunk.title == "Stock" for chunk in chunks)
    assert [chunk.text for chunk in chunks if "EUR" not in chunk.text] == ["All pumps.", "The end."]


def test_a_very_wide_head_leaves_room_for_rows():
    text = ",".join(f"Spalte {'ä' * 9}{number}" for number in range(300)) + "\n" + "\n".join(ROWS)
    chunks = list(cut(outline_of(text, read_table).sections, SIZES))
    assert all(chunk.tokens <= SIZES.most + 1 for chunk in chunks) and any("Pump 399" in chunk.text for chunk in chunks)


LOGS = {
    "iso": "2024-05-01T12:00:{:02} host pump[12]: pressure is {} bar, which is too high for this valve",
    "syslog": "May  1 12:00:{:02} host pump[12]: pressure is {} bar, which is too high for this valve",
    "apache": '10.0.0.1 - - [01/May/2024:12:00:{:02} +0000] "GET /pump/{} HTTP/1.1" 200 512 "-" "Mozilla/5.0 (X11)"',
}


@pytest.mark.parametrize("kind", LOGS)
def test_a_log_is_cut_between_lines(kind):
    lines = [LOGS[kind].format(number % 60, number) for number in range(500)]
    outline = outline_of("\n".join(lines), read_text)
    assert outline.has_records
    assert [line for chunk in cut(outline.sections, SIZES) for line in chunk.text.split("\n")] == lines


def test_a_diary_is_no_log():
    assert not outline_of("2024-05-01 We went to the harbour.\n\n" * 40, read_text).has_records


def test_a_log_has_a_bounded_share_of_vectors_and_words_find_the_rest(tmp_path, monkeypatch):
    import numpy as np
    from slotcache.retrieval import Embedder

    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    lines = [f"{LOGS['iso'].format(number % 60, number)} word{number}" for number in range(5000)]
    (tmp_path / "notes/pump.log").write_text("\n".join(lines))
    (tmp_path / "notes/a.md").write_text("# A\n\nOne.\n")
    texts = []
    embedder = Embedder("ones", lambda some: texts.extend(some) or np.ones((len(some), 8), np.float32))
    index = Index([tmp_path / "notes"], tmp_path / "index.db", embedder=embedder)
    assert index.refresh()
    files = index.store.files()
    log = files["pump.log"]
    assert log.num_chunks > 2 * reader.RECORD_VECTORS
    assert (log.num_vectors, log.num_by_words) == (reader.RECORD_VECTORS, log.num_chunks - reader.RECORD_VECTORS)
    assert (files["a.md"].num_vectors, files["a.md"].num_by_words) == (1, 0)
    assert len(texts) == reader.RECORD_VECTORS + 1 == index.progress.vectors
    assert index.progress.by_words == log.num_by_words
    hits = asyncio.run(index.search().hits(Query(text="word4999")))
    assert len(hits) == 1 and "word4999" in hits[0].chunk.text
    index.store.check()
    index.close()


@pytest.mark.parametrize(
    "unit",
    [
        "```",
        "````\n",
        "<!--",
        "<!-- `",
        "-->",
        "<!---->",
        "---\na: b\n",
        "+++\n",
        "|-",
        "|-\n",
        "a|b\n-|-\n",
        ":-",
        "A1b=\n",
        '"',
        ",\n",
    ],
    ids=repr,
)
def test_work_grows_with_the_size(unit, monkeypatch):
    """What is made of four times the text is four times as much, and no search begins again from each letter."""
    for read in (read_markdown, read_text, read_table):
        sizes = []
        for count in (10_000, 40_000):
            outline = outline_of(unit * count, read)
            kept = sum(count_tokens(block.text) for section in outline.sections for block in section.blocks)
            sizes.append(kept + sum(outline.left_out.values()))
        assert sizes[1] <= 4.1 * sizes[0] + 100
