"""Chunks: whole subtrees, cuts between paragraphs, all text once, and few changes after an edit."""

from random import Random
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcache.ordering import Document
from slotcache.retrieval import Sizes, cut
from slotcache.retrieval.markdown import read_markdown, read_text
from slotcache.retrieval.outline import Outline
from support.office import Part, markdown

from retrieval.manuals import MANUALS, sentences

SIZES = Sizes.around(300)


def chunks(data, read=read_markdown, sizes=SIZES):
    outline = Outline()
    read(data if isinstance(data, bytes) else data.encode(), outline)
    return list(cut(outline.sections, sizes))


def test_a_short_file_is_one_chunk_with_its_headings():
    (chunk,) = chunks("# Top\n\na\n\n## Sub\n\nb\n")
    assert (chunk.title, chunk.text) == ("Top", "a\n\n## Sub\n\nb")
    assert (chunk.document, chunk.id) == (Document.parse({"title": "Top", "text": chunk.text}), chunk.document.id)
    assert len(chunk.id) == 10


def test_headings_without_text_are_kept():
    (chunk,) = chunks("# Slides\n\n## One\n\n## Two\n")
    assert (chunk.title, chunk.text) == ("Slides", "## One\n\n## Two")
    assert [chunk.text for chunk in chunks("# Only\n")] == ["## Only"]


def test_a_chunk_is_a_subtree_or_a_part_of_one_section():
    found = chunks(markdown(MANUALS["handbook"]))
    assert all(chunk.tokens <= SIZES.most for chunk in found)
    assert {chunk.title.split(" > ")[0] for chunk in found} == {"Harbour handbook"}
    long = [chunk for chunk in found if chunk.title.endswith("> A long paragraph")]
    assert len(long) >= 2 and all(chunk.text.endswith(".") for chunk in long)  # cut between sentences


def test_code_stays_whole_if_it_fits():
    code = "```\n" + "\n\n".join(f"line_{at} = {at}" for at in range(60)) + "\n```"
    text = f"# A\n\n{sentences(Random(1), 20)}\n\n{code}\n\n{sentences(Random(2), 40)}\n"
    assert any(code in chunk.text for chunk in chunks(text))


words = st.text(alphabet="abcäß語 .\n#-|`", max_size=400)


@given(st.lists(words, max_size=12).map("\n\n".join), st.sampled_from([read_markdown, read_text]))
def test_all_text_is_in_one_chunk_in_its_order(text, read):
    outline = Outline()
    read(text.encode(), outline)
    blocks = "".join(block.text for section in outline.sections for block in section.blocks)
    found = list(cut(outline.sections, Sizes.around(32)))
    assert [chunk.start for chunk in found] == sorted(chunk.start for chunk in found)
    assert all(chunk.text and chunk.start <= chunk.stop <= len(text) for chunk in found)
    letters = [letter for chunk in found for letter in chunk.text if letter in "abcäß語"]
    titles = "".join(heading for section in outline.sections for heading in section.headings[-1:])
    assert len(letters) >= sum(letter in "abcäß語" for letter in blocks)
    assert len(letters) <= sum(letter in "abcäß語" for letter in blocks + titles)


@pytest.mark.parametrize("name", ["handbook", "guide"])
def test_an_edited_paragraph_changes_one_or_two_chunks(name):
    parts = MANUALS[name]
    before = {chunk.id for chunk in chunks(markdown(parts))}
    changed = []
    for at, part in enumerate(parts):
        if part.kind == "p":
            edited = [*parts[:at], Part("p", f"{part.text} One more sentence, of an editor."), *parts[at + 1 :]]
            changed.append(len({chunk.id for chunk in chunks(markdown(edited))} - before))
    assert min(changed) == 1 and sorted(changed)[int(0.9 * len(changed))] <= 2, changed
    assert sum(changed) / len(changed) < 1.6


def test_an_insertion_into_a_text_without_headings_changes_what_is_near():
    random = Random(4)
    paragraphs = [sentences(random, random.randint(2, 6)) for _ in range(120)]
    before = {chunk.id for chunk in chunks("\n\n".join(paragraphs), read_text)}
    changed = []
    for at in range(0, 100, 5):
        text = "\n\n".join([*paragraphs[:at], sentences(random, 4), *paragraphs[at:]])
        changed.append(len({chunk.id for chunk in chunks(text, read_text)} - before))
    assert sum(changed) / len(changed) <= 4 < len(before) / 4, changed


@pytest.mark.parametrize(
    "unit", ["a", "a ", "a. ", "a\n\n", "# a\n", "- a\n", "|", "```\na\n", "#" * 6 + " a\nb\n\n", "語"], ids=repr
)
def test_time_grows_with_the_size(unit):
    def seconds(size):
        data = (unit * (size // len(unit))).encode()
        start = process_time()
        chunks(data)
        return process_time() - start

    seconds(1000)
    few = seconds(10_000)
    assert any(seconds(80_000) < 0.1 + 16 * max(few, 0.004) for _ in range(3))


def test_sizes_have_a_least():
    with pytest.raises(ValueError, match="at least 32"):
        Sizes.around(31)
