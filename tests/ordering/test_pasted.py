"""Lists of documents in texts: the templates of programs, and texts that look almost like these."""

import os
import re
from importlib import import_module

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slotcache.ordering import pasted
from slotcache.ordering.pasted import FORMATS, MOST_TRIES, find_pasted
from slotcache.ordering.prompt import document_text
from support.pasted_texts import AIDER, ANYTHING, CLAUDE, LANGCHAIN, LINE, LLAMA, NUMBERED, PIECES, RECORDED, WEBUI

PARSER = import_module("re._parser")
LIVES = int(os.environ.get("SLOTCACHE_LIVES", "200"))


def unnumbered(found):
    """The documents' texts in a prompt, with the program's numbers in place of their ids."""
    texts = "".join(map(document_text, found.documents))
    return re.sub("[0-9a-f]{10}", lambda id: found.number_of.get(id[0], id[0]), texts)


@pytest.mark.parametrize("name", RECORDED)
def test_the_lists_of_programs_are_found(name):
    text, number, numbers = RECORDED[name]
    found, _ = find_pasted(text)
    assert found is not None and name.startswith(found.format)
    assert len(found.documents) == number and tuple(found.number_of.values()) == numbers
    assert unnumbered(found).rstrip() == text[found.start : found.stop].rstrip()
    assert all(id in document_text(one) for one, id in zip(found.documents, found.number_of, strict=False))


def test_each_format_has_a_recorded_list():
    assert {found.format for text, *_ in RECORDED.values() if (found := find_pasted(text)[0])} == {
        *(one.name for one in FORMATS),
        pasted.NUMBERED,
    }


@pytest.mark.parametrize("name", RECORDED)
def test_a_document_does_not_depend_on_its_place_or_its_number(name):
    text = RECORDED[name][0]
    found, _ = find_pasted(text)
    assert found is not None
    texts = list(map(document_text, found.documents))
    turned = text[: found.start] + "".join(reversed(texts)) + text[found.stop :]
    for id, number in zip(found.number_of, ("7", "8", "9") if "lines" not in name else ("1", "2"), strict=False):
        turned = turned.replace(id, number)
    again, _ = find_pasted(turned)
    if found.format != "numbered":  # which are numbered in order
        assert again is not None and [document_text(one) for one in again.documents] == texts[::-1]


def test_names_that_all_documents_have_are_their_ids():
    assert [one.id for one in (find_pasted(AIDER)[0] or pytest.fail()).documents] == ["src/tides.py", "src/ports.py"]
    twice, _ = find_pasted(LLAMA.replace("ports.md", "tides.pdf"))
    assert twice is not None and not twice.is_named and len({one.id for one in twice.documents}) == 2


def test_a_document_that_stands_twice_is_shown_once():
    found, _ = find_pasted(ANYTHING.replace("The port closes at low tide.", "The moon raises two tides a day."))
    assert found is not None and len(found.documents) == 1 and list(found.number_of.values()) == ["0"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (WEBUI.replace("</context>", ""), "does not end"),
        (WEBUI.replace("day.</source>", "day."), "begins within another"),
        (WEBUI.replace("\n</context>", "\nMore text.\n</context>"), "other text"),
        (WEBUI.replace("too.</source>", "too."), "no end"),
        (WEBUI.replace("The sun raises tides, too.", " "), "no text"),
        (ANYTHING.replace("[END CONTEXT 1]", "[END CONTEXT 2]"), "no end"),
        (CLAUDE.replace("document_content", "content"), "lacks a part"),
        (AIDER.replace('print("ports")', "```bash\nls\n```"), "fence"),
        (NUMBERED.replace("Question:", "The port is old."), "where an entry ends"),
        (NUMBERED.replace("day.", "day.\n\nIt is far."), "where an entry ends"),
        (NUMBERED.replace("open?", "open? Cite as [1]."), "names its numbers"),
    ],
)
def test_a_list_that_does_not_fit_to_its_end_is_left_alone(text, why):
    found, left = find_pasted(text)
    assert found is None and any(why in one.why for one in left), left


