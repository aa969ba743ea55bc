"""Which chunks come first: those that questions have used, then those of the files that changed last."""

import os

import pytest
from slotcache.retrieval.store import count_uses, likeliest
from support.notes import write

NOTES = {f"{name}.md": f"# {name}\n\nThe {name} is old.\n" for name in ("ash", "birch", "cedar", "date")}


@pytest.fixture
def folder(tmp_path):
    folder = write(tmp_path / "notes", NOTES)
    for age, path in enumerate(sorted(folder.iterdir())):
        os.utime(path, (0, 1_000_000 - age))
    return folder


@pytest.fixture
def make(make):
    def open_index():
        index = make(chunk_tokens=32)
        index.refresh()
        return index

    return open_index


def titles(index, most_tokens=10_000):
    numbers = likeliest(index.store, most_tokens)
    chunks = index.store.chunks(numbers)
    return [chunks[number].title for number in numbers]


def id_of(index, title):
    found = index.store.chunks(likeliest(index.store, 10_000)).values()
    return next(chunk.id for chunk in found if chunk.title == title)


def test_the_files_that_changed_last_come_first_each_in_its_order(make, folder):
    index = make()
    assert titles(index) == ["ash", "birch", "cedar", "date"]
    long = "".join(f"# Part {number}\n\n{'The elm of this part is tall and old. ' * 8}\n\n" for number in range(3))
    write(folder, {"elm.md": long, "copy.md": NOTES["ash.md"]})
    os.utime(folder / "elm.md", (0, 2_000_000))
    os.utime(folder / "copy.md", (0, 1_500_000))
    index.refresh()
    assert titles(index) == ["Part 0", "Part 1", "Part 2", "ash", "birch", "cedar", "date"]


def test_the_most_used_come_first_after_a_new_start_as_well(make):
    index = make()
    count_uses(index.store, {id_of(index, "date"): 1, id_of(index, "cedar"): 2})
    assert titles(index) == ["cedar", "date", "ash", "birch"]
    count_uses(index.store, {id_of(index, "date"): 2, "nothing": 3})
    assert titles(make()) == ["date", "cedar", "ash", "birch"]


def test_uses_end_with_their_chunk_and_no_other(make, folder):
    index = make()
    count_uses(index.store, {id_of(index, "date"): 1, id_of(index, "cedar"): 2})
    write(folder, {"cedar.md": "# cedar\n\nThe cedar is young.\n"})
    os.utime(folder / "cedar.md", (0, 1))
    index.refresh()
    index.store.check()
    assert titles(index) == ["date", "ash", "birch", "cedar"]


def test_the_budget_ends_the_list(make):
    index = make()
    tokens = [chunk.tokens for chunk in index.store.chunks(likeliest(index.store, 10_000)).values()]
    assert titles(index, sum(tokens[:2])) == ["ash", "birch"]
    assert titles(index, tokens[0] - 1) == []
