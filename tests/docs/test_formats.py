"""The formats of documents that docs/formats.md and docs/clients.md list, against the tables that readers are found in."""

import re

from slotcache.ordering import pasted
from slotcache.retrieval.reader import FORMATS

from docs.markdown import CODE, read, rows, section


def test_each_reader_of_files_is_described():
    described = {word.lower() for name, *_ in rows(read("docs/formats.md")) for word in re.findall(r"\w+", name)}
    suffixes: dict[object, set[str]] = {}
    for suffix, reader in FORMATS.items():
        if "<locals>" not in reader.__qualname__:  # one that is made in a function refuses its files
            suffixes.setdefault(reader, set()).add(suffix.removeprefix("."))
    assert len(suffixes) > 10
    for reader, names in suffixes.items():
        assert names & described, f"docs/formats.md has no row for {reader}"


def test_each_format_of_a_list_in_a_text_is_described():
    table = rows(section(read("docs/clients.md"), "## Documents in the text"))
    assert {name for cell, *_ in table for name in CODE.findall(cell)} == {
        *(one.name for one in pasted.FORMATS),
        pasted.NUMBERED,
    }