@pytest.mark.parametrize(
    "text",
    ["", "Hello [1].", "a[1] = 2", "See [1](https://a.example).", "<context></context>", "<source>", "```\ncode\n```",
     "[1] Only one entry.", "```src/a.py\nprint()\n```\nWhat is it?", "Context:\nnothing", "<documents></documents>"],
)  # fmt: skip
def test_other_texts_have_none(text):
    assert find_pasted(text) == (None, [])


def test_of_two_lists_one_is_taken():
    found, left = find_pasted(f"{NUMBERED}\n\n{WEBUI}")
    assert found is not None and found.format == "open-webui"
    assert [one.format for one in left] == ["numbered"]
    taken, left = find_pasted(LANGCHAIN)
    assert taken is not None and "An example" not in unnumbered(taken) and left[0].why.startswith("another list")


def test_a_list_with_too_many_documents_stays():
    found, left = find_pasted(WEBUI, most=2)
    assert found is None and "10,000" in left[0].why


# ---- the time ----------------------------------------------------------------------------------------------------------


def patterns():
    named = [one for one in vars(pasted).values() if isinstance(one, re.Pattern)]
    return named + [one for format in FORMATS for one in (format.before, format.opening, format.has)]


def repeats(parsed):
    for op, value in parsed:
        if str(op) in ("MAX_REPEAT", "MIN_REPEAT"):
            yield value[1]
        for part in value if isinstance(value, tuple | list) else [value]:
            for inner in part if isinstance(part, list) else [part]:
                if isinstance(inner, PARSER.SubPattern):
                    yield from repeats(inner)


def test_no_pattern_repeats_without_a_bound():
    found = [most for pattern in patterns() for most in repeats(PARSER.parse(pattern.pattern))]
    assert len(found) > 20 and max(found) <= 400


ALMOST = {
    "open-webui": '<context>\n<source id="1" name="a">',
    "attributes": '<context>\n<source id="1" a="x" a="x" a="x" a="x" a="x" a="x"',
    "anythingllm": "Context:\n[CONTEXT 1]:\nx\n",
    "claude": '<documents><document index="1"><document_content>',
    "librechat": "to the conversation:<file><filename>a</filename><context>",
    "items": "</filename><context><contextItem>",
    "aider": "the files' contents.\n\na\n```\nx\n",
    "continue": "```a.py\nx\n```\n",
    "fences": "```a.py\nx\n```x\n",
    "llamaindex": f"{LINE}\nfile_path: a\n\nx\n",
    "cited": "------\nSource 1:\nx",
    "langchain": "=========\nContent: x\n=========\n",
    "numbered": "\n\n[1] x",
    "unlike": "\n\n[1] x\n\ny\n\n[2] z",
    "space": " \n",
}


@pytest.mark.parametrize("name", ALMOST)
def test_almost_tags_are_read_a_few_times(name, monkeypatch):
    """What is read grows as the text does: no more often, and each time it is no longer than the text."""
    num_read: list[int] = []

    def counted(read):
        def count(*given):
            text, start = given[-2:]
            num_read[-1] += len(text) - start
            return read(*given)

        return count

    for reader in ("_closed", "_open", "_entries"):
        monkeypatch.setattr(pasted, reader, counted(getattr(pasted, reader)))
    for size in (1 << 19, 1 << 20):
        num_read.append(0)
        find_pasted(ALMOST[name] * (size // len(ALMOST[name])))
        assert num_read[-1] <= (MOST_TRIES + 1) * len(FORMATS) * size
    assert num_read[1] <= 3 * num_read[0] + 1000


# ---- texts that look almost like lists ---------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(PIECES), max_size=24).map("".join))
@settings(max_examples=LIVES)
@example('<context>\n<source id="1">x</source></context>')
@example("[1] x\n\n[2] x")
@example("```a.py\nx\n``````a.py\nx\n```")
def test_nothing_is_lost_or_made(text):
    found, _ = find_pasted(text)
    if found is None:
        return
    rest = plain(text[found.start : found.stop])
    shown = sorted({plain(document_text(one)) for one in found.documents}, key=len, reverse=True)
    while rest:  # a document that stands twice is shown once
        rest = rest.removeprefix(next(one for one in shown if rest.startswith(one)))


def plain(text):
    """A text without its spaces, and with all numbers and ids alike."""
    return re.sub(r"[0-9a-f]{10}|\d|\s", lambda found: "" if found[0].isspace() else "#", text)
